"""The grader, which decides whether an answer equals the ground truth, and its worker processes."""
