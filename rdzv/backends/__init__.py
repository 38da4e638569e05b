"""The handlers by URL scheme, built-in and registered, and the store that a node hosts."""
