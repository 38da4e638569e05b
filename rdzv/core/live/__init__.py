"""The messages to a display that follows a run."""
