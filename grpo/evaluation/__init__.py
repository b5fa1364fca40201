"""Evaluation: scoring completions on fixed problems, and the statistics of the scores."""
