"""The JSON Schema of study files; editors use it to complete keys, show their meaning and mark wrong values."""

from __future__ import annotations

from typing import Any

from grpo.study.methods import OBJECTIVE, OBJECTIVES, OFF_POLICY_RANK, RATE_TIMES
from grpo.study.schema import Study


def study_schema() -> dict[str, Any]:
    """Build the schema of params.yaml and of overlays. No key is required, as an overlay has only what differs.

    It covers types, ranges and names of keys. `grpo study check` also checks that values fit together.
    """
    schema = _simplified(Study.model_json_schema())
    names = {"type": "array", "items": {"type": "string"}}
    properties = schema["properties"]
    properties["extends"] = {"type": "string", "description": "Name or path of the study that this one extends."}
    properties["experiments"]["properties"] = {
        "only": names | {"description": "Experiments to keep; the others are left out."},
        "without": names | {"description": "Experiments to leave out."},
    }
    for section in ("tasks", "models", "sft_datasets"):  # null removes an entry
        entry = properties[section]["additionalProperties"]
        properties[section]["additionalProperties"] = {"anyOf": [entry, {"type": "null"}]}
    grpo, sft, expert_iteration = (
        schema["$defs"][name]["properties"] for name in ("GrpoConfig", "SftConfig", "ExpertIterationConfig")
    )
    more = {"start_from": {"type": "string"}, OFF_POLICY_RANK: {"type": "integer"}, RATE_TIMES: {"type": "number"}}
    objective = {OBJECTIVE: {"enum": list(OBJECTIVES)}}
    arm = {"type": "object", "properties": grpo | sft | expert_iteration | more | objective}
    grpo |= objective
    schema["$defs"]["Experiment"]["properties"]["arms"]["additionalProperties"] = arm
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A study", **schema}


def _simplified(value: Any) -> Any:
    """Drop ``required``, titles, and defaults, which are those of the types and not of studies/base.yaml."""
    if isinstance(value, list):
        return [_simplified(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _simplified(item)
        for key, item in value.items()
        if not (key == "required" and isinstance(item, list))  # otherwise it is the name of a setting
        and not (key in ("title", "default") and not isinstance(item, dict))
    }
