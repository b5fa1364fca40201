"""Readers of result files: which problems judge; truncated, empty or wrong files, named with line and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_parts
from report_parts import run

from grpo.common.errors import UserError
from grpo.common.files import read_text, write_text
from grpo.common.records import read_examples, read_problems
from grpo.reporting import kissing_number
from grpo.reporting.page import read_samples
from grpo.reporting.record import read_record
from grpo.reporting.timing import read_timing
from grpo.results.runs import read_baseline, read_best_of_n, read_run
from grpo.study.effective import read_selections
from grpo.study.schema import Study

ARGS = ("sft_experiment", "all", 0)
RUN_NAME = "/".join(map(str, ARGS))
RUN, TRAIN_RUN = Path("data/runs") / RUN_NAME, "train@sft_experiment-all-0"
CONFIG = (
    "identity: a\noverrides: {}\nbefore: []\nsoftware: {torch: a}\nevaluation: {last_problems: 2, selection_problems: 1}\n"
    "same_as: null\nconfig: {lr: {value: 1, from: study}}\n"
)
TIMING = {
    "total_s": 1.0, "phases": {}, "steps": [], "mlflow_run_id": "a", "same_as": None, "git_commit": "b", "git_changed": "false",
    "hardware": {}
}  # fmt: skip
SAMPLE = {"step": 0, "problem": "a", "prompt": "b", "response": "c\u2028d", "ground_truth": "1"}
SAMPLE |= dict.fromkeys(("format_reward", "answer_reward", "reward", "token_entropy"), 1.0)
RUN_FILES = {
    "history.csv": "step,gradient_norm\n1,0.5\n2,0.25\n",
    "validation.csv": "step,val/answer_reward\n0,0.5\n1,0.25\n",
    "outcomes.jsonl": '{"answer_reward": [1, 0]}\n{"answer_reward": [1, 1]}\n',
    "metrics.json": '{"diverged_step": null, "diverged_reason": ""}\n',
    "config.yaml": CONFIG,
}
TRAIN, TRACES = Path("data/dataset/main/train.jsonl"), Path("data/sft_dataset/main/train.jsonl")
METHODS = Path("reports/timing/methods.md")
# By file: what it holds, of which the last line is damaged; how it is read; the stage that makes it.
READERS: dict[Path, tuple[str, Callable[[Study], object], str]] = {
    **{RUN / name: (content, lambda _: read_run(*ARGS), TRAIN_RUN) for name, content in RUN_FILES.items()},
    Path(f"data/timing/{RUN_NAME}/timing.json"): (f"{json.dumps(TIMING)}\n", lambda _: read_timing(read_run(*ARGS)), TRAIN_RUN),
    RUN / "rollouts.jsonl": (2 * (json.dumps(SAMPLE, ensure_ascii=False) + "\n"), lambda _: read_samples(RUN_NAME), TRAIN_RUN),
    Path("reports/select/grpo_learning_rate.json"): (
        '{"experiment": "grpo_learning_rate", "winner": "a", "overrides": {}, "before": []}\n',
        lambda study: read_selections(study, "grpo_baselines"),
        "select@grpo_learning_rate",
    ),
    Path("reports/math_baseline.json"): ('{"r1_zero": {}, "question_only": {}}\n', read_baseline, "math_baseline"),
    Path("reports/best_of_n.json"): ('{"r1_zero": {}, "question_only": {}}\n', read_best_of_n, "best_of_n"),
    TRAIN: ('{"id": "a", "question": "b", "ground_truth": "1"}\n' * 2, lambda _: read_problems(TRAIN), "dataset@main"),
    TRACES: (
        '{"prompt": "a", "response": "b", "ground_truth": "1", "reward": 1.0}\n' * 2,
        lambda _: read_examples(TRACES),
        "sft_dataset@main",
    ),
    Path("reports/record.json"): (
        json.dumps(dict.fromkeys(("study", "headline", "experiments", "claims"), 0)) + "\n",
        lambda _: read_record(),
        "tables",
    ),
    Path("reports/kissing_number.json"): (
        json.dumps(dict.fromkeys(kissing_number.KEYS, 0)) + "\n",
        lambda _: kissing_number.read_report(),
        "kissing_number",
    ),
    METHODS: ("one\ntwo\n", lambda _: read_text(METHODS, "timing"), "timing"),
}


@pytest.fixture
def results(workdir: Path) -> Path:
    """A folder with all of them, undamaged."""
    for path, (content, *_) in READERS.items():
        write_text(path, content)
    return workdir


def _without_the_last_key(path: Path, content: str) -> str:
    if path.suffix == ".csv":
        return "\n".join(line.rpartition(",")[0] for line in content.splitlines()) + "\n"
    if path.suffix == ".yaml":
        return content.rpartition("same_as")[0]
    lines = [json.loads(line) for line in content.removesuffix("\n").split("\n")]
    lines[-1].popitem()
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize("path", READERS, ids=str)
def test_a_damaged_result_is_named_with_its_remedy(path: Path, results: Path, mini_study: Study) -> None:
    content, read, stage = READERS[path]
    read(mini_study)  # while it is whole
    whole = content.encode()
    damage = {
        "invalid UTF-8": whole[:-3] + b"\xff" + whole[-3:],
        "empty": b"",
        "cut in its last line": whole[: -len(whole.splitlines()[-1]) // 2 - 1],
        "not what it should be": _without_the_last_key(path, content).encode() if path.suffix != ".md" else b"\xff",
        "zeros": bytes(len(whole)),
    }
    if path.suffix == ".md":  # any text is one
        damage = {key: value for key, value in damage.items() if b"\xff" in value}
    if path == TRAIN:  # its last columns may be left out
        del damage["not what it should be"]
    for what, broken in damage.items():
        path.write_bytes(broken)
        with pytest.raises(UserError) as caught:
            read(mini_study)
        message = str(caught.value)
        assert message.startswith(str(path)), (what, message)
        assert f"dvc repro -f -s {stage}`" in message, (what, message)
        if path.suffix == ".jsonl" and what not in ("empty", "zeros"):
            assert message.startswith(f"{path}:{len(whole.splitlines())}: "), (what, message)


def test_numbers_that_are_no_numbers_are_noticed_and_odd_ones_are_read(results: Path) -> None:
    path = RUN / "history.csv"
    for rows in ("1,0.x5\n2,0.25\n", "1\n2,0.25\n", "1,0.5,0.5\n2,0.25,0.5\n"):
        path.write_text(f"step,gradient_norm\n{rows}")
        with pytest.raises(UserError, match=r"history\.csv: damaged"):
            read_run(*ARGS)
    path.write_text("step,gradient_norm\n1,nan\n2,\n3,inf\n")
    assert len(read_run(*ARGS).history) == 3
    assert {sample["response"] for sample in read_samples(RUN_NAME)} == {"c\u2028d"}  # no end of a line


# -------------------------------------------------------------------------------------------------------- which problems select


OF_RUN = "grpo_learning_rate", "a", 0
LAST = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def written(evaluation: dict[str, int], outcomes: Any = ([0, 0, 1, 0], [1, 0, 1, 1])) -> None:
    """A run's folder, evaluated on four problems and at last on six."""
    rewards = [np.array(row, dtype=float) for row in outcomes]
    made = replace(run("a", rewards, 0, OF_RUN[0], steps=1), last=np.array(LAST))
    made.config["evaluation"] = evaluation
    report_parts.write_run(made)


