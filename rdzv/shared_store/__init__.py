"""The shared store of a round, like `torch.distributed.Store`; it rejects nodes outside the round."""
