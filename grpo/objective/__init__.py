"""Pure functions over tensors: advantages, policy-gradient losses, masked aggregation, log-probabilities, entropy."""
