"""Seeds needed for a difference, against hand-computed variances and simulated studies."""

from __future__ import annotations

from math import isclose

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from grpo.results.intervals import difference_of
from grpo.results.power import Spread, power, problems_needed, seeds_needed, spread_of

# Standard deviations of a contrast such as the mini study's: between runs, between problems (each arm's own part), of the rest.
RUNS, PROBLEMS, REST, N = 0.03, 0.25, 0.3, 256
SPREAD = Spread(2 * RUNS**2, 2 * PROBLEMS**2, 2 * REST**2, N)


def study(rng: np.random.Generator, seeds: int, difference: float) -> list[NDArray[np.float64]]:
    """Scores of two arms, (seeds, N) each, whose means differ by so much; both have the problems' difficulty in common."""
    difficulty = rng.normal(0.5, 0.4, N)
    return [
        mean + difficulty + rng.normal(0, PROBLEMS, N) + rng.normal(0, RUNS, (seeds, 1)) + rng.normal(0, REST, (seeds, N))
        for mean in (0.0, difference)
    ]


@pytest.mark.parametrize(("difference", "about"), [(0.09, 9), (0.105, 5)])
def test_with_the_computed_number_of_seeds_the_interval_leaves_zero_out_in_four_of_five_studies(
    difference: float, about: int
) -> None:
    seeds = seeds_needed(SPREAD, difference)
    assert seeds is not None and abs(seeds - about) <= 3
    rng = np.random.default_rng(0)
    told = [difference_of(*study(rng, seeds, difference)).low > 0 for _ in range(400)]
    assert isclose(np.mean(told), 0.8, abs_tol=0.06)  # three standard errors of 400 studies


def test_the_variances_are_found_again() -> None:
    rng = np.random.default_rng(2)
    found = [spread_of(*study(rng, 4, 0.1)) for _ in range(300)]
    for name in ("runs", "problems", "rest"):
        assert isclose(np.mean([getattr(one, name) for one in found]), getattr(SPREAD, name), rel_tol=0.06)


def test_by_hand() -> None:
    """Two runs of two problems: 0 and 2, then 4 and 10; the other arm is 1 everywhere."""
    spread = spread_of(np.array([[0.0, 2.0], [4.0, 10.0]]), np.ones((2, 2)))
    # What is left after run and problem: +-1, so 4 x 1 over one degree of freedom. Run means 1 and 7: variance 18, less 4 / 2.
    # Problems' means 2 and 6: the difference has variance 8, less 4 / 2 for the rest of two runs.
    assert (spread.runs, spread.problems, spread.rest, spread.n_problems) == (16.0, 6.0, 4.0, 2)
    assert spread.of_difference(2) == 6 / 2 + (16 + 4 / 2) / 2


def test_where_only_runs_vary_it_is_the_power_of_the_t_test() -> None:
    first, second = np.random.default_rng(0).normal(size=(2, 3, 20_000))
    found = stats.ttest_ind(second + 3, first)
    told = np.mean((found.pvalue < 0.05) & (found.statistic > 0))
    assert isclose(power(Spread(2.0, 0.0, 0.0, N), 3.0, 3), told, abs_tol=0.01)  # three standard errors


def test_the_fewest_seeds_are_the_fewest_and_a_bar_of_problems_is_said() -> None:
    seeds = seeds_needed(SPREAD, 0.1)
    assert seeds is not None and power(SPREAD, 0.1, seeds - 1) < 0.8 <= power(SPREAD, 0.1, seeds)
    assert seeds_needed(SPREAD, -0.1) == seeds
    assert seeds_needed(SPREAD, 0.01) is None  # 256 problems alone spread by 0.022
    enough = problems_needed(SPREAD, 0.01)
    assert enough == 9812  # 0.125 (2.8016 / 0.01)^2
    assert seeds_needed(Spread(SPREAD.runs, SPREAD.problems, SPREAD.rest, enough + 100), 0.01) is not None
    assert seeds_needed(Spread(0.0, 0.0, 0.0, N), 0.01) == 2
