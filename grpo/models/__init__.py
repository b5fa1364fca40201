"""Checkpoints: loading, saving, and the mini model's tokenizer."""
