"""The display of a run on a terminal and in a browser."""
