"""A node's thread, its connection to a store, and its watch on the head of the run."""
