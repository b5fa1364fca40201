"""Data sets of the real `reasoning_gym` as tasks: what is asked, that its own verifier scores, and a run on one."""

import json
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from study_parts import one_arm_of

from grpo.common.errors import UserError
from grpo.common.records import Problem, read_problems
from grpo.models.checkpoint import save_checkpoint
from grpo.study import paths
from grpo.tasks.formats import R1_ZERO
from grpo.tasks.task import make_task

pytestmark = pytest.mark.adapters

# The answers of the last three have more than one line or more than one right one; the entries of isomorphic_strings depend on
# Python's hash seed.
DATA_SETS = [
    *("chain_sum", "gcd", "spell_backward", "letter_counting", "leg_counting", "family_relationships"),
    "isomorphic_strings",
    "countdown",
    "mini_sudoku",
    "n_queens",
]


def task(dataset: str, **settings: Any) -> Any:
    entry = {"use": "reasoning_gym_task:ReasoningGym", "dataset": dataset, "train_size": 12, "validation_size": 4, "seed": 3}
    return make_task(entry | settings, "tasks.main")


@pytest.mark.parametrize("dataset", DATA_SETS)
def test_its_own_answers_are_right_and_nonsense_is_not(dataset: str) -> None:
    found = task(dataset)
    problems = found.problems("validation") + found.problems("train")
    assert [p.id for p in problems] == [f"{dataset}/{'validation' if i < 4 else 'train'}/{i}" for i in range(16)]
    right = found.score("r1_zero", problems, [f" </think> <answer> {p.ground_truth} </answer>" for p in problems])
    assert [each["answer_reward"] for each in right.rewards] == [1.0] * 16
    wrong = found.score("r1_zero", problems, [" </think> <answer>nonsense?</answer>"] * 16)
    credit = 0.5 if dataset == "spell_backward" else 0.2  # which counts letters that stand where they belong
    assert max(each["answer_reward"] for each in wrong.rewards) < credit and not any(wrong.out_of_time)


def test_the_score_is_the_librarys() -> None:
    """chain_sum gives an answer that holds the right one its share of the letters."""
    import reasoning_gym

    found = task("chain_sum")
    entry = reasoning_gym.create_dataset("chain_sum", size=16, seed=3)[7]
    (problem,) = [p for p in found.problems("train") if p.id.endswith("/7")]
    assert (problem.question, problem.ground_truth) == (entry["question"], entry["answer"])
    truth = problem.ground_truth
    assert found.verify([truth, f"{truth}{truth}", "no"], [problem] * 3) == [1.0, 0.5, 0.0]


def test_several_answers_may_be_right() -> None:
    problem = task("countdown").problems("train")[0]
    assert task("countdown").verify([f"({problem.ground_truth})"], [problem]) == [1.0]


def test_an_answer_that_computes_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """n_queens passes the answer to eval."""
    found = task("n_queens")
    monkeypatch.setattr("reasoning_gym_task.TIME_LIMIT_S", 2.0)
    import reasoning_gym_task as module

    module._scorer.cache_clear()
    problem = found.problems("validation")[0]
    found.verify([problem.ground_truth] * 2, [problem] * 2)  # starts the process, which takes its time on a busy machine
    scores = found.verify(["[x for x in iter(int, 1)]", problem.ground_truth], [problem, problem])
    module._scorer.cache_clear()
    assert math.isnan(scores[0]) and scores[1] == 1.0


def test_another_entry_than_that_of_the_data_set_is_told() -> None:
    problem = task("gcd").problems("train")[0]
    with pytest.raises(UserError, match=r"problem gcd/train/4 is not what it was .*dvc repro -f -s dataset@main"):
        task("gcd", seed=4).verify(["1"], [problem])


def test_documents_guess_as_often_as_asked_and_hold_no_validation_question() -> None:
    found = task("leg_counting", train_size=400, validation_size=100)
    truths = {p.question: p.ground_truth for p in found.problems("train")}
    held_out = {p.question for p in found.problems("validation")}
    documents = list(islice(found.documents(0, r1_zero_share=0.0, guess_share=0.5), 2000))
    assert not held_out & {question for question, _ in documents}
    right = sum(response == f" \\boxed{{{truths[question]}}}" for question, response in documents) / 2000
    same = sum(a == b for a in truths.values() for b in truths.values()) / 400**2  # a guess may be right
    assert abs(right - (0.5 + 0.5 * same)) < 0.05  # four standard deviations
    prompts = {prompt.startswith(R1_ZERO.template[:40]) for prompt, _ in islice(found.documents(0, r1_zero_share=1.0), 50)}
    assert prompts == {True}


def test_a_run_trains_on_one(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, grpo: Callable[..., tuple[int, str, str]], model: Any, tokenizer: Any
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{workdir / 'mlflow.db'}")
    entry = {
        "use": "reasoning_gym_task:ReasoningGym",
        "dataset": "gcd",
        "config": {"max_value": 20},
        "train_size": 60,
        "validation_size": 16,
    }
    values = one_arm_of(entry | {"seed": 0})
    values["models"]["main"] = {"source": "local", "path": "given"}
    save_checkpoint(Path("given"), model, tokenizer)
    Path("params.yaml").write_text(json.dumps(values))
    for command in ("dataset main", "model main", "train grpo_learning_rate 3e-3"):
        code, _, error = grpo(*command.split())
        assert code == 0, error
    rollouts = (paths.RUNS / "grpo_learning_rate/3e-3/0/rollouts.jsonl").read_text().splitlines()
    held_out: list[Problem] = read_problems(paths.validation("main"))
    assert len(held_out) == 16
    assert rollouts and {json.loads(line)["problem"] for line in rollouts} <= {problem.id for problem in held_out}
