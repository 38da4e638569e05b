"""Pure: the members of a round that are alive and do not progress."""
