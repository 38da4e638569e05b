"""At import, raises an `ImportError` with a remedy on a system where the store does not run, such as Windows."""

import sys

try:
    import fcntl  # noqa: F401  imported only to see if it exists
    import resource  # noqa: F401  imported only to see if it exists
except ImportError as _error:
    raise ImportError(
        f"rdzv and its store run on Linux and macOS, and Python has no {_error.name} on {sys.platform}: use WSL 2 on "
        "Windows"
    ) from None
