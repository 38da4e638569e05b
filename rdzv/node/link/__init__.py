"""Shell: what a node stands on: its thread, its connection to a store, and its watch on the head of the run."""
