"""Pure: what a rendezvous is: its records, how a view of them is folded, what is decided, and in which order."""
