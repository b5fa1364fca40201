"""The objective (losses, advantages, masking, KL, mismatch), and the learner that takes optimizer steps on it."""
