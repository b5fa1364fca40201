"""The largest memory that a process has held within a stretch of time: torch's on a GPU, or else resident memory."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path


def reset_peak(device: str) -> None:
    """Begin a new stretch.

    Args:
        device: what is measured: ``cpu``, or the GPU on which the work is done (``cuda:1``; ``cuda`` is the current one). It
            has to be said, as the current GPU of a process with two is the engine's.
    """
    if device != "cpu":
        import torch  # only here: where a GPU is measured it has long been imported

        torch.cuda.reset_peak_memory_stats(device)
        return
    # Linux only (proc_pid_clear_refs(5)); elsewhere the peak is that of the whole process.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mb(device: str) -> float:
    """Largest memory of a device in MiB since :func:`reset_peak`."""
    if device != "cpu":
        import torch

        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
