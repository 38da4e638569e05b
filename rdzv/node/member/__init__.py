"""A node's own seat in its run: it arrives, waits for a round that holds it, is a member, and withdraws."""
