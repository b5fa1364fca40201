"""examples/countdown.py: its verifications by hand, and a study of its own from its problems to a GRPO run, by import path."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_parts import one_arm_of

from grpo.common.records import read_problems
from grpo.tasks.task import Task, make_task

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")


def countdown(**arguments: Any) -> Task:
    return make_task({"use": "countdown:Countdown", **arguments}, "tasks.main")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("8 * 3 - 1", 1.0), ("3*8-1", 1.0), ("(8 * 3) - 1", 1.0), ("3 * (8 - 1)", 0.1), ("8 + 3", 0.1), ("8", 0.1),
        ("23", 0.0), ("8 * 3 - 1 + 0", 0.0), ("8 + 8 + 8 - 1", 0.0), ("24 - 1", 0.0), ("8 * 3 - 1 = 23", 0.0), ("", 0.0),
        ("-1 + 8 * 3", 0.0), ("8 ** 3", 0.0), ("8 * 3 - True", 0.0), ("8 * (3 - 1", 0.0), ("twenty-three", 0.0),
    ],
)  # fmt: skip
def test_each_number_counts_at_most_once(answer: str, reward: float) -> None:
    from countdown import Problem

    problem = Problem("p", "Use 1 3 8 to make 23.", "1 3 8 = 23")
    for form, response in (("r1_zero", f"</think> <answer>{answer}</answer>"), ("question_only", rf"\boxed{{{answer}}}")):
        scored = countdown().score(form, [problem, problem], [response, "23"])
        assert scored.rewards[0] == {"format_reward": 1.0, "answer_reward": reward, "reward": reward}
        assert set(scored.rewards[1].values()) == {0.0}


def test_splits_share_no_question_and_documents_ask_none_of_validation() -> None:
    task = countdown(train_size=200, validation_size=50)
    train, validation = task.problems("train"), task.problems("validation")
    assert (len(train), len(validation)) == (200, 50) and task.problems("train") == train
    held_out = {problem.question for problem in validation}
    assert not {problem.question for problem in train} & held_out
    right = 0
    for prompt, response in itertools.islice(task.documents(3, wrong_share=0.3), 200):
        assert not any(question in prompt for question in held_out)
        asked = prompt[prompt.index("Use ") + 4 : prompt.index(".", prompt.index("Use "))]
        form = "r1_zero" if "<answer>" in response else "question_only"
        problem = type(train[0])("p", "", asked.replace(" to make", " ="))
        right += task.score(form, [problem], [response]).rewards[0]["reward"] == 1.0
    assert 115 < right < 165  # 0.7 of 200, and those whose last number changes nothing (times 1)


@pytest.mark.slow
def test_the_example_runs_from_problems_to_a_trained_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grpo: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    values = one_arm_of({"use": "countdown:Countdown", "train_size": 64, "validation_size": 16})
    values["models"]["main"] |= {"documents": {"wrong_share": 0.2}, "steps": 30}
    (tmp_path / "params.yaml").write_text(json.dumps(values))
    for command in ("dataset main", "model main", "math_baseline", "train grpo_learning_rate 3e-3"):
        code, _, error = grpo(*command.split())
        assert code == 0, error
    assert len(read_problems(tmp_path / "data/dataset/main/train.jsonl")) == 64
    metrics = json.loads((tmp_path / "data/runs/grpo_learning_rate/3e-3/0/metrics.json").read_text())
    assert metrics["steps"] == values["grpo"]["n_grpo_steps"] and 0 <= metrics["val/answer_reward"] <= 1
    inputs = (tmp_path / "data/runs/grpo_learning_rate/3e-3/0/config.yaml").read_text()
    assert "countdown.py" in inputs  # its code is part of what the run depends on
