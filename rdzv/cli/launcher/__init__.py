"""`rdzv run`, which runs a command under rendezvous: its processes, and guards that kill them if it dies."""
