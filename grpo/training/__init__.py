"""Training: pretraining of the mini model, the learner, and the GRPO loop."""
