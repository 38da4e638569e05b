"""One run in a store, for any holder of its keys: its state, and an operator's writes. It needs no node."""