@pytest.mark.parametrize(
    ("last_problems", "selecting", "selection", "final"),
    [
        (6, 2, LAST[:2], LAST[2:]),
        (6, 0, LAST, LAST),  # all choose and judge
        (12, 6, LAST[:3], LAST[3:]),  # the validation set is half as large as asked for: the same share selects
        (18, 8, LAST[:2], LAST[2:]),  # rounded down, so that some are left to judge
    ],
)
def test_the_first_problems_of_the_last_evaluation_select_and_the_others_judge(
    workdir: Path, last_problems: int, selecting: int, selection: list[float], final: list[float]
) -> None:
    written({"last_problems": last_problems, "selection_problems": selecting})
    found = read_run(*OF_RUN)
    assert (found.selection.tolist(), found.final.tolist()) == (selection, final)
    assert found.outcomes.tolist() == [[0, 0, 1, 0], [1, 0, 1, 1]]  # on the problems of all evaluations


@pytest.mark.parametrize("sizes", [(4, 3, 6), (4, 4, 3), (4,)])
def test_evaluations_on_other_problems_than_the_last_ones_are_alike(workdir: Path, sizes: tuple[int, ...]) -> None:
    written({"last_problems": 6, "selection_problems": 2})
    lines = "".join(json.dumps({"answer_reward": [1.0] * size}) + "\n" for size in sizes)
    Path("data/runs/grpo_learning_rate/a/0/outcomes.jsonl").write_text(lines)
    with pytest.raises(UserError, match=r"outcomes\.jsonl: damaged"):
        read_run(*OF_RUN)


def test_all_evaluations_are_of_one_reward(workdir: Path) -> None:
    """The study's own, if they have it."""
    written({"last_problems": 4, "selection_problems": 2})
    folder = Path("data/runs/grpo_learning_rate/a/0")
    lines = [json.dumps({"answer_reward": [1.0] * 4} | own) + "\n" for own in ({}, {"reward": [0.5] * 4})]
    (folder / "validation.csv").write_text("step,val/reward\n0,0.5\n1,0.5\n")
    (folder / "outcomes.jsonl").write_text(2 * lines[1])
    found = read_run(*OF_RUN)
    assert (found.metric, found.end) == ("reward", 0.5)
    (folder / "outcomes.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match=r"evaluations of different rewards \(answer_reward, reward\)"):
        read_run(*OF_RUN)
