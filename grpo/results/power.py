"""Power of the interval over runs and problems: how many seeds would detect a difference."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from scipy import stats

from grpo.results.intervals import Scores, squares_within

CHANCE = 0.8  # required probability of detecting a difference
MOST_SEEDS = 1_000_000  # upper end of the search


@dataclass(frozen=True)
class Spread:
    """Variance components of the difference of two arms, each the sum over the two arms.

    Model of an arm (crossed design): score of a problem in a run = mean + run + problem + rest.
    """

    runs: float  # between runs (seeds)
    problems: float  # between problems, of the difference of the two arms
    rest: float  # of one problem in one run: sampling, and the interaction of seed and problem
    n_problems: int  # that each run answers

    def of_difference(self, seeds: int) -> float:
        """Variance of the difference of two arms with so many runs each, over new problems and runs."""
        return self.problems / self.n_problems + (self.runs + self.rest / self.n_problems) / seeds


def spread_of(first: Scores, second: Scores) -> Spread:
    """Estimate the variance components by analysis of variance; negative estimates become zero.

    With E the expected value: E(mean square between runs) = rest + problems x between runs, E(mean square within) = rest
    (Searle, Casella and McCulloch, Variance Components, 1992, chapter 4).

    Args:
        first, second: (runs, problems), with problems in the same order; at least two runs.
    """
    arms, n_problems = (first, second), first.shape[1]
    within = [squares_within(scores) / ((len(scores) - 1) * (n_problems - 1)) for scores in arms]
    between = [float(scores.mean(axis=1).var(ddof=1)) - rest / n_problems for scores, rest in zip(arms, within, strict=True)]
    rest_of_means = sum(rest / len(scores) for scores, rest in zip(arms, within, strict=True))
    difference = second.mean(axis=0) - first.mean(axis=0)
    problems = max(0.0, float(difference.var(ddof=1)) - rest_of_means)
    return Spread(sum(max(0.0, variance) for variance in between), problems, sum(within), n_problems)


def power(spread: Spread, difference: float, seeds: int) -> float:
    """Probability that the interval of a study with so many seeds excludes zero on the difference's side.

    Power of Student's t-test (Cohen, Statistical Power Analysis, 1988, chapter 2), with Satterthwaite's degrees of freedom for
    two arms with equal spread.

    Args:
        difference: the true difference, or its distance from a bar other than zero.
    """
    variance = spread.of_difference(seeds)
    if variance == 0:
        return float(difference != 0)
    by_problems = spread.problems / spread.n_problems
    df = variance**2 / ((variance - by_problems) ** 2 / (2 * seeds - 2) + by_problems**2 / (spread.n_problems - 1))
    return float(stats.nct.sf(stats.t.ppf(0.975, df), df, abs(difference) / math.sqrt(variance)))


def seeds_needed(spread: Spread, difference: float) -> int | None:
    """The smallest number of seeds (at least two) with which :func:`power` is 0.8; None if no number is enough."""
    seeds = range(2, MOST_SEEDS + 1)
    place = bisect_left(seeds, CHANCE, key=lambda number: power(spread, difference, number))
    return seeds[place] if place < len(seeds) else None


def problems_needed(spread: Spread, difference: float) -> int:
    """The number of problems below which no number of seeds detects the difference with a probability of 0.8.

    In the limit of many seeds, |difference| = (z(0.975) + z(0.8)) sqrt(variance between problems / number of problems).
    """
    quantiles = float(stats.norm.ppf(0.975) + stats.norm.ppf(CHANCE))
    return math.ceil(spread.problems * (quantiles / difference) ** 2)
