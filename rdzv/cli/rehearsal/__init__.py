"""Subcommands by which a failure is rehearsed in a run of one's own."""
