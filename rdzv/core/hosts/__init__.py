"""Pure: several hosts that may serve the store in turn: which one may, and what nodes carry to the next store."""
