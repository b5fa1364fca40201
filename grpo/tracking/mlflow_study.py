"""What MLflow is told of the study that a run belongs to, so that runs of different studies can be told apart there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from grpo.study.schema import Study
from grpo.study.sections import MAIN, HubModel, LocalModel
from grpo.study.training_inputs import shared_settings
from grpo.tracking.mlflow_client import mlflow_source_tags, source_tags


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
