"""The logic of a rendezvous: a run's records, the coordinator's view of them, and its decisions."""
