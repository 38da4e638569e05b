"""A node's own membership in its run: it arrives, waits for its round, is a member, and withdraws."""
