"""The training objective (losses, advantages, masking, KL, mismatch) and the learner that optimizes it."""
