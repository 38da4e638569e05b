"""The front of a node: its calls, each written once, of which both handlers make methods."""
