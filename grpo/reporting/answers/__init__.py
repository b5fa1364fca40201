"""Answers to the handouts' questions from result files (reports/answers.md)."""
