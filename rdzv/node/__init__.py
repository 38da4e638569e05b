"""Shell: one node's part in a run: it arrives, follows, coordinates if it must, and leaves."""
