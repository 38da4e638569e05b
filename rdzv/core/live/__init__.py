"""Pure: the messages to a display that stays open: a run, and its changes."""
