"""Models: architecture, attention, adapters, tokenizer, checkpoints, and sharding over processes."""

from __future__ import annotations

from pathlib import Path

from grpo.common.errors import UserError, from_here
from grpo.common.files import how_to_restore, read_json
from grpo.study import paths


def require_checkpoint(folder: Path) -> None:
    """Raise UserError unless ``folder`` holds a model; the message says where the model is, if known."""
    if (folder / "config.json").exists():
        return
    kinds = [kind for kind in ("last", "best") if (folder / kind / "config.json").exists()]
    if kinds:
        raise UserError(f"{folder}: a run's folder holds no model itself. Use {' or '.join(str(folder / k) for k in kinds)}.")
    _, stage = _output_and_stage(folder)
    for of_run in (folder, folder.parent):
        if (of_run / "metadata.json").exists() and of_run.parents[2].name == "checkpoints":
            same_as = read_json(of_run / "metadata.json", stage, keys=("run",)).get("same_as")
            if same_as:
                raise UserError(
                    f"{folder}: this run is the same as {same_as}; its weights are in {of_run.parents[2] / same_as}."
                )
    remedy = f"Run `dvc repro {stage}` to make it." if stage else "Name a folder in Hugging Face format."
    raise UserError(f"{folder}: holds no model (config.json is missing). {remedy}")


def how_to_restore_checkpoint(folder: Path) -> str:
    """How to restore a damaged checkpoint: with its stage, or, outside the study's outputs, from its source."""
    output, stage = _output_and_stage(folder)
    return how_to_restore(output, stage) if stage else "Get it anew from where it came from."


def _output_and_stage(folder: Path) -> tuple[Path, str]:
    """The DVC output of a checkpoint, and the stage that makes it; an empty stage outside the study's outputs."""
    place = from_here(folder)
    if paths.MODELS in place.parents:
        task = place.relative_to(paths.MODELS).parts[0]
        return paths.MODELS / task, f"model@{task}"
    if paths.CHECKPOINTS in place.parents and len(place.relative_to(paths.CHECKPOINTS).parts) >= 3:
        run = "/".join(place.relative_to(paths.CHECKPOINTS).parts[:3])
        return paths.CHECKPOINTS / run, paths.stage_of_run(run)
    return place, ""
