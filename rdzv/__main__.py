"""`python -m rdzv` is the `rdzv` command, and so is the script of that name."""

try:
    from rdzv.cli.main import main
except KeyboardInterrupt:  # whoever is quick with Ctrl-C sees no traceback
    raise SystemExit(130) from None

if __name__ == "__main__":
    raise SystemExit(main())
