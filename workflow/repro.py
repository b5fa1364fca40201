"""`make repro`: ask DVC first, and start Snakemake only where a stage is stale, as that alone takes seconds."""

from __future__ import annotations

import os
import sys
import time

from plan import PlanError, make_plan

WHAT_NEXT = "The report is reports/index.html; `make ui` shows the runs."


def main() -> int:
    """Returns an exit code, where it does not become Snakemake."""
    start = time.perf_counter()
    try:
        stale = make_plan(to_run=True)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if stale:
        os.environ["STUDY_PLANNED"] = "1"
        os.execvp("snakemake", ["snakemake", "--profile", "local"])
    print(f"All stages are up to date ({time.perf_counter() - start:.1f} s). {WHAT_NEXT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
