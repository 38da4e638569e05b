"""Pure: what a user may say, and the error for everything else."""
