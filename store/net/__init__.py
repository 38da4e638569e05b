"""Addresses, dialing, sockets, and threads with a loop."""
