"""One node's part in a run: it arrives, watches the run's keys, coordinates if elected, and leaves."""
