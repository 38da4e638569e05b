"""The members of a round that are alive but make no progress."""
