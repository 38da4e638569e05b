"""`rdzv run`, which runs a command under rendezvous, with its processes and their guards."""
