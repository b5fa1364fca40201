"""What MLflow is told of the study that a run belongs to, so that runs of different studies can be told apart there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.study.schema import Study
from grpo.study.sections import HubModel, LocalModel
from grpo.study.training_inputs import shared_settings


def study_tags(study: Study, keyword: bool = False) -> dict[str, str]:
    """Study, task, model, engine and learner in a few words, to filter and group runs by.

    Args:
        keyword: whether it is about the keyword task, which has a model of its own.
    """
    match None if keyword else study.model:
        case HubModel() as hub:
            model = f"{hub.repo}@{hub.revision}"
        case LocalModel() as local:
            model = local.path
        case _:
            model = "keyword_model" if keyword else "model"  # the stage that pretrains it
    return {
        "study": study.study,
        "task": "keyword" if keyword else study.task.name,
        "model_source": "pretrain" if keyword else study.model.source,
        "model": model,
        "engine": study.engine.name,
        "engine_device": study.engine.device,
        "engine_dtype": study.engine.dtype,
        "learner_device": study.learner.device,
        "learner_dtype": study.learner.dtype,
    }


def study_params(study: Study, keyword: bool = False) -> dict[str, Any]:
    """The settings that all runs of the study share, each by its place in params.yaml.

    Args:
        keyword: see :func:`study_tags`.
    """
    sections = {"keyword": study.keyword} if keyword else {"task": study.task, "model": study.model}
    own = {name: section.model_dump() for name, section in sections.items()}
    return flat({"study": study.study, **own, **shared_settings(study)})


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested settings as one mapping, whose keys are paths: ``learner.dtype``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found
