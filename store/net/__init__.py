"""Addresses, dialing, sockets, and threads with an event loop."""
