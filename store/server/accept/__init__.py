"""Accepts connections: listening sockets, TLS handshakes, limits for unauthenticated ones."""
