"""The largest memory a process has held within a stretch of time: on the GPU where torch uses one, else resident memory."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def reset_peak() -> None:
    """Begin a new stretch."""
    if (cuda := _cuda()) is not None:
        cuda.reset_peak_memory_stats()
        return
    # Linux only (proc_pid_clear_refs(5)); elsewhere the peak is that of the whole process.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mb() -> float:
    """Largest memory in MiB since :func:`reset_peak`."""
    if (cuda := _cuda()) is not None:
        return float(cuda.max_memory_allocated()) / 2**20
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def _cuda() -> Any:
    torch = sys.modules.get("torch")  # not imported for this
    return torch.cuda if torch is not None and torch.cuda.is_available() else None
