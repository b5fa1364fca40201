"""`python data/kissing_number/evaluator.py PROGRAM`: run and check a program, and print the verdict."""

import sys
from pathlib import Path

from grpo.common.errors import UserError
from grpo.discovery.verifier import verify_program

if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("Name one program: python data/kissing_number/evaluator.py data/kissing_number/program.py", file=sys.stderr)
        sys.exit(2)
    try:
        verdict = verify_program(Path(sys.argv[1]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for name in ("num_points", "dimension", "validity"):
        print(f"{name}: {getattr(verdict, name)}")
    if verdict.message:
        print(f"message: {verdict.message}")
    sys.exit(0 if verdict.validity else 1)
