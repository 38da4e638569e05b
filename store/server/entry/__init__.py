"""Shell: who is let in: listening sockets, TLS handshakes, and the room kept for those who prove who they are."""
