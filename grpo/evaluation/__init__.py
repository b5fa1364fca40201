"""Evaluation of policies on fixed problems."""
