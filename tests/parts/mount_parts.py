"""A small file system of its own, which is gone at the end however that comes."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@contextmanager
def tmpfs(point: Path | str, megabytes: int) -> Iterator[None]:
    """Mount one at ``point``; SIGTERM, which `timeout` sends, ends the tests as Ctrl-C does, so that it is unmounted then too.

    Raises:
        OSError: there is no `mount`.
        CalledProcessError: this process may not mount.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(point)]
        subprocess.run(command, check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(point)], check=True)
    finally:
        signal.signal(signal.SIGTERM, before)


@cache
def can_mount() -> bool:
    """Whether this process may mount a file system."""
    try:
        with tempfile.TemporaryDirectory() as point, tmpfs(point, 1):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
