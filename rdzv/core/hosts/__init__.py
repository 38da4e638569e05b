"""Pure: a store that several hosts may serve in turn: when a process may, and what nodes carry to the next."""
