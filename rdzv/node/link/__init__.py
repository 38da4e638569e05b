"""A node's thread, its connection to a store, and its watch on the run's head."""
