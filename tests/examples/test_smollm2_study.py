"""studies/smollm2.yaml: its triples and what it measures of responses."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from study_parts import study_named

from grpo.tasks.task import Task


@pytest.fixture(scope="module")
def task() -> Task:
    return study_named("smollm2").task("main")


def test_validation_triples_do_not_occur_in_training_in_any_order(task: Task) -> None:
    train, held_out = ([frozenset(p.ground_truth.split(", ")) for p in task.problems(s)] for s in ("train", "validation"))
    assert not set(train) & set(held_out) and len({*train, *held_out}) == len(train) + len(held_out) == 2304
    assert {len(triple) for triple in (*train, *held_out)} == {3}


@pytest.mark.parametrize(
    ("response", "reward", "kinds"),
    [
        ("The cat drank milk by the fire while a dog slept.", 1.0, {"all_words"}),
        ("Cat, dog, and fire.", 1.0, {"all_words", "lists_only"}),
        ("The dog, cat and fire are three of a dog that runs home.", 1.0, {"all_words", "repeats_a_word"}),
        ("A catalogue of dogs.", 0.0, set()),
        ("The cat.", 1 / 3, set()),
    ],
)
def test_the_reward_is_the_share_of_the_words(response: str, reward: float, kinds: set[str], task: Task) -> None:
    problem = replace(task.problems("train")[0], ground_truth="cat, dog, fire")
    kinds_of = sys.modules[type(task).__module__].kinds_of
    assert task.score("chat", [problem], [response]).rewards[0]["reward"] == pytest.approx(reward)
    assert {kind for kind, found in kinds_of(response, ["cat", "dog", "fire"]).items() if found} == kinds
