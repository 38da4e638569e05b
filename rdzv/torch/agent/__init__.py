"""The agents of torchrun: their screen, the ends of their workers, and runs without a name."""
