"""Power of the interval over runs and problems: how many seeds would detect a difference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CHANCE = 0.8  # required probability of detecting a difference
MOST_SEEDS = 1_000_000  # upper end of the search


@dataclass(frozen=True)
class Spread:
    """Variance components of the difference of two arms, each the sum over the two arms.

    Model of an arm (crossed design): score of a problem in a run = mean + run + problem + rest.

    Attributes:
        runs: variance between runs (seeds).
        problems: variance between problems, of the difference of the two arms.
        rest: variance of one problem in one run: sampling, and the interaction of seed and problem.
        n_problems: number of problems that each run answers.
    """

    runs: float
    problems: float
    rest: float
    n_problems: int

    def of_difference(self, seeds: int) -> float:
        """Variance of the difference of two arms with so many runs each, over new problems and runs."""
        return self.problems / self.n_problems + (self.runs + self.rest / self.n_problems) / seeds


def spread_of(first: NDArray[np.float64], second: NDArray[np.float64]) -> Spread:
    """Estimate the variance components by analysis of variance; negative estimates become zero.

    With E the expected value: E(mean square between runs) = rest + problems x between runs, E(mean square within) = rest
    (Searle, Casella and McCulloch, Variance Components, 1992, chapter 4).

    Args:
        first, second: (runs, problems), with problems in the same order.

    Raises:
        ValueError: an arm has fewer than two runs, or the numbers of problems differ.
    """
    if min(len(first), len(second)) < 2:
        raise ValueError("the spread between runs needs at least two runs an arm")
    n_problems = first.shape[1]
    if second.shape[1] != n_problems:
        raise ValueError(f"scores of the same problems are needed: {n_problems} and {second.shape[1]}")
    between, rest, rest_of_means = 0.0, 0.0, 0.0
    for scores in (first, second):
        runs, problems = scores.mean(axis=1, keepdims=True), scores.mean(axis=0, keepdims=True)
        left = scores - runs - problems + scores.mean()
        within = float((left**2).sum() / ((len(scores) - 1) * (n_problems - 1)))
        between += max(0.0, float(runs.var(ddof=1)) - within / n_problems)
        rest += within
        rest_of_means += within / len(scores)
    difference = second.mean(axis=0) - first.mean(axis=0)
    return Spread(between, max(0.0, float(difference.var(ddof=1)) - rest_of_means), rest, n_problems)


def power(spread: Spread, difference: float, seeds: int) -> float:
    """Probability that the interval of a study with so many seeds excludes zero on the difference's side.

    Power of Student's t-test (Cohen, Statistical Power Analysis, 1988, chapter 2), with Satterthwaite's degrees of freedom for
    two arms with equal spread.

    Args:
        difference: the true difference, or its distance from a bar other than zero.
    """
    variance = spread.of_difference(seeds)
    if variance == 0 or seeds < 2:
        return float(variance == 0 and difference != 0)
    by_problems = spread.problems / spread.n_problems
    df = variance**2 / ((variance - by_problems) ** 2 / (2 * seeds - 2) + by_problems**2 / (spread.n_problems - 1))
    return float(stats.nct.sf(stats.t.ppf(0.975, df), df, abs(difference) / math.sqrt(variance)))


def seeds_needed(spread: Spread, difference: float, chance: float = CHANCE) -> int | None:
    """The smallest number of seeds (at least two) with which :func:`power` is ``chance``; None if no number is enough."""
    if power(spread, difference, MOST_SEEDS) < chance:
        return None
    few, many = 1, MOST_SEEDS  # bisection: power grows with seeds; the answer is above few and at most many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if power(spread, difference, middle) >= chance else (middle, many)
    return max(2, many)


def problems_needed(spread: Spread, difference: float) -> int:
    """The number of problems below which no number of seeds detects the difference with a probability of 0.8.

    In the limit of many seeds, |difference| = (z(0.975) + z(0.8)) sqrt(variance between problems / number of problems).

    Raises:
        ValueError: the difference is zero.
    """
    if difference == 0:
        raise ValueError("no number of problems detects a difference of zero")
    quantiles = float(stats.norm.ppf(0.975) + stats.norm.ppf(CHANCE))
    return math.ceil(spread.problems * (quantiles / difference) ** 2)
