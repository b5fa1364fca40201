"""Training of a run: the loops of the three methods, with evaluation, saved states and results."""
