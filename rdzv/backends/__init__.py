"""Which handler a URL means: the built-in schemes, the registry for others, and the store that a node hosts."""
