"""Models: architecture, attention, adapters, tokenizer, checkpoints, and sharding over processes; here their folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grpo.common.errors import UserError, from_here
from grpo.common.files import how_to_restore, read_json
from grpo.common.imports import named_file
from grpo.study import paths

if TYPE_CHECKING:  # a measurement on a bare machine has no pydantic
    from grpo.study.settings import HubModel, LocalModel


def folder_of(model: HubModel | LocalModel, where: str, weights: bool = True) -> Path:
    """Return the folder of a model, after downloading it if it is on the Hub.

    Args:
        where: the model's key in params.yaml, for messages.
        weights: download the weights too, not only configuration and tokenizer.

    Raises:
        UserError: the download fails.
    """
    if model.source == "local":
        return named_file(model.path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        wanted = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.safetensors"] if weights else [])]
        return Path(snapshot_download(model.repo, revision=model.revision, allow_patterns=wanted))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"params.yaml: {where}.repo: {model.repo} at revision {model.revision} could not be downloaded "
            f"({type(error).__name__}). Check the network and HF_TOKEN, or download it elsewhere "
            "and use `{source: local, path: FOLDER}`."
        ) from error


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
    if place.parent == paths.MODELS:
        return place, f"model@{place.name}"
    if paths.CHECKPOINTS in place.parents and len(place.relative_to(paths.CHECKPOINTS).parts) >= 3:
        run = "/".join(place.relative_to(paths.CHECKPOINTS).parts[:3])
        return paths.CHECKPOINTS / run, paths.stage_of_run(run)
    return place, ""
