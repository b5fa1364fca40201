"""Intervals of means and proportions: against numbers by hand, scipy's tests, published values and simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from grpo.results.intervals import difference_of, mean_of, mean_of_any, simultaneous
from grpo.results.statistics import interval_of_mean, mean_over_problems, probability_of_improvement, wilson_interval


def answers(generator: np.random.Generator, rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Right (1) or wrong (0), each with its own chance."""
    return (generator.random(rates.shape) < rates).astype(float)


def flat(*means: float) -> NDArray[np.float64]:
    """Runs whose problems all have the run's mean, so that nothing varies but the runs."""
    return np.tile(np.array(means)[:, None], 50)


def test_where_only_runs_vary_it_is_the_paired_t_interval() -> None:
    """One problem in 50 counts as differing, as no two arms can be known to be alike on all problems: 1 / 50^2 more or less."""
    first, second = (0.31, 0.34, 0.37, 0.40, 0.43), (0.35, 0.43, 0.51, 0.59, 0.47)
    found = difference_of(flat(*first), flat(*second))
    error = math.sqrt(stats.sem(np.subtract(second, first)) ** 2 + 1 / 49 / 50)
    assert found.se == pytest.approx(error) and found.value == pytest.approx(np.mean(second) - np.mean(first))
    assert found.high - found.value == pytest.approx(stats.t.ppf(0.975, found.df) * error)
    assert found.df == 8  # Satterthwaite's 8.6, rounded down


def test_what_runs_of_one_seed_share_cancels_out() -> None:
    """Seeds whose base models differ by up to .4, and arms that differ by about .1 on each of them."""
    bases = flat(0.2, 0.4, 0.6)
    found = difference_of(bases, bases + flat(0.09, 0.1, 0.11))
    assert found.value == pytest.approx(0.1) and found.se == pytest.approx(math.sqrt(0.01**2 / 3 + 1 / 49 / 50))
    rise = mean_of_any(flat(1.09, 1.1, 1.11))  # of numbers of any size, nothing is added or cut
    assert rise.se == pytest.approx(0.01 / math.sqrt(3)) and rise.df == 2 and rise.high > rise.value > 1


def test_by_hand() -> None:
    """Two runs of two problems: means 0.25 and 0.75; rest after run and problem is +-0.25 in each, twice in each run."""
    found = mean_of(np.array([[0.0, 0.5], [1.0, 0.5]]))
    # Between runs .125. Rest: 4 x .0625 over (1 x 1 x 2) = .125, so that nothing is left for the problems: their means are
    # both .5. The mean's variance is .125 / 2 with one degree of freedom, its t is 12.706.
    assert (found.value, found.se, found.df) == (0.5, pytest.approx(0.25), 1)
    assert (found.low, found.high) == (0.0, 1.0)  # .5 +- 3.18, kept within 0 and 1
    wide = difference_of(np.zeros((2, 2)), np.array([[0.0, 0.5], [1.0, 0.5]]))
    # The difference has no variance over problems, so it counts as that of one problem, 1 / 1 / 2, less the rest / 2.
    assert wide.se == pytest.approx(math.sqrt(0.0625 + 0.5 - 0.0625))
    assert (wide.low, wide.high) == (-1.0, 1.0)  # .5 +- 12.706 x .707, kept within -1 and 1


def test_where_only_problems_vary_it_is_the_paired_t_interval() -> None:
    generator = np.random.default_rng(3)
    rates = generator.random(300)
    first, second = answers(generator, rates), answers(generator, np.minimum(1, rates + 0.08))
    found, truth = difference_of(first, second, fixed=True), stats.ttest_rel(second, first)
    expected = truth.confidence_interval()
    assert (found.low, found.high) == pytest.approx(expected)
    three = difference_of(np.tile(first, (3, 1)), np.tile(second, (3, 1)))
    assert (three.low, three.high) == pytest.approx(expected)


def test_one_run_an_arm_has_an_assumed_spread() -> None:
    first, second = (answers(np.random.default_rng(seed), np.full(400, 0.6)) for seed in (1, 2))
    found, fixed = difference_of(first, second), difference_of(first, second, fixed=True)
    assert found.se == pytest.approx(math.sqrt(fixed.se**2 + 2 * 0.045**2))
    assert mean_of(flat(0.4)).df == 4  # the spread is assumed from five runs


def test_runs_cannot_spread_less_than_chance_within_problems_makes_them() -> None:
    """Three runs with equal means by luck: what one run does to one problem still counts."""
    generator = np.random.default_rng(0)
    table = np.stack([generator.permutation(np.repeat([0.0, 1.0], 100)) for _ in range(3)])
    found = mean_of(table)
    # Within problems the variance is about .25; a run's mean has .25 / 200, the mean of three a third of that.
    assert np.ptp(table.mean(axis=1)) == 0 and found.se == pytest.approx(math.sqrt(0.25 / 200 / 3), rel=0.1)


