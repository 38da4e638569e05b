"""`python -m rdzv` is the `rdzv` command."""

from rdzv.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
