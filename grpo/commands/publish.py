"""Publish a run's checkpoint: a folder with weights, tokenizer and model card, and optionally an upload to the Hub."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import validate_repo_id

from grpo.commands.model_card import METADATA, about_checkpoint, draw_curve, model_card
from grpo.common.errors import UserError, reason
from grpo.common.files import atomic_folder, require_keys
from grpo.models.tokenizer import require_own
from grpo.reporting.charts import save_figure
from grpo.results.runs import Run, read_run
from grpo.study import paths
from grpo.study.effective import effective_run
from grpo.study.schema import Study

PUBLISHED = Path("published")
RECORDED = ("method", "task", "evaluation", "model", "train", "validation", "identity")  # keys of config.yaml for the card


def publish(study: Study, name: str, kind: str, out: Path | None, repo: str | None, license: str | None) -> list[str]:
    """Write the folder, and if asked for the repository on the Hub.

    Args:
        name: the run as EXPERIMENT/ARM/SEED.
        kind: of the checkpoint, such as ``best`` or ``last``.
        out: the folder; None: named after the run, in published/.
        repo: repository on the Hub; None: no upload.
        license: of the weights; None: the card states none.

    Returns lines that say what was done.

    Raises:
        UserError: no such run or checkpoint, a link in it, the folder is not empty, there is no token, or the upload fails.
    """
    run = _find_run(study, name)
    source = _find_checkpoint(run, kind)
    target = out or PUBLISHED / f"{name.replace('/', '--')}-{kind}"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: already exists and is not empty. Remove it, or name another folder with --out.")
    if repo is not None:
        _require_upload_can_begin(repo)
    try:
        require_own(source.parent, [source, *source.rglob("*")])
    except ValueError as error:
        raise UserError(f"{source}: {error}.") from error
    card, figure = model_card(study, run, source, kind, license), draw_curve(run, about_checkpoint(run, source)["step"])
    with atomic_folder(target) as folder:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(METADATA), dirs_exist_ok=True)
        save_figure(figure, folder / "curve.png")
        card.save(folder / "README.md")
    lines = [f"{target}: {kind} checkpoint of {name}, with its model card (README.md)"]
    if run.config["same_as"]:
        lines.append(f"{name} equals {run.config['same_as']}; this is the checkpoint of that run")
    return [*lines, *([_upload(target, repo, name)] if repo is not None else [])]


def _find_run(study: Study, name: str) -> Run:
    parts = re.fullmatch(r"([^/]+)/([^/]+)/(\d+)", name)
    if not parts:
        raise UserError(f"{name}: not a run. Name it as EXPERIMENT/ARM/SEED, such as grpo_learning_rate/3e-4/0.")
    experiment, arm, seed = parts[1], parts[2], int(parts[3])
    effective_run(study, experiment, arm, seed, [])  # raises UserError if the study has no such run
    run = read_run(experiment, arm, seed)
    require_keys(paths.RUNS / name / "config.yaml", run.config, RECORDED, paths.stage_of_run(name))
    return run


def _find_checkpoint(run: Run, kind: str) -> Path:
    """The folder with the weights; a run that was taken over has those of the run that it equals."""
    owner = run.config["same_as"] or run.name
    source = paths.CHECKPOINTS / owner / kind
    if any(source.glob("*.safetensors")):
        return source
    kept = sorted(path.parent.name for path in (paths.CHECKPOINTS / owner).glob(f"*/{METADATA}"))
    there = f"Choose another with --kind: {', '.join(kept)}. " if kept else ""
    raise UserError(
        f"{source}: no checkpoint. {there}`checkpoints:` in params.yaml says which are kept; "
        f"`dvc checkout {paths.CHECKPOINTS / owner}` or `dvc pull` brings back a stored one."
    )


def _require_upload_can_begin(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise UserError(f"--repo {repo}: {reason(error)} Name it as OWNER/NAME.") from error
    if get_token() is None:
        raise UserError(f"--repo {repo}: no token for the Hub. Set HF_TOKEN, or run `hf auth login`, or leave out --repo.")


def _upload(folder: Path, repo: str, run: str) -> str:
    """Upload the folder. A new repository is private, so that its card can be checked before others see it."""
    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
        commit = HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{run}, by grpo publish")
    except Exception as error:  # whatever the network, the proxy or the Hub raises
        raise UserError(
            f"--repo {repo}: the upload failed ({reason(error)}). {folder} is complete: check HF_TOKEN and the network, then "
            f"run `hf upload {repo} {folder}`."
        ) from error
    return f"uploaded: {commit.commit_url}"
