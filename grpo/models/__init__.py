"""Checkpoints: loading, saving, and the mini model's tokenizer."""

from __future__ import annotations

from pathlib import Path

from grpo.errors import UserError


def require_checkpoint(folder: Path) -> None:
    """Raise UserError unless ``folder`` holds a model."""
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: holds no model (config.json is missing). Run `dvc repro model` to make it.")
