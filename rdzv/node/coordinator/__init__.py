"""The coordinator: its election, and its work during a term."""
