"""Shell: addresses, dialing, sockets, and threads with a loop."""
