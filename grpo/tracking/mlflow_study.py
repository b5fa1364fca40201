"""Tags and parameters that describe a run's study in MLflow, so that runs of different studies can be told apart."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo.common.safe_text import hide_secrets
from grpo.study.config import MAIN, HubModel, LocalModel, WheelModel
from grpo.study.effective import digest
from grpo.study.schema import Study
from grpo.study.training_inputs import shared_settings


def study_tags(study: Study, task: str = MAIN) -> dict[str, str]:
    """Tags to filter and group runs by: study, task, model, engine and learner."""
    match study.models[task]:
        case HubModel() as hub:
            model = f"{hub.repo}@{hub.revision}"
        case LocalModel() | WheelModel() as elsewhere:
            model = elsewhere.origin
        case _:
            model = f"model@{task}"  # the stage that pretrains it
    return {
        "study": study.study,
        "task": study.tasks[task]["use"],
        "model_source": study.models[task].source,
        "model": model,
        "engine": study.engine.name,
        "engine_device": study.engine.device,
        "engine_dtype": study.engine.dtype,
        "learner_device": study.learner.device,
        "learner_dtype": study.learner.dtype,
    }


def study_state(study: Study) -> dict[str, Any]:
    """Describe the state of the study (values, commit, changed code). It has its own run in MLflow, the parent of its runs.

    Returns:
        ``key``, which identifies the state; ``name`` and ``tags`` of the parent run; ``settings``, all values of params.yaml.
    """
    settings, tags = study.model_dump(mode="json"), mlflow_source_tags()
    del tags["mlflow.source.name"]
    params_digest, commit, changed = digest(settings), tags["git_commit"], tags["git_changed"] == "true"
    at = f"at commit {commit[:8]}" + (" + changes" if changed else "")
    note = (
        f"**{study.study}**: {study.description}\n\nRuns with params.yaml of digest {params_digest} (see study.json), {at}."
        f" Runs that were up to date then are below an earlier parent. Filter by `tags.experiment`."
    )
    return {
        "key": digest([study.study, params_digest, commit, changed]),
        "name": f"study {study.study} {params_digest[:6]} {at}",
        "tags": {**tags, "study": study.study, "params_digest": params_digest, "mlflow.note.content": note},
        "settings": settings,
    }


def study_params(study: Study, task: str = MAIN) -> dict[str, Any]:
    """Settings by key in params.yaml that all runs of the study share; of its tasks and models only ``task``."""
    own = {"tasks": {task: study.tasks[task]}, "models": {task: study.models[task].model_dump()}}
    return flat({"study": study.study, **own, **shared_settings(study)})


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested settings; keys become paths such as ``learner.dtype``."""
    parameters: dict[str, Any] = {}
    for key, value in values.items():
        parameters |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return parameters


def source_tags() -> dict[str, str]:
    """The git commit of the code ("none" if unknown), and whether the code has changed since ("unknown" if git cannot tell)."""
    return _source_tags(Path.cwd())


@lru_cache
def _source_tags(_folder: Path) -> dict[str, str]:
    deciding = ("grpo", "params.yaml", "dvc.yaml", "constraints.txt")
    from_the_top = (f":(top){name}" for name in deciding)  # `grpo quickstart` works in a folder below
    status = git_output("status", "--porcelain", "--untracked-files=no", "--", *deciding, *from_the_top)
    changed = "unknown" if status is None else str(bool(status)).lower()
    return {"git_commit": git_output("rev-parse", "--verify", "--quiet", "HEAD") or "none", "git_changed": changed}


def git_output(*args: str) -> str | None:
    """The output of git; None if it fails or is not installed."""
    try:
        return subprocess.run(["git", *args], capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def mlflow_source_tags() -> dict[str, str]:
    """Tags of a run: :func:`source_tags`, MLflow's own columns (commit, source), and the DVC experiment, if any."""
    source, experiment, program = source_tags(), os.environ.get("DVC_EXP_NAME"), Path(sys.argv[0])
    commit, name = source["git_commit"], "grpo" if program.name == "__main__.py" else program.name
    return {
        **source,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": hide_secrets(shlex.join([name, *sys.argv[1:]])),
        **({"mlflow.source.git.commit": commit} if commit != "none" else {}),
        **({"dvc_experiment": experiment} if experiment else {}),
    }
