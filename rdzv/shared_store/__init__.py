"""The shared store of one round's members: the interface of `torch.distributed.Store`, fenced."""
