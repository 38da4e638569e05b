"""`python -m rdzv` is the `rdzv` command, and so is the script of that name."""

try:
    from store.net.standard_streams import open_standard_streams

    open_standard_streams(for_command=True)  # before anything else opens a file
    from rdzv.cli.main import main
except KeyboardInterrupt:  # whoever is quick with Ctrl-C sees no traceback
    raise SystemExit(130) from None

if __name__ == "__main__":
    raise SystemExit(main())