def test_rewards_that_are_all_alike_have_an_interval_too() -> None:
    """No reward in 256 problems: Wilson's upper end is 3.84 / 259.84."""
    nothing = mean_of(np.zeros((3, 256)))
    assert (nothing.value, nothing.low, nothing.high) == (0.0, 0.0, pytest.approx(0.01478, abs=1e-5))
    assert mean_of(np.ones((3, 256))).low == pytest.approx(1 - 0.01478, abs=1e-5)
    alike = difference_of(np.zeros((3, 256)), np.zeros((3, 256)))
    assert (alike.value, alike.high) == (0.0, pytest.approx(1.969 / math.sqrt(255 * 256), rel=1e-3))


def test_several_contrasts_are_covered_at_once() -> None:
    one, five = (difference_of(flat(0.3, 0.4, 0.5), flat(0.5, 0.6, 0.7), simultaneous(n)) for n in (1, 5))
    assert (five.high - five.low) / (one.high - one.low) == pytest.approx(
        stats.t.ppf((1 + 0.95**0.2) / 2, one.df)  # Sidak
        / stats.t.ppf(0.975, one.df)
    )


@pytest.mark.parametrize(("runs", "sds"), [(3, (0.05, 0.05)), (3, (0.02, 0.02)), (3, (0.02, 0.1)), (5, (0.1, 0.1))])
def test_the_interval_covers_the_true_difference_as_often_as_it_says(runs: int, sds: tuple[float, float]) -> None:
    """Runs and problems drawn anew each time; benchmarks/coverage.py has the whole table."""
    generator, hits = np.random.default_rng(9), 0
    for _ in range(300):
        problems = generator.uniform(0.35, 0.65, size=256)
        arms = [answers(generator, np.clip(problems + generator.normal(0, sd, (runs, 1)), 0, 1)) for sd in sds]
        found = difference_of(*arms)
        hits += found.low <= 0 <= found.high
    assert hits / 300 >= 0.92


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611)],  # Newcombe 1998, Statistics in Medicine 17:857, Table I, method 3
)
def test_wilson_interval(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_probability_of_improvement_is_the_u_of_mann_and_whitney() -> None:
    """Over all pairs: .5 and .5 are a tie, .5 is below .6, and .7 above both. Beside SciPy's U with many ties."""
    assert probability_of_improvement([0.5, 0.7], [0.5, 0.6]) == 2.5 / 4
    rng = np.random.default_rng(0)
    for n, m in ((1, 1), (3, 5), (20, 7)):
        first, second = rng.integers(0, 6, n) / 6, rng.integers(0, 6, m) / 6
        u = stats.mannwhitneyu(first, second).statistic
        assert probability_of_improvement(first, second) == pytest.approx(u / (n * m))
        assert probability_of_improvement(second, first) == pytest.approx(1 - u / (n * m))


def test_wilson_intervals_of_another_level_and_of_nothing() -> None:
    # p = 1/2, n = 4, z = 1: center 1/2, half width sqrt(1/16 + 1/64) / 1.25 = .223607
    assert wilson_interval(2, 4, level=0.6826894921370859) == pytest.approx((0.276393, 0.723607), abs=1e-6)
    with pytest.raises(ValueError, match="at least one"):
        wilson_interval(0, 0)


def test_mean_over_problems_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        found = mean_over_problems(generator.beta(2, 3, size=60))
        hits += found["low"] <= 0.4 <= found["high"]
    assert 0.92 <= hits / 400 <= 0.98
    three = mean_over_problems([0.2, 0.4, 0.6])  # a standard deviation of .2, and t with two degrees of freedom
    assert (three["low"], three["high"]) == (0.0, pytest.approx(0.4 + 4.3027 * 0.2 / 3**0.5, rel=1e-4))
    assert mean_over_problems([1.0, 1.0]) == {"value": 1.0, "low": 1.0, "high": 1.0, "problems": 2}


def test_a_sum_that_is_no_whole_number_lies_between_its_neighbours() -> None:
    below, between, above = (wilson_interval(total, 10) for total in (4, 4.5, 5))
    assert between == (below[0], above[1])
    assert wilson_interval(0.1 * 3 + 2.7, 10) == wilson_interval(3, 10)  # 3.0000000000000004


def test_an_interval_of_a_mean_is_wilsons_for_shares_and_normal_for_other_numbers() -> None:
    assert interval_of_mean([1.0, 0.0, 0.0, 1.0]) == wilson_interval(2, 4)
    low, high = interval_of_mean([-3.0, -1.0])  # a standard deviation of 1, and 1.96 standard errors
    assert (low, high) == (pytest.approx(-2 - 1.95996 / 2**0.5, abs=1e-4), pytest.approx(-2 + 1.95996 / 2**0.5, abs=1e-4))
