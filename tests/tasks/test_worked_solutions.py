"""MATH's and GSM8K's own solutions as traces for supervised fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo.commands.doctor import examine
from grpo.common.errors import UserError
from grpo.common.records import read_examples, read_problems
from grpo.study import paths
from grpo.study.schema import Study
from grpo.tasks.build import build_dataset
from grpo.tasks.rewards import r1_zero_reward_fn
from grpo.tasks.sft_dataset import JsonlTraces, TaskTraces, build_sft_dataset, find_traces
from grpo.tasks.task import make_task

MATH = [
    {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "solution": "We add: $1+1=\\boxed{2}$."},
    {"problem": "What is $2+2$?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{4}$."},
]
GSM8K = [{"question": "Ann has 48 and sells half.", "answer": "She sells 48/2 = <<48/2=24>>24.\nSo 24 <<24=24>>stay.\n#### 24"}]


TRACES = TaskTraces(source="task", prompt="r1_zero")


def build(rows: list[dict[str, Any]], held_out: list[dict[str, Any]], folder: Path, name: str) -> dict[str, Any]:
    """Both stages, for a task that is read from local files."""
    for split, content in (("train", rows), ("validation", held_out)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    source = {"train": str(folder / "train.jsonl"), "validation": str(folder / "validation.jsonl")}
    task = make_task({"use": name, "source": source, "drop_overlap": True})
    build_dataset(task, paths.DATASETS / "main", {})
    validation = read_problems(paths.validation("main"))
    traces = find_traces(task, TRACES, "sft_datasets.main")
    return build_sft_dataset(task, TRACES.source, TRACES.prompt, traces, validation, paths.sft_examples("main"))


@pytest.mark.parametrize(
    ("name", "rows", "held_out", "response"),
    [
        (
            "math",
            MATH,
            [MATH[0] | {"problem": "What is $3+3$?"}],
            " We add: $1+1=\\boxed{2}$. </think> <answer>2</answer>",
        ),
        (
            "gsm8k",
            GSM8K,
            [GSM8K[0] | {"question": "Another?"}],
            " She sells 48/2 = 24.\nSo 24 stay. </think> <answer>24</answer>",
        ),
    ],
)
def test_solutions_become_traces_that_earn_the_reward(
    name: str,
    rows: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    response: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    report = build(rows, held_out, tmp_path, name)
    assert (report["examples"], report["correct"], report["source"]) == (len(rows), len(rows), "task")
    examples = read_examples(paths.sft_examples("main"))
    assert examples[0].response == response
    assert (
        examples[0].prompt.endswith("Assistant: <think>")
        and rows[0].get("problem", rows[0].get("question")) in examples[0].prompt
    )
    assert all(r1_zero_reward_fn(example.response, example.ground_truth)["reward"] == 1.0 for example in examples)


def test_a_solution_to_a_validation_question_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = build(MATH, [MATH[1] | {"problem": "what is  $2+2$?"}], tmp_path, "math")
    assert (report["examples"], report["left_out_as_validation_question"]) == (1, 1)
    assert "1+1" in read_examples(paths.sft_examples("main"))[0].prompt


def test_a_file_without_solutions_is_refused_by_line_and_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "answer": "2"}
    with pytest.raises(UserError, match=r"train\.jsonl:1: no column 'solution'"):
        build([row], [row | {"problem": "Another?"}], tmp_path, "math")


def test_doctor_names_files_that_are_missing(mini_study: Study, tmp_path: Path) -> None:
    def finding(path: Path) -> tuple[bool, str]:
        study = mini_study.model_copy(
            update={"sft_datasets": {"main": JsonlTraces(source="jsonl", prompt="r1_zero", path=str(path))}}
        )
        found = next(finding for finding in examine(study) if finding.name == "data files")
        return found.good, found.found

    assert finding(tmp_path / "traces.jsonl") == (False, f"missing: {tmp_path / 'traces.jsonl'}")
    (tmp_path / "traces.jsonl").write_text("")
    assert finding(tmp_path / "traces.jsonl") == (True, str(tmp_path / "traces.jsonl"))
