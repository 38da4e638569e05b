"""A store that several hosts may serve in turn: which host may serve it, what nodes carry to the next store."""
