"""A JSON Schema of study files, by which editors complete keys, show what they mean and mark wrong values."""

from __future__ import annotations

from typing import Any

from grpo.study.methods import (
    OBJECTIVE,
    OBJECTIVES,
    OFF_POLICY_RANK,
    RATE_TIMES,
    ExpertIterationConfig,
    GrpoConfig,
    SftConfig,
)
from grpo.study.schema import Study


def study_schema() -> dict[str, Any]:
    """Of params.yaml and of an overlay alike: nothing is required, as an overlay says only what differs.

    It knows types, ranges and names of keys. What fits together, `grpo study check` says.
    """
    schema = _without_what_editors_do_not_need(Study.model_json_schema())
    names = {"type": "array", "items": {"type": "string"}}
    properties = schema["properties"]
    properties["extends"] = {"type": "string", "description": "The study that this one is laid over, by its name or path."}
    properties["experiments"]["properties"] = {
        "only": names | {"description": "The experiments to keep; the others are left out."},
        "without": names | {"description": "The experiments to leave out."},
    }
    for section in ("tasks", "models", "sft_datasets"):  # of which null takes one away
        entry = properties[section]["additionalProperties"]
        properties[section]["additionalProperties"] = {"anyOf": [entry, {"type": "null"}]}
    configs = (GrpoConfig, SftConfig, ExpertIterationConfig)
    values = {key: _of_key(schema, key) for config in configs for key in config.model_fields}
    more = {"start_from": {"type": "string"}, OFF_POLICY_RANK: {"type": "integer"}, RATE_TIMES: {"type": "number"}}
    objective = {OBJECTIVE: {"enum": list(OBJECTIVES)}}
    schema["$defs"]["GrpoConfig"]["properties"] |= objective
    arm = {"type": "object", "properties": values | more | objective}
    schema["$defs"]["Experiment"]["properties"]["arms"]["additionalProperties"] = arm
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A study", **schema}


def _of_key(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """The values that a hyperparameter may have in one of the methods."""
    found = [schema["$defs"][name]["properties"].get(key) for name in ("GrpoConfig", "SftConfig", "ExpertIterationConfig")]
    kinds = [kind for i, kind in enumerate(found) if kind is not None and kind not in found[:i]]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _without_what_editors_do_not_need(value: Any) -> Any:
    """Without what is required, and without titles and defaults, which are the types' and not those of the study's base."""
    if isinstance(value, list):
        return [_without_what_editors_do_not_need(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_what_editors_do_not_need(item)
        for key, item in value.items()
        if not (key == "required" and isinstance(item, list))  # else it is the name of a key of ours
        and not (key in ("title", "default") and not isinstance(item, dict))
    }
