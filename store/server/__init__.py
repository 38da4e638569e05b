"""The server: sockets, scheduling, outboxes and the journal around the engine."""
