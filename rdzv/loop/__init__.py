"""One loop over a run's rounds, for training code: `rdzv.rounds` and its blocking twin."""
