"""Tables of the public calls, each in many states: `calls` has the rows, `states` the columns."""
