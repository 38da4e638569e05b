"""Shell: the coordinator: its election, and its work during a term."""
