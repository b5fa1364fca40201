"""`make repro`: ask DVC what is stale, and run Snakemake (which takes seconds to start) only if something is.

This process stays until Snakemake ends. It passes signals on to all of Snakemake's processes: told alone to end, as by `docker
stop`, Snakemake would wait for the stages that run.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from errno import EACCES, EDQUOT, ENOSPC, EPERM, EROFS
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from plan import WHAT_NEXT, make_plan, only_one_here
from with_gpus import end_of, when_parent_dies

from grpo.common.errors import UserError, reason
from grpo.common.files import require_writable

# Each stage prints a line itself (with_gpus.py); Snakemake prints its warnings and errors into its log.
PROFILE = "workflow/profiles/local"
SNAKEMAKE = ["snakemake", "--profile", PROFILE, "--quiet", "rules", "progress", "host", "--config", "plan_is_made=true"]
LOG = Path("logs/snakemake.log")
WRITTEN = (".stamps", "logs", "data", "reports", ".dvc/tmp", ".snakemake")
NO_SPACE = "The disk or your quota is full. Free some space, or move DVC's cache to another disk (docs/tracking.md)."
REMEDIES = dict.fromkeys((ENOSPC, EDQUOT), NO_SPACE) | {
    EROFS: "It lies on a disk that is mounted read-only. Copy the project to one that you can write.",
    **dict.fromkeys(
        (EACCES, EPERM),
        "You may not write it. If root or another person made it, let the owner share it with your group"
        " (chmod -R g+rwX), or make it yours: sudo chown -R $(id -u) .",
    ),
}


def main() -> int:
    """Bring the study up to date; return an exit code."""
    start = time.perf_counter()
    try:
        for folder in WRITTEN:
            require_writable(Path(folder))
        with only_one_here():
            if make_plan():
                return run_snakemake()
    except UserError as error:
        message = str(error)
    except (OSError, sqlite3.Error) as error:
        message = explained(error)
    else:
        print(f"All stages are up to date ({time.perf_counter() - start:.1f} s). {WHAT_NEXT}")
        return 0
    print(f"error: {message}", file=sys.stderr)
    return 2


def explained(error: OSError | sqlite3.Error) -> str:
    """Describe an error of the system in one message with its path and remedy."""
    if isinstance(error, OSError):
        what = f"{error.filename or Path.cwd()}: {error.strerror or reason(error)}."
        return f"{what} {REMEDIES.get(error.errno or 0, '')}".strip()
    from dvc.dirs import site_cache_dir

    if "full" in str(error):
        return f"{Path.cwd()}: {error}. {NO_SPACE}"
    return (
        f"{site_cache_dir()}/repo: DVC's database of known files cannot be used ({error}). Remove this folder while no DVC"
        " runs; it is made again, and nothing of a study is in it."
    )


def run_snakemake() -> int:
    """Run Snakemake in a process group of its own; pass on signals and return its exit code.

    What Snakemake itself prints is in its log, and shown if no stage has told why it failed.
    """
    with LOG.open("w") as log:
        process = subprocess.Popen(
            SNAKEMAKE, stdin=subprocess.DEVNULL, stderr=log, process_group=0,
            preexec_fn=lambda: when_parent_dies(signal.SIGKILL),
        )  # fmt: skip
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(signum, lambda signum, _: os.killpg(process.pid, signum))
    code = end_of(process)
    text = LOG.read_text(errors="replace")
    if code and "CalledProcessError" not in text:
        print(text, file=sys.stderr)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
