"""Saved states for tests whose subject is something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from grpo.training.state import Part, SavedState


def never_saved(folder: Path) -> SavedState:
    """A new run's, which saves nothing."""
    return saved_every(10**9, folder, {})


def saved_every(steps: int, folder: Path, parts: Mapping[str, Part]) -> SavedState:
    """A new run's, without checkpoints."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return SavedState(folder / "state", steps, parts, folder / "checkpoints")
