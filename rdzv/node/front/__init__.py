"""The fronts of a node: what its callers hold, made of one list of verbs."""
