"""Shell: torchrun's agents: their screen, the ends of their workers, and runs without a name."""
