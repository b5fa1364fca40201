"""The rules of claims, on made-up runs whose verdict can be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_parts
from pydantic import TypeAdapter, ValidationError
from scipy import stats

from grpo.common.files import write_json
from grpo.results.evidence import Evidence, NotMeasured
from grpo.results.runs import Run
from grpo.results.verdicts import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_TESTED,
    OPEN,
    SAME,
    Verdict,
    comparison,
    decide,
    judge,
    level,
    smallest_seen,
)
from grpo.study import paths
from grpo.study.claims import AnyClaim

PROBLEMS, STEPS = 200, 64
NORM, ENTROPY, LENGTH = "gradient_norm", "token_entropy", "val/response_length"


def run(arm: str, *rewards: float, seed: int = 0, steps: int = STEPS, **metrics: Any) -> Run:
    """A run by the rewards of its evaluations, the untrained model's first, and metrics of its steps."""
    outcomes, every = [report_parts.solved(reward, PROBLEMS) for reward in rewards], steps // (len(rewards) - 1)
    return report_parts.run(arm, outcomes, seed, "made_up", every=every, steps=steps, **({NORM: 1.0} | metrics))


def ending(arm: str, *finals: float, start: float = 0.1, **options: Any) -> list[Run]:
    """Runs of an arm by their last evaluation, one a seed."""
    return [run(arm, start, final, seed=seed, **options) for seed, final in enumerate(finals)]


def lost(arm: str, number: int, of: int) -> list[Run]:
    """Runs of an arm of which so many collapse from .8 to 0."""
    ends = [(0.8, 0.0) if seed < number else (0.8, 0.8) for seed in range(of)]
    return [run(arm, 0.1, *end, seed=seed) for seed, end in enumerate(ends)]


def verdict(arms: Sequence[list[Run]], **claim: Any) -> Verdict:
    """Judge a claim about these arms."""
    evidence = Evidence("made_up", {runs[0].arm: runs for runs in arms})
    if "beats" in claim:
        claim = {"by": 0.05} | claim
    parsed: AnyClaim = TypeAdapter(AnyClaim).validate_python({"experiment": "made_up"} | claim)
    return judge(parsed, *(evidence.arm(name) for _, name in parsed.arms()))


def test_kept_checkpoints_are_compared_by_the_last_one(workdir: Path) -> None:
    """Rewards of the old task by their difference, KL by its ratio; the runs of the arms took different numbers of steps."""
    arms = [ending("keeps", 0.8, 0.7, steps=8), ending("forgets", 0.8, 0.7, steps=STEPS)]
    kept = {"keeps": (0.9, 0.8), "forgets": (0.5, 0.45)}
    steps = {
        arm: [{"step": 0, "by_run": {}}]
        + [
            {"step": step, "by_run": {f"made_up/{arm}/{seed}": {"old_task_reward": end * share, "forward_per_token": 1 / end}}}
            for seed, end in enumerate(ends)
            for step, share in ((4, 0.1), (40, 1.0))
        ]
        for arm, ends in kept.items()
    }
    write_json(paths.KL_REPORTS / "made_up.json", {"arms": steps})
    found = verdict(arms, arm="keeps", beats="forgets", metric="val/old_task_reward")
    half = stats.t.ppf(0.975, 1) * 0.025  # of the differences 0.4 and 0.35
    assert found.quantity == "difference" and found.interval == pytest.approx(
        {"value": 0.375, "low": 0.375 - half, "high": 0.375 + half}
    )
    found = verdict(arms, arm="forgets", beats="keeps", metric="kl/forward_per_token", by=1.25)
    assert found.quantity == "ratio" and found.interval is not None
    assert found.interval["value"] == pytest.approx(math.sqrt(0.9 / 0.5 * 0.8 / 0.45))
    with pytest.raises(ValidationError, match="leave `at` out"):
        verdict(arms, arm="forgets", beats="keeps", metric="kl/forward_per_token", by=1.25, at="late")
    with pytest.raises(NotMeasured, match="no kl/per_token"):
        verdict(arms, arm="forgets", beats="keeps", metric="kl/per_token", by=1.25)


# ---------------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.06, 0.2, HOLDS),
        (0.04, 0.2, OPEN),  # above zero, but not by 0.05
        (-0.04, 0.04, SAME),
        (0.01, 0.04, SAME),  # above zero, and too little to count
        (-0.06, 0.04, DOES_NOT_HOLD),  # not above by 0.05, whatever else
        (-0.2, -0.1, DOES_NOT_HOLD),
        (-0.2, 0.2, OPEN),
    ],
)
def test_an_interval_decides_by_which_side_of_the_margin_it_lies_on(low: float, high: float, expected: str) -> None:
    assert decide({"value": (low + high) / 2, "low": low, "high": high}, 0.05, -0.05).verdict == expected


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.06, 0.2, "higher"), (-0.2, -0.06, "lower"), (-0.04, 0.04, "same"), (0.01, 0.06, "open"), (-0.2, 0.2, "open")],
)
def test_a_difference_in_a_word(low: float, high: float, word: str) -> None:
    assert comparison({"value": (low + high) / 2, "low": low, "high": high}) == word


