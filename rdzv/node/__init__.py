"""One node's part in a run: it arrives, follows the head, coordinates if elected, and leaves."""
