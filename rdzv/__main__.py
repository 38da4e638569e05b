"""Run the `rdzv` command by `python -m rdzv`, or by the script `rdzv`."""

try:
    from store.net.standard_streams import reserve_standard_streams

    reserve_standard_streams(for_command=True)  # before anything else opens a file
    from rdzv.cli.main import main
except KeyboardInterrupt:  # no traceback for an early Ctrl-C
    raise SystemExit(130) from None

if __name__ == "__main__":
    raise SystemExit(main())
