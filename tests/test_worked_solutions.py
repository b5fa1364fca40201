"""MATH's and GSM8K's own solutions as traces for supervised fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo.commands.doctor import examine
from grpo.common.errors import UserError
from grpo.common.records import read_examples
from grpo.study import paths
from grpo.study.schema import Study, load_study
from grpo.study.sections import DownloadedTask, JsonlTraces, LocalFiles
from grpo.tasks.build import build_dataset
from grpo.tasks.rewards import r1_zero_reward_fn
from grpo.tasks.sft_dataset import build_sft_dataset

ROOT = Path(__file__).parents[1]
MATH = [
    {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "solution": "We add: $1+1=\\boxed{2}$."},
    {"problem": "What is $2+2$?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{4}$."},
]
GSM8K = [{"question": "Ann has 48 and sells half.", "answer": "She sells 48/2 = <<48/2=24>>24.\nSo 24 <<24=24>>stay.\n#### 24"}]


def study_with(rows: list[dict[str, Any]], held_out: list[dict[str, Any]], folder: Path, name: str) -> Study:
    for split, content in (("train", rows), ("validation", held_out)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    study = load_study(ROOT / f"studies/{name}.yaml")
    source = LocalFiles(train=str(folder / "train.jsonl"), validation=str(folder / "validation.jsonl"))
    assert isinstance(study.task, DownloadedTask)
    task = study.task.model_copy(update={"source": source, "expected": None, "drop_overlap": True})
    few = {"problems": 1, "zero_shot_problems": 1, "best_of_n": study.evaluation.best_of_n.model_copy(update={"problems": 1})}
    config = study.grpo.model_copy(update={"rollout_batch_size": 8, "group_size": 8})
    return study.model_copy(
        update={"task": task, "evaluation": study.evaluation.model_copy(update=few), "grpo": config},
    )


@pytest.mark.parametrize(
    ("name", "rows", "held_out", "response"),
    [
        (
            "math-h100",
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
    study = study_with(rows, held_out, tmp_path, name)
    build_dataset(study)
    report = build_sft_dataset(study)
    assert (report["examples"], report["correct"], report["source"]) == (len(rows), len(rows), "solutions")
    examples = read_examples(paths.sft_examples("main"))
    assert examples[0].response == response
    assert (
        examples[0].prompt.endswith("Assistant: <think>")
        and rows[0].get("problem", rows[0].get("question")) in examples[0].prompt
    )
    assert all(r1_zero_reward_fn(example.response, example.ground_truth)["reward"] == 1.0 for example in examples)


def test_a_solution_to_a_validation_question_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = study_with(MATH, [MATH[1] | {"problem": "what is  $2+2$?"}], tmp_path, "math-h100")
    build_dataset(study)
    report = build_sft_dataset(study)
    assert (report["examples"], report["left_out_as_validation_question"]) == (1, 1)
    assert "1+1" in read_examples(paths.sft_examples("main"))[0].prompt


def test_a_file_without_solutions_is_refused_by_line_and_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "answer": "2"}
    study = study_with([row], [row | {"problem": "Another?"}], tmp_path, "math-h100")
    build_dataset(study)
    with pytest.raises(UserError, match=r"train\.jsonl:1: no column 'solution'"):
        build_sft_dataset(study)


def test_doctor_names_files_that_are_missing(mini_study: Study, tmp_path: Path) -> None:
    def finding(path: Path) -> tuple[bool, str]:
        study = mini_study.model_copy(update={"sft_dataset": JsonlTraces(source="jsonl", path=str(path))})
        found = next(finding for finding in examine(study) if finding.name == "data files")
        return found.good, found.found

    assert finding(tmp_path / "traces.jsonl") == (False, f"missing: {tmp_path / 'traces.jsonl'}")
    (tmp_path / "traces.jsonl").write_text("")
    assert finding(tmp_path / "traces.jsonl") == (True, str(tmp_path / "traces.jsonl"))
