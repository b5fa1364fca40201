"""Intervals and comparisons against published values, textbook formulas and simulated truth."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grpo.results.statistics import (
    clustered_standard_error,
    mean_over_problems,
    paired_bootstrap,
    two_level_difference,
    two_level_mean,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        # Newcombe 1998, Statistics in Medicine 17:857, Table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 5000])
def test_wilson_interval_holds_the_share_and_is_symmetric(n: int) -> None:
    for successes in {0, 1, n // 2, n}:
        low, high = wilson_interval(successes, n)
        assert 0.0 <= low <= successes / n + 1e-12 and successes / n - 1e-12 <= high <= 1.0
        assert (1 - high, 1 - low) == pytest.approx(wilson_interval(n - successes, n), abs=1e-12)


def test_wilson_interval_with_another_level() -> None:
    # p = 1/2 and n = 4: center 1/2, half width sqrt(1/16 + 1/64) / 1.25 = .223607
    assert wilson_interval(2, 4, z=1.0) == pytest.approx((0.276393, 0.723607), abs=1e-6)


@pytest.mark.parametrize("n", [0, -3])
def test_no_observations_have_no_interval(n: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        wilson_interval(0, n)


# ------------------------------------------------------------------------------------------- clusters and paired scores


def test_clustered_standard_error_of_equal_clusters_is_that_of_their_means() -> None:
    values, clusters = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b", "c", "c"]
    means = [0.5, 1.0, 0.0]
    expected = (sum((m - 0.5) ** 2 for m in means) / 2 / 3) ** 0.5
    assert clustered_standard_error(values, clusters) == pytest.approx(expected)
    # Each observation its own cluster: the ordinary standard error of a mean.
    alone = (sum((v - 0.5) ** 2 for v in values) / 5 / 6) ** 0.5
    assert clustered_standard_error(values, range(6)) == pytest.approx(alone)


def test_copies_of_a_sample_say_nothing_new() -> None:
    """Sixteen equal samples of each problem have the standard error of one sample of each."""
    once = [1.0, 0.0, 0.0, 1.0, 1.0]
    many = [value for value in once for _ in range(16)]
    clusters = [problem for problem in range(5) for _ in range(16)]
    assert clustered_standard_error(many, clusters) == pytest.approx(clustered_standard_error(once, range(5)))
    assert clustered_standard_error(many, clusters) > 3 * clustered_standard_error(many, range(80))
    with pytest.raises(ValueError, match="two clusters"):
        clustered_standard_error([1.0, 0.0], ["a", "a"])


def test_mean_over_problems_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        found = mean_over_problems(generator.beta(2, 3, size=60))
        hits += found["low"] <= 0.4 <= found["high"]
    assert 0.92 <= hits / 400 <= 0.98
    assert mean_over_problems([1.0, 1.0]) == {"value": 1.0, "low": 1.0, "high": 1.0, "problems": 2}


def test_paired_bootstrap_uses_that_the_problems_are_the_same() -> None:
    """Policies that differ on few problems: the paired interval is that of the differences, far below the unpaired one."""
    generator = np.random.default_rng(1)
    first = (generator.random(400) < 0.5).astype(float)
    second = first.copy()
    second[np.flatnonzero(first == 0)[:20]] = 1.0
    found = paired_bootstrap(first, second)
    assert found["value"] == pytest.approx(0.05)
    error = (0.05 * 0.95 / 400) ** 0.5
    assert (found["low"], found["high"]) == pytest.approx((0.05 - 1.96 * error, 0.05 + 1.96 * error), abs=0.004)
    assert found["p"] < 0.001
    assert paired_bootstrap(second, first)["value"] == pytest.approx(-0.05)
    assert paired_bootstrap(first, second) == found  # seeded
    same = paired_bootstrap(first, first)
    assert (same["value"], same["low"], same["high"], same["p"]) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="3 and 2"):
        paired_bootstrap([1, 0, 1], [1, 0])


def test_paired_bootstrap_rejects_a_true_null_hypothesis_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    p = [paired_bootstrap(*(generator.random((2, 100)) < 0.5).astype(float), resamples=400, seed=i)["p"] for i in range(300)]
    assert 0.02 <= np.mean(np.array(p) < 0.05) <= 0.09


# ------------------------------------------------------------------------------------------------- runs and problems

DETECTABLE = 2.8016  # 1.95996 + .84162: quantiles of the standard normal distribution for 97.5% and 80%


def answers(generator: np.random.Generator, rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Right (1) or wrong (0), each with its own chance."""
    return (generator.random(rates.shape) < rates).astype(float)


