"""Measure peak memory: torch's on a GPU, resident memory on the CPU."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path


def reset_peak(device: str) -> None:
    """Start a new measurement.

    Args:
        device: ``cpu``, or the GPU on which the work is done, such as ``cuda:1``. In a process with two GPUs ``cuda`` would be
            the engine's.
    """
    if device != "cpu":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    # Linux only (proc_pid_clear_refs(5)); elsewhere the peak covers the whole life of the process.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mb(device: str) -> float:
    """Peak memory of a device in MiB since :func:`reset_peak`."""
    if device != "cpu":
        import torch

        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
