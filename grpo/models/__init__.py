"""Checkpoints: loading, saving, and the mini model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from grpo.errors import UserError


def require_checkpoint(folder: Path) -> None:
    """Raise UserError unless ``folder`` holds a model; the message says where the model is, if that is known."""
    if (folder / "config.json").exists():
        return
    kinds = [kind for kind in ("last", "best") if (folder / kind / "config.json").exists()]
    if kinds:
        raise UserError(f"{folder}: a run's folder holds no model itself. Use {' or '.join(str(folder / k) for k in kinds)}.")
    for of_run in (folder, folder.parent):
        if (of_run / "metadata.json").exists() and of_run.parent.parent.name == "checkpoints":
            twin = json.loads((of_run / "metadata.json").read_text(encoding="utf-8")).get("same_as")
            if twin:
                raise UserError(f"{folder}: this run is the same as {twin}; its weights are in {of_run.parent.parent / twin}.")
    raise UserError(f"{folder}: holds no model (config.json is missing). Run `dvc repro model` to make it.")
