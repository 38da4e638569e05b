"""Pure: the messages to a display that follows a run."""
