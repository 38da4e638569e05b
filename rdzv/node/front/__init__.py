"""The calls of a node, from which the async and the blocking handler make their methods."""
