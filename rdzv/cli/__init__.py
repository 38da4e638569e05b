"""The `rdzv` command."""
