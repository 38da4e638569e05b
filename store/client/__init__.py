"""Shell: the clients of a store server, awaited and blocking, and the keeper of their leases."""
