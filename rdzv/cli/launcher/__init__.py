"""Shell: what `rdzv run` does: a command under rendezvous, its processes and their guards."""
