"""How a run is shown to people, on a terminal and in a browser: its state, its history, its timeline, what it cost."""
