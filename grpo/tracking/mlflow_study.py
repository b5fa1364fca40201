"""What MLflow is told of the study that a run belongs to, so that runs of different studies can be told apart there."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo.study.schema import Study
from grpo.study.settings import MAIN, HubModel, LocalModel
from grpo.study.training_inputs import shared_settings


def study_tags(study: Study, task: str = MAIN) -> dict[str, str]:
    """Study, task, model, engine and learner in a few words, to filter and group runs by.

    Args:
        task: the one that it is about, by its name in the study.
    """
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
    """The study as it stands, which has a run of its own in MLflow, the parent of all that ran in this state.

    Returns:
        ``key``, which is another one where the study's values, the commit, or whether the code was changed since are others;
        ``name`` and ``tags`` of the parent; ``settings``: all values of params.yaml.
    """
    settings, source = study.model_dump(mode="json", exclude={"runs"}), source_tags()
    params_digest = _digest(settings)
    commit, changed = source["git_commit"], source["git_changed"] == "true"
    at = f"at commit {commit[:8]}" + (" + changes" if changed else "")
    own = {key: value for key, value in mlflow_source_tags().items() if key != "mlflow.source.name"}
    note = (
        f"**{study.study}**: {study.description}\n\nWhat ran while the values of params.yaml had the digest {params_digest}"
        f" (they are in study.json), {at}. What was up to date then is below an earlier parent. Filter by `tags.experiment`."
    )
    return {
        "key": _digest([study.study, params_digest, commit, changed]),
        "name": f"study {study.study} {params_digest[:6]} {at}",
        "tags": {**own, **source, "study": study.study, "params_digest": params_digest, "mlflow.note.content": note},
        "settings": settings,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def study_params(study: Study, task: str = MAIN) -> dict[str, Any]:
    """What all runs of the study share, and the settings of their task and its model, each by its place in params.yaml."""
    own = {"tasks": {task: study.tasks[task]}, "models": {task: study.models[task].model_dump()}}
    return flat({"study": study.study, **own, **shared_settings(study)})


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested settings as one mapping, whose keys are paths: ``learner.dtype``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def source_tags() -> dict[str, str]:
    """The git commit the code stands at ("none": not known), and whether it was changed since ("unknown": git does not say)."""
    return _source_tags(Path.cwd())


@lru_cache
def _source_tags(folder: Path) -> dict[str, str]:
    """:func:`source_tags` of a folder, asked once."""

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
            f"warning: {folder} belongs to another user, so git does not say at which commit the code stands: runs are recorded"
            f" with git_commit none. `git config --global --add safe.directory {shlex.quote(str(folder))}` lets it.",
            file=sys.stderr,
        )
    changed = "unknown" if status.returncode else str(bool(status.stdout)).lower()
    return {"git_commit": commit or "none", "git_changed": changed}


def mlflow_source_tags() -> dict[str, str]:
    """What MLflow's own columns show (commit, source), and the name of the DVC experiment that a run is part of."""
    commit, experiment = source_tags()["git_commit"], os.environ.get("DVC_EXP_NAME")
    program = Path(sys.argv[0])
    return {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": shlex.join(["grpo" if program.name == "__main__.py" else program.name, *sys.argv[1:]]),
        **({"mlflow.source.git.commit": commit} if commit != "none" else {}),
        **({"dvc_experiment": experiment} if experiment else {}),
    }