def test_a_true_difference_of_the_smallest_that_is_seen_is_found_in_80_percent_of_studies() -> None:
    """Five seeds, each difference normal about the truth: the interval leaves the margin upwards in 80% of the draws."""
    rng = np.random.default_rng(0)
    found, n = 0, 5
    truth = smallest_seen(1 / math.sqrt(n), n - 1)  # the distance by the true standard error
    for _ in range(4000):
        values = rng.normal(0.0, 1.0, n)
        found += truth + values.mean() - stats.t.ppf(0.975, n - 1) * stats.sem(values) > 0
    assert 0.78 < found / 4000 < 0.82


# -------------------------------------------------------------------------------------------------------------- beats


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0.9, 0.9, 0.9), (0.5, 0.5, 0.5), HOLDS),
        ((0.5, 0.5, 0.5), (0.9, 0.9, 0.9), DOES_NOT_HOLD),
        ((0.505, 0.505, 0.505), (0.5, 0.5, 0.5), SAME),  # one problem of 200: .005 +- 1.97 x .005
        ((0.3, 0.5, 0.7, 0.9), (0.2, 0.4, 0.6, 0.8), HOLDS),  # by .1 in each seed, though the seeds differ by .2
        ((0.9, 0.7, 0.5, 0.3), (0.2, 0.4, 0.6, 0.8), OPEN),  # the same runs, otherwise paired
    ],
)
def test_rewards_are_compared_seed_by_seed(a: tuple[float, ...], b: tuple[float, ...], expected: str) -> None:
    found = verdict([ending("a", *a), ending("b", *b)], arm="a", beats="b")
    assert found.verdict == expected and found.quantity == "difference"
    assert found.interval is not None and found.interval["value"] == pytest.approx(np.mean(a) - np.mean(b))
    assert found.measured.startswith(f"a {np.mean(a):.3f}, b {np.mean(b):.3f}; difference ")


def test_collapsed_runs_count_with_what_they_end_at() -> None:
    """Of five runs at .9 two end at zero: their mean is .54."""
    a = [run("a", 0.1, 0.9, 0.0 if seed < 2 else 0.9, seed=seed) for seed in range(5)]
    found = verdict([a, ending("b", *[0.5] * 5)], arm="a", beats="b")
    assert found.verdict == OPEN
    assert "a 0.540 (2 of 5 runs collapsed)" in found.measured


def test_rewards_before_training_are_those_of_the_first_evaluation() -> None:
    arms = [ending("a", *[0.2] * 3, start=0.6), ending("b", *[0.9] * 3, start=0.1)]
    assert verdict(arms, arm="a", beats="b", by=0.1, at="start").verdict == HOLDS
    assert verdict(arms, arm="a", beats="b", by=0.1).verdict == DOES_NOT_HOLD


@pytest.mark.parametrize(
    ("a", "b", "claim", "message"),
    [
        (ending("a", 0.5, 0.5), ending("b", 0.5, 0.5), {}, "identical results"),
        (ending("a", 0.5, 0.6), ending("b", 0.5, 0.5, steps=32), {}, "different numbers of steps"),
        (ending("a", 0.6), ending("b", 0.5), {"metric": ENTROPY, "by": 1.25, "at": "late"}, "two or more"),  # seeds
    ],
)
def test_what_decides_nothing(a: list[Run], b: list[Run], claim: dict[str, Any], message: str) -> None:
    with pytest.raises(NotMeasured, match=message):
        verdict([a, b], arm="a", beats="b", **claim)


@pytest.mark.parametrize(
    ("levels", "by", "expected"),
    [((2, 2.2, 1.8), 1.25, HOLDS), ((1, 1.02, 0.98), 1.25, SAME), ((0.5, 0.5, 0.5), 1.25, DOES_NOT_HOLD)],
)
def test_levels_of_a_metric_are_compared_by_their_ratio(levels: tuple[float, ...], by: float, expected: str) -> None:
    """The interval is that of the mean logarithm (Student), each seed against its own."""
    a = [run("a", 0.1, 0.6, seed=seed, **{ENTROPY: 0.5 * (seed + 1) * times}) for seed, times in enumerate(levels)]
    b = [run("b", 0.1, 0.5, seed=seed, **{ENTROPY: 0.5 * (seed + 1)}) for seed in range(len(levels))]
    found = verdict([a, b], arm="a", beats="b", metric=ENTROPY, by=by, at="late")
    logs = np.log(levels)
    low, high = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs)) if logs.std() else (logs[0], logs[0])
    expected_interval = {"value": math.exp(logs.mean()), "low": math.exp(low), "high": math.exp(high)}
    assert found.verdict == expected and found.quantity == "ratio" and found.interval == pytest.approx(expected_interval)


