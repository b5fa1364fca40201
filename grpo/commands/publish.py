"""Publish a run's checkpoint: a folder with weights, tokenizer and model card, and optionally an upload to the Hub."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData

from grpo.common.errors import UserError, reason
from grpo.common.files import atomic_folder, damaged, read_json, require_own
from grpo.common.safe_text import code, fenced, short
from grpo.reporting.timing import read_timing
from grpo.results.intervals import format_interval, interval_of_mean
from grpo.results.runs import Run, read_run
from grpo.study import paths
from grpo.study.config import HubModel
from grpo.study.effective import effective_run
from grpo.study.schema import Study

PUBLISHED = Path("published")
METADATA = "metadata.json"
TEMPLATE = Path(__file__).with_name("templates") / "model_card.md.j2"


def publish(study: Study, name: str, kind: str, out: Path | None, repo: str | None, license: str | None) -> list[str]:
    """Write the folder of the checkpoint ``kind`` of the run EXPERIMENT/ARM/SEED; with ``repo`` upload it to the Hub.

    Returns lines that say what was done. UserError if there is no such run or checkpoint, or a link in it, if the folder is not
    empty, or the upload fails.
    """
    parts = re.fullmatch(r"([^/]+)/([^/]+)/(\d+)", name)
    if not parts:
        raise UserError(f"{name}: not a run. Name it as EXPERIMENT/ARM/SEED, such as grpo_learning_rate/3e-4/0.")
    effective_run(study, parts[1], parts[2], int(parts[3]), [])  # raises UserError if the study has no such run
    run = read_run(parts[1], parts[2], int(parts[3]))
    source = _find_checkpoint(run, kind)
    target = out or PUBLISHED / f"{name.replace('/', '--')}-{kind}"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: already exists and is not empty. Remove it, or name another folder with --out.")
    try:
        require_own(source.parent, [source, *source.rglob("*")])
    except ValueError as error:
        raise UserError(f"{source}: {error}.") from error
    card = _model_card(study, run, source, kind, license)
    with atomic_folder(target) as folder:
        # The metadata may name folders of this machine.
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(METADATA), dirs_exist_ok=True)
        card.save(folder / "README.md")
    lines = [f"{target}: {kind} checkpoint of {name}, with its model card (README.md)"]
    if run.config["same_as"]:
        lines.append(f"{name} equals {run.config['same_as']}; this is the checkpoint of that run")
    if repo is not None:  # a new repository is private, so that its card can be checked before others see it
        try:
            HfApi().create_repo(repo, private=True, exist_ok=True)
            commit = HfApi().upload_folder(repo_id=repo, folder_path=target, commit_message=f"{name}, by grpo publish")
        except Exception as error:  # whatever the network, the proxy or the Hub raises
            remedy = f"{target} is complete: check HF_TOKEN and the network, then run `hf upload {repo} {target}`."
            raise UserError(f"--repo {repo}: the upload failed ({reason(error)}). {remedy}") from error
        lines.append(f"uploaded: {commit.commit_url}")
    return lines


def _find_checkpoint(run: Run, kind: str) -> Path:
    """The folder with the weights; a run that reuses the results of an identical run has that run's."""
    folder = paths.CHECKPOINTS / (run.config["same_as"] or run.name)
    if any((folder / kind).glob("*.safetensors")):
        return folder / kind
    kept = sorted(path.parent.name for path in folder.glob(f"*/{METADATA}"))
    others = f"Choose another with --kind: {', '.join(kept)}. " if kept else ""
    stored = f"`dvc checkout {folder}` or `dvc pull` brings back a stored one"
    raise UserError(f"{folder / kind}: no checkpoint. {others}`checkpoints:` in params.yaml says which are kept; {stored}.")


def _model_card(study: Study, run: Run, source: Path, kind: str, license: str | None) -> ModelCard:
    """Make the card of a checkpoint from the run's result files."""
    made_by = paths.stage_of_run(run.config["same_as"] or run.name)
    about: dict[str, Any] = read_json(source / METADATA, made_by, keys=("step", run.metric, "prompt", "started_from"))
    steps, step = [int(step) for step in run.validation["step"]], about["step"]
    if step not in steps or abs(run.validation[run.column][steps.index(step)] - about[run.metric]) > 1e-9:
        raise damaged(source / METADATA, "it differs from validation.csv at this step", made_by)
    labels = {steps[0]: "before training", steps[-1]: "the run's last evaluation"} | {step: "**this checkpoint**"}
    rewards = []
    for at, label in sorted(labels.items()):
        outcomes = run.last if at == steps[-1] else run.outcomes[steps.index(at)]
        low, high = interval_of_mean(outcomes)
        estimate = {"value": float(outcomes.mean()), "low": low, "high": high}
        rewards.append((f"{at}: {label}", format_interval(estimate), len(outcomes)))
    timing = read_timing(run)
    commit = "not known" if timing["git_commit"] == "none" else f"`{timing['git_commit']}`"
    start, model = about["started_from"], study.models[study.experiments[run.experiment].task]
    tuned = Path(start) / METADATA  # of the fine-tuned model that the run started from
    origin = read_json(tuned, made_by="", keys=("started_from",))["started_from"] if tuned.exists() else start
    base = model if isinstance(model, HubModel) and origin == model.origin else None
    if base:
        start = f"[{base.repo}](https://huggingface.co/{base.repo}) at revision `{base.revision}`, whose licence is on its page"
    template, stop, chat = (*run.config["task"]["formats"][about["prompt"]], None)[:3]
    return ModelCard.from_template(
        ModelCardData(
            base_model=base and base.repo,
            license=license,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=[run.config["method"]],
            model_name=f"{run.name.replace('/', '--')}-{kind}",
        ),
        template_path=str(TEMPLATE),
        kind=kind,
        run=run,
        study=short(study.study),
        task=code(run.config["task"]["settings"]["use"]),
        metric=run.metric.replace("_", " "),
        rewards=rewards,
        prompt=fenced(template),
        form=(f" (a user's message in the chat template, {code(json.dumps(chat))})" if chat else "")
        + (f" (answers end at {', '.join(map(code, stop))})" if stop else ""),
        origin={
            "base model": start if base else "a local folder" if Path(start).is_absolute() else short(start),
            "licence of these weights": license or "not stated",
            "commit": commit + (", with uncommitted changes" if timing["git_changed"] == "true" else ""),
        },
        stage=paths.stage_of_run(run.name),
    )
