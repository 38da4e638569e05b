"""Shell: what PyTorch's agent does not do by itself with its workers."""
