"""Waiting for what another process does."""

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """What ``condition`` gives once it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not come true in {seconds} s"
        time.sleep(0.01)
    return found
