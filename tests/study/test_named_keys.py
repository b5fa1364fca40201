"""Messages about a task's data name the keys of its own entry in params.yaml."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from study_parts import Grpo, values_of

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
