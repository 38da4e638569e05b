"""The handler for a URL: built-in schemes, the registry for others, and the store that a node hosts."""
