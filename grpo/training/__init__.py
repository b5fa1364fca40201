"""Training: the loops of the methods, with evaluation, saved state and the record of a run."""
