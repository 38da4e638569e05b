"""The handler for a URL: built-in and registered schemes; and the store that a node hosts."""
