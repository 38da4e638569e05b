"""One run in a store, for nodes and operators: its state, and an operator's writes."""
