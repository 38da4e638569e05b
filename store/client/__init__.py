"""The clients of a store server, awaited and blocking."""
