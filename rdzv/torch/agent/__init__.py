"""Shell: what belongs to torchrun and its agents alone: what they say, hear of each other, and runs without a name."""
