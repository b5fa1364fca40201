"""Waiting for what another process does."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """What ``condition`` gives once it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not come true in {seconds} s"
        time.sleep(0.01)
    return found


@contextmanager
def started(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block at the latest; ``Popen`` would wait for it, so that a failed test would not end."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()
