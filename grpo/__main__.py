"""`python -m grpo`."""

from grpo.cli import main

main()
