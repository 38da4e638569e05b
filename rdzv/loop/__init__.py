"""One loop over the rounds of a run, for those who train in it: `rdzv.rounds` and its blocking twin."""
