"""One run in a store, for whoever has its keys: what stands there, and what an operator writes. It needs no node."""
