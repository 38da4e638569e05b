"""The release, said once: `rdzv.__version__`, `rdzv --version`, and what the package is built with."""

__version__ = "0.1.0"
