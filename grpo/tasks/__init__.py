"""Tasks: problems, the prompt they are put in, and (in :mod:`grpo.rewards`) the reward they are scored with."""
