"""Pure: what the store is: its keys, leases, watches, waits and sessions; told the time, handed the requests."""
