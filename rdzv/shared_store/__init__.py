"""What the members of one round share: the interface of `torch.distributed.Store`, fenced."""
