"""`python -m grpo`."""

from grpo.cli import entry

entry()
