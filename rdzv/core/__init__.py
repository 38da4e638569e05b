"""The rendezvous itself: its records, the coordinator's view of them, its decisions, and their order."""
