"""Tags and parameters that describe a run's study in MLflow, so that runs of different studies can be told apart."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo.common.safe_text import without_password
from grpo.study.effective import digest
from grpo.study.schema import Study
from grpo.study.settings import MAIN, HubModel, LocalModel
from grpo.study.training_inputs import shared_settings

_URI = re.compile("[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)


def study_tags(study: Study, task: str = MAIN) -> dict[str, str]:
    """Tags to filter and group runs by: study, task, model, engine and learner."""
    match study.models[task]:
        case HubModel() as hub:
            model = f"{hub.repo}@{hub.revision}"
        case LocalModel() as local:
            model = local.path
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
    """The settings that all runs of the study share, and those of one task and its model, by key in params.yaml."""
    own = {"tasks": {task: study.tasks[task]}, "models": {task: study.models[task].model_dump()}}
    return flat({"study": study.study, **own, **shared_settings(study)})


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested settings; keys become paths such as ``learner.dtype``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def source_tags() -> dict[str, str]:
    """The git commit of the code ("none" if unknown), and whether the code has changed since ("unknown" if git cannot tell)."""
    return _source_tags(Path.cwd())


@lru_cache
def _source_tags(folder: Path) -> dict[str, str]:
    def git(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=False)

    deciding = ("grpo", "params.yaml", "dvc.yaml", "constraints.txt")
    from_the_top = (f":(top){name}" for name in deciding)  # `grpo quickstart` works in a folder below
    try:
        status = git("status", "--porcelain", "--untracked-files=no", "--", *deciding, *from_the_top)
        commit = git("rev-parse", "--verify", "--quiet", "HEAD").stdout.strip()
    except FileNotFoundError:
        return {"git_commit": "none", "git_changed": "unknown"}
    if "safe.directory" in status.stderr:
        print(
            f"warning: {folder} belongs to another user, so git does not tell the commit of the code: runs are recorded with"
            f" git_commit none. To allow it: `git config --global --add safe.directory {shlex.quote(str(folder))}`.",
            file=sys.stderr,
        )
    changed = "unknown" if status.returncode else str(bool(status.stdout)).lower()
    return {"git_commit": commit or "none", "git_changed": changed}


def mlflow_source_tags() -> dict[str, str]:
    """:func:`source_tags`, those of MLflow's own columns (commit, source), and the name of the DVC experiment, if any."""
    source, experiment, program = source_tags(), os.environ.get("DVC_EXP_NAME"), Path(sys.argv[0])
    commit, name = source["git_commit"], "grpo" if program.name == "__main__.py" else program.name
    return {
        **source,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": shlex.join(
            [name, *(_URI.sub(lambda uri: without_password(uri[0]), arg) for arg in sys.argv[1:])]
        ),
        **({"mlflow.source.git.commit": commit} if commit != "none" else {}),
        **({"dvc_experiment": experiment} if experiment else {}),
    }
