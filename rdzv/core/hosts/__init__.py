"""A store that hosts serve in turn: the choice of the host, and the knowledge that nodes carry to the next store."""