def test_with_one_run_an_arm_the_interval_is_that_of_the_paired_bootstrap() -> None:
    generator = np.random.default_rng(3)
    rates = generator.random(300)
    first, second = answers(generator, rates), answers(generator, np.minimum(1, rates + 0.08))
    found, expected = two_level_difference(first[None], second[None]), paired_bootstrap(first, second)
    assert found["value"] == pytest.approx(expected["value"], abs=1e-12) != 0
    assert (found["low"], found["high"]) == pytest.approx((expected["low"], expected["high"]), abs=0.005)
    assert (found["runs"], found["problems"]) == (1, 300)
    error = np.std(second - first, ddof=1) / math.sqrt(300)
    assert found["detectable"] == pytest.approx(DETECTABLE * error, rel=0.03)
    assert two_level_difference(first, second) == found  # one run may come without its own axis


def test_with_one_run_the_mean_has_the_interval_over_problems() -> None:
    scores = answers(np.random.default_rng(4), np.full((1, 500), 0.6))
    found, expected = two_level_mean(scores), mean_over_problems(list(scores[0]))
    assert {key: found[key] for key in ("value", "runs", "problems")} == {"value": scores.mean(), "runs": 1, "problems": 500}
    assert (found["low"], found["high"]) == pytest.approx((expected["low"], expected["high"]), abs=0.005)
    assert two_level_mean(np.ones((3, 20)))["high"] == 1.0
    assert two_level_mean(np.zeros((3, 20)))["low"] == 0.0


def test_a_mean_over_runs_stays_within_zero_and_one() -> None:
    far = np.array([[0.0] * 10, [1.0] * 10])  # the spread between these runs reaches beyond both ends
    found = two_level_mean(far)
    assert (found["value"], found["low"], found["high"]) == (0.5, 0.0, 1.0)


@pytest.mark.parametrize("runs", [1, 3])
def test_equal_arms_whose_runs_are_all_equal_do_not_differ(runs: int) -> None:
    scores = np.tile(answers(np.random.default_rng(5), np.full(50, 0.5)), (runs, 1))
    found = two_level_difference(scores, scores.copy())
    assert (found["value"], found["low"], found["high"], found["detectable"]) == (0.0, 0.0, 0.0, 0.0)


def test_the_difference_is_second_minus_first() -> None:
    low, high = np.zeros((2, 40)), np.ones((3, 40))
    up, down = two_level_difference(low, high), two_level_difference(high, low)
    assert (up["value"], up["low"], up["high"]) == (1.0, 1.0, 1.0)
    assert (down["value"], down["low"], down["high"]) == (-1.0, -1.0, -1.0)
    assert up["runs"] == down["runs"] == 2  # of the arm with fewer


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0.30, 0.50), (0.45, 0.55)),
        ((0.30, 0.36, 0.44), (0.40, 0.52, 0.58)),
        ((0.30, 0.36, 0.44, 0.38, 0.41), (0.52, 0.61)),
        ((0.31, 0.34, 0.37, 0.40, 0.43), (0.35, 0.43, 0.51, 0.59, 0.47)),
    ],
)
def test_spread_between_runs_enters_with_its_textbook_standard_error(
    first: tuple[float, ...], second: tuple[float, ...]
) -> None:
    """Every problem of a run has the run's own mean, so nothing varies but the runs: sqrt(s_a^2 / n_a + s_b^2 / n_b)."""
    scores = [np.tile(np.array(means)[:, None], 50) for means in (first, second)]
    found = two_level_difference(*scores, resamples=40_000)
    error = math.sqrt(sum(np.var(means, ddof=1) / len(means) for means in (first, second)))
    assert found["value"] == pytest.approx(np.mean(second) - np.mean(first), abs=1e-6)
    assert found["detectable"] == pytest.approx(DETECTABLE * error, rel=0.02)


