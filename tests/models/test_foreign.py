"""Limits of foreign code."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo.models.foreign import keep_limits


def note(file: Path) -> None:
    with file.open("a") as notes:
        notes.write(f"{os.getpid()}\n")


def loop() -> None:
    while True:
        pass


def fail() -> None:
    raise ValueError("which the caller handles")


def test_a_batch_takes_one_process_and_a_call_beyond_the_limits_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine: Any = partial(note, tmp_path / "notes")
    assert keep_limits([fine, fail, fine, fine]) == [True] * 4
    first, *others = (tmp_path / "notes").read_text().split()
    assert others == [first] * 2 and int(first) != os.getpid()
    monkeypatch.setattr("grpo.models.foreign.SECONDS", 0.2)
    monkeypatch.setattr("grpo.models.foreign.BYTES", 64 << 20)
    assert keep_limits([fine, loop, fine, fail, lambda: bytes(1 << 28)]) == [True, False, True, True, False]
