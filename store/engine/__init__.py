"""The state of the store: keys, leases, watches, waits and sessions, changed by requests and by time."""
