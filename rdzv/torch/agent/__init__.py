"""The agents of torchrun: their log lines, signals, ends of workers, and runs without a name."""
