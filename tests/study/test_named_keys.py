"""Keys of params.yaml that messages name: each is one that the study's schema has."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from study_parts import ROOT, Grpo, values_of

from grpo.common.errors import TO_LOWER
from grpo.study.methods import ExpertIterationConfig, GrpoConfig, SftConfig
from grpo.study.schema import Study

RAISED = ("UserError", "ValueError", "Finding")
NO_KEYS = {"yaml", "yml", "json", "jsonl", "csv", "py", "md", "lock", "org"}  # endings of files, and of an address
OF_DVC = {"meta.resources", "cache.type", "core.hardlink_lock"}  # keys of dvc.yaml and of DVC's settings


def text_of(node: ast.AST) -> str:
    """The texts below a node, with * in the place of each value that is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.FormattedValue):
        return "*"
    between = "" if isinstance(node, ast.JoinedStr) else " "
    return between.join(map(text_of, ast.iter_child_nodes(node)))


def dotted(text: str) -> list[str]:
    return re.findall(r"(?<![\w/.-])[a-z*][\w*]*(?:\.[\w*]+)+", text)


def named_keys() -> Iterator[tuple[str, str]]:
    """Each dotted name in a message of the package or of the workflow, with where it stands."""
    for file in (*(ROOT / "grpo").rglob("*.py"), *(ROOT / "workflow").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISED:
                for name in dotted(text_of(node)):
                    if name == name.lower() and name.rpartition(".")[2] not in NO_KEYS and not name.startswith("*"):
                        yield f"{file.relative_to(ROOT)}:{node.lineno}", name
    for phase, remedy in TO_LOWER.items():
        yield from ((f"out of memory, {phase}", name) for name in dotted(remedy))


def has(kind: Any, keys: list[str]) -> bool:
    """Whether a value of this type can have a.b.c; * stands for any key."""
    if not keys or kind is Any:
        return True
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        found = [field.annotation for name, field in kind.model_fields.items() if keys[0] in (name, "*")]
        return any(has(each, keys[1:]) for each in found) or kind.model_config.get("extra") == "allow"
    if get_origin(kind) is dict:
        return has(get_args(kind)[1], keys[1:])
    return any(has(each, keys) for each in get_args(kind) if get_origin(kind) is not list)


def is_module(name: str) -> bool:
    return name.startswith("grpo.") and find_spec(name) is not None


def test_each_key_that_a_message_names_is_one() -> None:
    found = dict.fromkeys(named_keys())
    assert len(found) > 40
    kinds = (Study, GrpoConfig, SftConfig, ExpertIterationConfig)  # an arm has a method's keys by themselves
    keys = [(where, name) for where, name in found if name not in OF_DVC and not is_module(name)]
    wrong = [(where, name) for where, name in keys if not any(has(k, name.split(".")) for k in kinds)]
    assert wrong == []


def test_a_key_that_is_none_would_be_found() -> None:
    for name in ("tasks.main.anything", "models.*.repo", "grpo.lora.rank"):
        assert has(Study, name.split(".")), name
    for name in ("task.source", "grpo.n_steps", "learner.fully_shard.on", "models.main.weights", "seeds.first", "grpo.lora.x"):
        assert not has(Study, name.split(".")), name


TRAIN = {"problem": "1 + 1?", "level": "Level 1", "subject": "algebra", "answer": "2"}


@pytest.mark.parametrize(
    ("changes", "rows", "told"),
    [
        ({}, {"validation": [TRAIN]}, r"Set `tasks\.main\.drop_overlap: true` to leave them out"),
        ({"expected": {"train": 2, "validation": 1}}, {}, r"^error: tasks\.main\.expected\.train: 2 .* `tasks\.main\.source`"),
        ({}, {"train": []}, r"^error: train\.jsonl: has no rows\. .* `tasks\.main\.source\.train`"),
        ({}, {"train": [{"level": "Level 1"}]}, r"train\.jsonl:1: no column 'problem' .* Check `tasks\.main\.source\.train`"),
        ({}, {"train": None}, r"train\.jsonl: no such file\. Correct `tasks\.main\.source\.train` in params\.yaml"),
        ({"levels": 3}, {}, r"params\.yaml: tasks\.main: got an unexpected keyword argument 'levels'"),
    ],
)
def test_a_task_names_its_own_entry(
    workdir: Path,
    grpo: Grpo,
    changes: dict[str, Any],
    rows: dict[str, Any],
    told: str,
) -> None:
    files = {"train": [TRAIN], "validation": [TRAIN | {"problem": "1 + 2?"}]} | rows
    for split, lines in files.items():
        if lines is not None:
            Path(f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = values_of("smoke")
    source = {split: f"{split}.jsonl" for split in files}
    values["tasks"]["main"] = {"use": "math", "source": source, **changes}
    Path("params.yaml").write_text(json.dumps(values))
    code, _, error = grpo("dataset", "main")
    assert code == 2 and re.search(told, error), error


def test_a_class_of_ones_own_is_told_where_it_says_what_becomes_of_an_overlap(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, grpo: Grpo
) -> None:
    monkeypatch.syspath_prepend(workdir)
    Path("twice_the_same.py").write_text(
        "from grpo.tasks import Problem, Task, formats\n\n\n"
        "class Twice(Task):\n"
        '    formats = {"r1_zero": formats.R1_ZERO, "question_only": formats.QUESTION_ONLY}\n\n'
        "    def problems(self, split):\n"
        '        return [Problem(split, "1 + 1?", "2")]\n'
    )
    values = values_of("smoke")
    values["tasks"]["main"] = {"use": "twice_the_same:Twice"}
    Path("params.yaml").write_text(json.dumps(values))
    code, _, error = grpo("dataset", "main")
    assert code == 2 and "Set `drop_overlap = True` in the class Twice to leave them out" in error
