"""The server: sockets, turns, outboxes and the journal around the engine."""
