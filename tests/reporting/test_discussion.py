"""The write-up's sentences, on made-up histories whose numbers are known."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

from grpo.reporting.discussion import course, outcome
from grpo.results.runs import Run


def discuss(runs: list[Run], selection: dict[str, Any]) -> str:
    """Both parts of what is said."""
    return " ".join(filter(None, (outcome(runs, selection), course(runs, selection))))


def run(arm: str, rewards: list[float], seed: int = 0, diverged: int | None = None, **history: Any) -> Run:
    """A run with one update a step and an evaluation at every step; 100 problems."""
    n = len(rewards) - 1
    values = {
        "step": range(1, n + 1),
        "token_entropy": np.linspace(0.5, 0.1, n),
        "gradient_norm": np.full(n, 0.25),
        "clip_fraction": np.zeros(n),
        "ratio_min": np.ones(n),
        "ratio_max": np.ones(n),
    }
    validation = {"step": range(n + 1), "val/answer_reward": rewards, "val/response_length": np.linspace(40, 20, n + 1)}
    metrics = {
        "best/answer_reward": max(rewards),
        "best/step": int(np.argmax(rewards)),
        "val/answer_reward": rewards[-1],
        "val/format_reward": 0.7,
        "diverged_step": diverged,
        "diverged_reason": "answer reward 0.010, under its start" if diverged is not None else "",
    }
    outcomes = np.array([[1.0] * round(100 * r) + [0.0] * (100 - round(100 * r)) for r in rewards])
    return Run("e", arm, seed, {}, metrics, pd.DataFrame(values | history), pd.DataFrame(validation), outcomes)


def candidate(arm: str, value: float, behind: tuple[float, float, float] | None, diverged: bool = False, runs: int = 2) -> Any:
    return {
        "arm": arm,
        "value": value,
        "low": value - 0.05,
        "high": value + 0.05,
        "behind": behind and {"value": behind[0], "low": behind[1], "high": behind[2], "detectable": 0.123},
        "diverged": [f"e/{arm}-0"] if diverged else [],
        "runs": [{}] * runs,
    }


def selected(*candidates: Any, leader: str) -> dict[str, Any]:
    return {"last_k": 1, "leader": leader, "winner": leader, "pinned": False, "reason": "", "candidates": list(candidates)}


def sentences(text: str) -> int:
    return len(re.findall(r"\.(?= [A-Za-z]|$)", text))


UP = [0.1, 0.4, 0.7, 0.8]


def test_a_clear_leader_with_its_difference() -> None:
    text = discuss(
        [run("a", UP), run("b", [0.1, 0.2, 0.3, 0.4])],
        selected(candidate("a", 0.75, None), candidate("b", 0.35, (0.4, 0.3, 0.5)), leader="a"),
    )
    assert "a leads with a validation answer reward of 0.750 (0.700 to 0.800), 2 runs an arm" in text
    assert "0.400 (0.300 to 0.500) above b (0.350): the interval of the difference lies above zero." in text
    assert "In a the reward went from 0.100 to 0.800; token entropy began at 0.500 nats" in text
    assert "ended at 0.100 (a), 0.100 (b)" in text and "began at 40.0 tokens and ended at 20.0 (a), 20.0 (b)" in text
    assert "the median gradient norm was 0.25 (a), 0.25 (b)." in text
    assert sentences(text) == 2
    assert "cannot tell" not in text and "Ratios" not in text


def test_arms_that_trained_alike_are_told() -> None:
    text = discuss(
        [run("a", UP), run("b", UP)],
        selected(candidate("a", 0.75, None), candidate("b", 0.75, (0.0, 0.0, 0.0)), leader="a"),
    )
    assert "b trained like a to the last number: what they differ in played no part." in text


def test_a_difference_that_cannot_be_told_says_what_could_have_been() -> None:
    text = discuss(
        [run("a", UP), run("b", [*UP[:-1], 0.81])],
        selected(candidate("a", 0.75, (0.01, -0.02, 0.04)), candidate("b", 0.76, None), leader="b"),
    )
    assert "trained like" not in text
    assert "b leads" in text and "these runs cannot tell the two apart; a difference of 0.123 would have been found" in text
    assert sentences(text) == 2


def test_diverged_and_collapsed_arms_are_named_with_step_and_reason() -> None:
    text = discuss(
        [run("a", UP), run("b", [0.1, 0.02, 0.01], diverged=2), run("c", [0.1, 0.7, 0.2, 0.1])],
        selected(
            candidate("a", 0.75, None),
            candidate("b", 0.01, (0.7, 0.6, 0.8), diverged=True),
            candidate("c", 0.15, (0.6, 0.5, 0.7)),
            leader="a",
        ),
    )
    assert "b diverged and was stopped (step 2: answer reward 0.010, under its start)" in text
    assert "c collapsed: it reached 0.700 at step 1 and counts with 0.150" in text
    assert sentences(text) == 3


def test_an_arm_that_never_left_its_start_has_not_collapsed() -> None:
    """Behind the leader as far as can be, and the best of its evaluations a little above its last."""
    text = discuss(
        [run("a", UP), run("b", [0.06, 0.09, 0.07, 0.06]), run("c", [0.06, 0.6, 0.4, 0.31])],
        selected(
            candidate("a", 0.75, None), candidate("b", 0.06, (0.7, 0.6, 0.8)), candidate("c", 0.31, (0.4, 0.3, 0.5)), leader="a"
        ),
    )
    assert "b ends where it started, at 0.060: its gain of 0.000 (0.000 to 0.000) holds zero." in text
    assert "collapsed" not in text and "a ends" not in text and "c ends" not in text


def test_of_several_runs_those_that_collapsed_are_counted() -> None:
    runs = [run("a", UP), run("b", [0.1, 0.9, 0.8, 0.8]), run("b", [0.1, 0.7, 0.2, 0.1], seed=1)]
    text = discuss(runs, selected(candidate("a", 0.75, None), candidate("b", 0.45, (0.3, 0.1, 0.5)), leader="a"))
    assert "b collapsed in 1 of 2 runs: it reached 0.700 at step 1 and counts with 0.450" in text


def test_a_run_that_diverged_among_several_is_counted() -> None:
    runs = [run("a", UP), run("a", UP, 1), run("b", UP, 0, diverged=3), run("b", UP, 1)]
    text = discuss(runs, selected(candidate("a", 0.75, None), candidate("b", 0.9, (-0.15, -0.2, -0.1), True), leader="a"))
    assert "that arm did better, but a run of it diverged." in text
    assert "b diverged in 1 of 2 runs" in text


def test_ratios_are_told_of_arms_that_moved() -> None:
    moved = {"ratio_max": [1.0, 3.0, 2.0], "ratio_min": [1.0, 0.25, 0.5], "clip_fraction": [0.0, 0.04, 0.02]}
    text = discuss(
        [run("a", UP), run("b", UP, **moved), run("c", [0.1, 0.2, 0.3, 0.3])],
        selected(
            candidate("a", 0.75, None),
            candidate("b", 0.75, (0.0, -0.1, 0.1)),
            candidate("c", 0.3, (0.45, 0.3, 0.6)),
            leader="a",
        ),
    )
    assert "Ratios to the sampling policy: b 0.25 to 3 with 2% of tokens clipped." in text
    assert "Also apart from a: c, 0.450 (0.300 to 0.600) below." in text
    assert sentences(text) == 4


@pytest.mark.parametrize(("low_variance", "spike"), [([0.0, 0.1, 0.12], False), ([0.0, 0.1, 9.0], True)])
def test_a_single_arm_with_kl(low_variance: list[float], spike: bool) -> None:
    columns = {f"kl/{name}": [0.0, 0.1, 0.2] for name in ("per_token", "per_sequence", "per_sequence_low_variance")}
    text = discuss(
        [run("best", UP, **columns, **{"kl/per_token_low_variance": low_variance})],
        selected(candidate("best", 0.75, None, runs=1), leader="best"),
    )
    assert text.startswith("best has a validation answer reward of 0.750 (0.700 to 0.800), 1 run.")
    assert f"KL to the starting policy was 0 nats a token at step 1 and 0.2 at the last step by the sampled estimate, 0 and {low_variance[-1]:.3g} by" in text  # noqa: E501  # fmt: skip
    assert ("belies its name here: its largest value in a step, 9, is 90 times its median" in text) == spike
    assert 2 <= sentences(text) <= 5
