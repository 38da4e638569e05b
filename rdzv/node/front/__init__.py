"""The fronts of a node: the handlers of its callers, made of one list of verbs."""
