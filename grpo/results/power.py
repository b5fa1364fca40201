"""How many seeds would tell a difference that these runs could not: power of the interval over runs and problems."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CHANCE = 0.8  # with which a difference is to be told
MOST_SEEDS = 1_000_000  # where a search for a number ends


@dataclass(frozen=True)
class Spread:
    """What makes the difference of two arms vary; variances, the two arms' together.

    The model is that of a crossed design, for each arm: score of a problem in a run = mean + run + problem + rest.

    Attributes:
        runs: between runs (seeds), of an arm's mean over all problems there are.
        problems: between problems, of the difference of the two arms; what both share cancels out.
        rest: of one problem in one run, which is sampling and what a seed does to single problems.
        n_problems: how many problems each run answers.
    """

    runs: float
    problems: float
    rest: float
    n_problems: int

    def of_difference(self, seeds: int) -> float:
        """Variance of the difference of two arms with so many runs each, problems and runs drawn anew."""
        return self.problems / self.n_problems + (self.runs + self.rest / self.n_problems) / seeds


def spread_of(first: NDArray[np.float64], second: NDArray[np.float64]) -> Spread:
    """The spread of two arms' difference, by analysis of variance; estimates below zero become zero.

    With E the expected value: E(mean square between runs) = rest + problems x between runs, E(mean square within) = rest
    (Searle, Casella and McCulloch, Variance Components, 1992, chapter 4).

    Args:
        first, second: (runs, problems), the problems in the same order.

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
    """The chance that the interval of a study with so many seeds leaves zero out on the difference's side.

    That of Student's t-test (Cohen, Statistical Power Analysis, 1988, chapter 2), with Satterthwaite's degrees of freedom for
    two arms that spread alike.

    Args:
        difference: the true one, or its distance from the bar where the question is another than zero.
    """
    variance = spread.of_difference(seeds)
    if variance == 0 or seeds < 2:
        return float(variance == 0 and difference != 0)
    by_problems = spread.problems / spread.n_problems
    df = variance**2 / ((variance - by_problems) ** 2 / (2 * seeds - 2) + by_problems**2 / (spread.n_problems - 1))
    return float(stats.nct.sf(stats.t.ppf(0.975, df), df, abs(difference) / math.sqrt(variance)))


def seeds_needed(spread: Spread, difference: float, chance: float = CHANCE) -> int | None:
    """The fewest seeds, two at least, with which :func:`power` is ``chance``; None if no number is enough."""
    if power(spread, difference, MOST_SEEDS) < chance:
        return None
    few, many = 1, MOST_SEEDS  # power grows with seeds; the answer lies above few and is at most many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if power(spread, difference, middle) >= chance else (middle, many)
    return max(2, many)


def problems_needed(spread: Spread, difference: float) -> int:
    """The number of problems below which no number of seeds tells the difference with a chance of 0.8.

    With ever more seeds only the problems are left: |difference| = (z(0.975) + z(0.8)) sqrt(between problems / their number).

    Raises:
        ValueError: the difference is zero, which nothing can tell from zero.
    """
    if difference == 0:
        raise ValueError("no number of problems tells a difference of zero from zero")
    quantiles = float(stats.norm.ppf(0.975) + stats.norm.ppf(CHANCE))
    return math.ceil(spread.problems * (quantiles / difference) ** 2)
