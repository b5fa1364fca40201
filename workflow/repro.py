"""`make repro`: ask DVC what is stale, and start Snakemake (which takes seconds) only if something is."""

from __future__ import annotations

import os
import sys
import time

from plan import WHAT_NEXT, make_plan, only_one_here

from grpo.common.errors import UserError

# Each stage prints a line itself (with_gpus.py); Snakemake prints its warnings and errors.
SNAKEMAKE = ["snakemake", "--profile", "local", "--quiet", "rules", "progress", "host", "--config", "plan_is_made=true"]


def main() -> int:
    """Replace this process by Snakemake, or return an exit code."""
    start = time.perf_counter()
    try:
        with only_one_here():
            stale = make_plan()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if stale:
        os.execvp("snakemake", SNAKEMAKE)
    print(f"All stages are up to date ({time.perf_counter() - start:.1f} s). {WHAT_NEXT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
