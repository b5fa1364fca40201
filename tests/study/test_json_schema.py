"""The JSON Schema by which editors check study files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from study_parts import ROOT

from grpo.common.yaml_file import parse_yaml
from grpo.study.json_schema import study_schema

SCHEMA = study_schema()


def test_the_committed_one_is_what_the_types_say() -> None:
    committed = json.loads((ROOT / "studies/study.schema.json").read_text())
    assert committed == SCHEMA, "make it anew: grpo study schema > studies/study.schema.json"


@pytest.mark.parametrize("path", [ROOT / "params.yaml", *sorted((ROOT / "studies").glob("*.yaml"))], ids=lambda path: path.name)
def test_it_takes_every_study(path: Path) -> None:
    jsonschema.validate(parse_yaml(path), SCHEMA)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["grpo", "learning_rate"], "fast"),
        (["grpo", "group_size"], 0),
        (["grpo", "n_steps"], 3),
        (["experiments", "grpo_learning_rate", "method"], "ppo"),
        (["experiments", "grpo_learning_rate", "arms", "1.0e-3", "learning_rate"], -1),
        (["learner", "gpus"], 1),
        (["seed"], 0),
    ],
)
def test_it_marks_what_is_wrong(keys: list[str], value: Any) -> None:
    params = copy.deepcopy(parse_yaml(ROOT / "params.yaml"))
    place = params
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    place[keys[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(params, SCHEMA)
