"""Tasks: problems, the prompt they are put in, and (in :mod:`grpo.tasks.rewards`) the reward they are scored with."""