def test_a_run_that_stopped_early_is_compared_over_the_steps_that_both_took() -> None:
    """From step 33 on the rival's entropy is ten times as high, which the arm did not live to see."""
    a = [run("a", 0.1, 0.6, seed=seed, steps=32) for seed in range(3)]
    b = [run("b", 0.1, 0.5, seed=seed, **{ENTROPY: np.where(np.arange(64) < 32, 0.25, 5.0)}) for seed in range(3)]
    assert verdict([a, b], arm="a", beats="b", metric=ENTROPY, by=1.25, at="late").interval == {
        "value": pytest.approx(2),
        "low": pytest.approx(2),
        "high": pytest.approx(2),
    }


# ---------------------------------------------------------------------------------------------------------- not below


@pytest.mark.parametrize(
    ("a", "expected"),
    [(0.9, HOLDS), (0.5, HOLDS), (0.485, HOLDS), (0.45, OPEN), (0.3, DOES_NOT_HOLD)],
)
def test_an_arm_costs_nothing_if_the_interval_lies_above_minus_the_margin(a: float, expected: str) -> None:
    """At .45 the true difference may be -.05 either way; at .485 it is -.015 +- .017."""
    arms = [ending("a", a, a, a + 1 / PROBLEMS), ending("b", 0.5, 0.5, 0.5)]
    assert verdict(arms, arm="a", not_below="b", by=0.05).verdict == expected


# ------------------------------------------------------------------------------------------------ arms that still move


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0.7, 0.7), (0.3, 0.5), NOT_TESTED),  # ahead by .2, but .2 less than one evaluation before
        ((0.5, 0.7), (0.5, 0.5), HOLDS),  # the arm ahead still gains
        ((0.5, 0.7), (0.3, 0.5), HOLDS),  # both climb alike
        ((0.3, 0.5), (0.7, 0.7), NOT_TESTED),  # behind, and catching up
        ((0.5, 0.3), (0.7, 0.7), DOES_NOT_HOLD),
    ],
)
def test_a_verdict_about_ends_waits_until_they_stop_moving_towards_it(
    a: tuple[float, float], b: tuple[float, float], expected: str
) -> None:
    arms = [[run(name, 0.1, *of, seed=seed, steps=48) for seed in range(3)] for name, of in (("a", a), ("b", b))]
    found = verdict(arms, arm="a", beats="b")
    assert found.verdict == expected and ("still moving" in found.reason) == (expected == NOT_TESTED)
    assert verdict(arms, arm="a", beats="b", at="last_step").verdict == (HOLDS if a[-1] > b[-1] else DOES_NOT_HOLD)


def test_a_collapse_is_an_end_far_below() -> None:
    assert verdict([ending("b", *[0.8] * 5), lost("a", 5, 5)], arm="b", beats="a").verdict == HOLDS
    assert verdict([ending("b", *[0.8] * 5), lost("a", 2, 5)], arm="b", beats="a").verdict == OPEN


@pytest.mark.parametrize(("peak", "expected"), [(20.0, HOLDS), (2.0, SAME)])
def test_peaks_are_compared_by_their_ratio(peak: float, expected: str) -> None:
    """The highest of a step's updates counts, in both arms: alike peaks are no finding, however far above their means."""
    norms = np.ones(STEPS)
    high, low = norms.copy(), norms.copy()
    high[40], low[40] = peak, 2.0
    arms = [
        [run(name, 0.1, end, seed=seed, **{NORM: of}) for seed in range(3)]
        for name, end, of in (("a", 0.5, high), ("b", 0.6, low))
    ]
    found = verdict(arms, arm="a", beats="b", metric=NORM, at="peak", by=3)
    assert found.verdict == expected
    assert found.interval is not None and found.interval["value"] == pytest.approx(peak / 2)


# --------------------------------------------------------------------------------------------------- levels of a metric


def test_levels_are_medians_of_the_first_sixteenth_and_the_last_quarter() -> None:
    values = np.arange(1.0, STEPS + 1)
    values[-1] = np.nan  # one update that was not finite
    one = run("a", 0.1, 0.5, **{NORM: values})
    levels = {at: level(one, NORM, at) for at in ("start", "late", "end", "throughout")}
    assert levels == {"start": 2.5, "late": 56.5, "end": 62.5, "throughout": 32.5}
    assert level(one, NORM, "late", last=32) == 28.5
    assert level(one, LENGTH, "end") == 20  # of the evaluations
    with pytest.raises(NotMeasured, match="no such_metric"):
        level(one, "such_metric", "end")
    with pytest.raises(NotMeasured, match="fewer than two values"):
        level(one, NORM, "end", last=1)
