"""What MLflow is told of the study that a run belongs to, so that runs of different studies can be told apart there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.study.schema import Study
from grpo.study.sections import MAIN, HubModel, LocalModel
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
