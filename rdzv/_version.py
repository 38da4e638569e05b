"""The release, for `rdzv.__version__`, `rdzv --version` and the build."""

__version__ = "0.1.0"
