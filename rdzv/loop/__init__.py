"""One loop over the rounds of a run, for training code: `rdzv.rounds` and its blocking twin."""
