"""Tests beside other libraries find the tasks in `examples/`."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
