"""Mixtures of tasks: shares, verification by each task, and metrics of each."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest

from grpo.common.errors import UserError
from grpo.common.records import Completion, Problem, Rollout
from grpo.tasks.mixture import shares
from grpo.tasks.task import Format, Split, Task, make_task

SUMS = {"use": "arithmetic", "train_size": 60, "validation_size": 30, "levels": 1, "seed": 0}


class Letters(Task):
    """Twelve questions whose answer is the problem's id, so that a changed problem is noticed."""

    drop_overlap = True

    formats = {"question_only": Format("{question}"), "r1_zero": make_task(SUMS).formats["r1_zero"]}

    def problems(self, split: Split) -> list[Problem]:
        return [Problem(f"{split}/{letter}", f"{split} {letter}?", letter) for letter in "abcdefghijkl"]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        return [{p.id: 1.0, "half": 0.5, "late": math.nan}.get(a, 0.0) for a, p in zip(answers, problems, strict=True)]

    def skipped(self, split: Split) -> list[str]:
        return [f"{split} 13"]

    def documents(self, seed: int, **options: Any) -> Any:
        return itertools.repeat(("letters", str(options)))


def mixture(**settings: Any) -> Any:
    tasks = {"sums": SUMS | {"weight": 3}, "letters": {"use": "test_mixture:Letters"}}
    return make_task({"use": "mixture", "tasks": tasks} | settings, "tasks.main")


@pytest.mark.parametrize(
    ("sizes", "weights", "expected"),
    [
        ({"a": 100, "b": 100}, {"a": 1, "b": 1}, {"a": 100, "b": 100}),
        ({"a": 7473, "b": 12000}, {"a": 1, "b": 1}, {"a": 7473, "b": 7473}),
        ({"a": 60, "b": 12}, {"a": 3, "b": 1}, {"a": 36, "b": 12}),
        ({"a": 10, "b": 1000}, {"a": 0.1, "b": 0.9}, {"a": 10, "b": 90}),
        ({"a": 33, "b": 1000}, {"a": 0.9, "b": 0.3}, {"a": 33, "b": 11}),  # .3 * (33 / .9) is less than 11 by rounding
    ],
)
def test_shares_are_the_weights(sizes: dict[str, int], weights: dict[str, float], expected: dict[str, int]) -> None:
    assert shares(sizes, weights) == expected


def test_any_first_part_has_the_tasks_in_their_shares() -> None:
    """36 sums to 12 letters: a quarter of any first n problems are letters, up to rounding."""
    problems = mixture().problems("train")
    kinds = [problem.id.split("/")[0] for problem in problems]
    assert Counter(kinds) == {"sums": 36, "letters": 12} and len({p.id for p in problems}) == 48
    assert all(abs(kinds[:n].count("letters") - n / 4) <= 1 for n in range(1, 49))
    assert [p.question for p in problems if p.id.startswith("letters")] == [f"train {letter}?" for letter in "abcdefghijkl"]


def test_what_one_task_leaves_out_the_mixture_leaves_out() -> None:
    assert [mixture().skipped(split) for split in ("train", "validation")] == [["train 13"], ["validation 13"]]
    assert mixture().drop_overlap and not mixture(tasks={"sums": SUMS}).drop_overlap


def test_each_task_verifies_its_own_problems_by_their_own_ids() -> None:
    found = mixture()
    problems = found.problems("validation")
    letters = [p for p in problems if p.id.startswith("letters")][:3]
    sums = [p for p in problems if p.id.startswith("sums")][:2]
    asked = [letters[0], sums[0], letters[1], sums[1], letters[2]]
    answers = ["validation/a", sums[0].ground_truth, "half", "validation/b", "late"]
    scored = found.score("r1_zero", asked, [f"</think> <answer>{answer}</answer>" for answer in answers])
    assert [each["answer_reward"] for each in scored.rewards] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert scored.out_of_time == [False] * 4 + [True]


def test_rewards_of_each_task_are_logged() -> None:
    """(1 + 0 + 0.5) / 3, and NaN for a task without rollouts."""
    rollouts = [
        Rollout(Problem(f"{name}/x/1", "", ""), (), Completion((), "", (), "stop"), {"answer_reward": reward})
        for name, reward in (("sums", 1.0), ("sums", 0.0), ("sums", 0.5))
    ]
    found = mixture().training_measures(rollouts)
    assert found.keys() == {"sums/answer_reward", "letters/answer_reward"} and found["sums/answer_reward"] == 0.5
    assert math.isnan(found["letters/answer_reward"]) and mixture().measures(rollouts).keys() == found.keys()


def test_only_formats_that_are_the_same_in_all_are_offered() -> None:
    """Both tasks have a question_only, but different ones."""
    assert list(mixture().formats) == ["r1_zero"]


def test_documents_are_drawn_by_the_weights() -> None:
    options = {"sums": {"r1_zero_share": 1.0, "complete_form_share": 1.0, "guess_share": 0.0}, "letters": {"n": 2}}
    drawn = list(itertools.islice(mixture().documents(0, **options), 4000))
    letters = [response for prompt, response in drawn if prompt == "letters"]
    assert abs(len(letters) / 4000 - 0.25) < 0.03 and set(letters) == {"{'n': 2}"}  # four standard deviations
    of_sums = next(document for document in mixture().documents(1, **options) if document[0] != "letters")
    zero, one = (next(make_task(SUMS).documents(seed, **options["sums"])) for seed in (0, 1))
    assert of_sums == one != zero
    with pytest.raises(UserError, match=r"documents: words: no such task \(known: sums, letters\)"):
        next(mixture().documents(0, words={}))
