"""Pure: what a display that stays open has to be told of a run, and of its changes."""
