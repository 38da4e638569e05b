"""The display of a run on a terminal and in a browser: its state, its history, its timeline, its cost."""