def test_the_errors_of_runs_and_of_problems_add_up() -> None:
    """A problem is equally hard for all runs and counts for the second arm alone, so that pairing cancels nothing."""
    runs = np.array([0.0, 0.02, 0.05, 0.07])
    hard = np.random.default_rng(6).random(100) * 0.5
    found = two_level_difference(np.zeros((1, 100)), hard + runs[:, None], resamples=40_000)
    error = math.sqrt(np.var(runs, ddof=1) / 4 + np.var(hard) / 100)
    assert found["detectable"] == pytest.approx(DETECTABLE * error, rel=0.02)
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_the_mean_has_the_same_two_errors() -> None:
    runs = np.array([0.0, 0.02, 0.05, 0.07])
    hard = np.random.default_rng(6).random(100) * 0.5
    found = two_level_mean(hard + runs[:, None], resamples=40_000)
    error = math.sqrt(np.var(runs, ddof=1) / 4 + np.var(hard) / 100)
    assert found["value"] == pytest.approx(hard.mean() + runs.mean())
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_how_hard_the_problems_are_cancels_out() -> None:
    """The second arm is the first and a little more on the same problems; with other problems the interval is wide."""
    hard = np.random.default_rng(7).random(200)
    runs = np.array([0.0, 0.001, 0.002])[:, None]
    paired = two_level_difference(hard + runs, hard + runs + 0.01)
    unpaired = two_level_difference(hard + runs, np.random.default_rng(8).permutation(hard) + runs + 0.01)
    assert paired["value"] == pytest.approx(0.01) and unpaired["value"] == pytest.approx(0.01)
    assert unpaired["high"] - unpaired["low"] > 20 * (paired["high"] - paired["low"])
    assert paired["low"] > 0 > unpaired["low"]


@pytest.mark.parametrize("truth", [0.0, 0.06])
def test_the_interval_covers_the_true_difference_as_often_as_it_says(truth: float) -> None:
    """Five runs an arm, the spread between runs as large as in real runs, 200 problems; all drawn anew each time."""
    generator, hits, over_problems = np.random.default_rng(9), 0, 0
    for _ in range(200):
        problems = generator.uniform(0.25, 0.65, size=200)
        first, second = (
            answers(generator, np.clip(problems + mean + generator.normal(0, 0.045, size=(5, 1)), 0, 1)) for mean in (0, truth)
        )
        found = two_level_difference(first, second, resamples=1000)
        hits += found["low"] <= truth <= found["high"]
        # What is left without the spread between runs: it would promise far too much.
        differences = second.mean(axis=0) - first.mean(axis=0)
        over_problems += abs(differences.mean() - truth) <= 1.96 * differences.std() / math.sqrt(200)
    assert 0.90 <= hits / 200 <= 0.99
    assert over_problems / 200 < 0.86  # about .77


def test_more_runs_find_smaller_differences() -> None:
    generator = np.random.default_rng(10)
    means = generator.permutation(np.linspace(-0.05, 0.05, 16))
    found = [two_level_difference(np.tile(m, (50, 1)).T, np.tile(m, (50, 1)).T) for m in (means[:4], means[:8], means)]
    assert all(few["detectable"] > many["detectable"] > 0 for few, many in pairwise(found))


def test_two_level_intervals_are_repeatable_and_seeded() -> None:
    scores: Any = answers(np.random.default_rng(11), np.full((2, 4, 60), 0.5))
    once = two_level_difference(*scores, resamples=500), two_level_mean(scores[0], resamples=500)
    two_level_difference(np.zeros((2, 7)), np.ones((2, 7)), resamples=50)  # nothing is left over from other calls
    assert (two_level_difference(*scores, resamples=500), two_level_mean(scores[0], resamples=500)) == once
    other = two_level_difference(*scores, resamples=500, seed=1), two_level_mean(scores[0], resamples=500, seed=1)
    for a, b in zip(once, other, strict=True):
        assert (a["low"], a["high"]) != (b["low"], b["high"])
        assert (a["low"], a["high"]) == pytest.approx((b["low"], b["high"]), abs=0.05)
        assert a["value"] == b["value"]


def test_different_problem_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="30 and 29"):
        two_level_difference(np.zeros((2, 30)), np.zeros((2, 29)))
    two_level_difference(np.zeros((2, 30)), np.zeros((5, 30)), resamples=10)  # the numbers of runs may differ


def test_wilson_covers_the_mean_of_partial_rewards() -> None:
    """Scores in {0, .5, 1} vary less than 0 and 1 with the same mean, so 95% intervals hold it at least as often."""
    generator = np.random.default_rng(0)
    scores = generator.choice([0.0, 0.5, 1.0], p=[0.2, 0.5, 0.3], size=(4000, 50))
    intervals = [wilson_interval(total, 50) for total in scores.sum(axis=1)]
    covered = np.mean([low <= 0.55 <= high for low, high in intervals])
    assert covered > 0.98
