"""The calls of a node, each written once, of which both handlers make methods."""
