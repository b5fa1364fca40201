"""Confidence intervals over runs and problems.

The scores of an arm are a table (runs, problems), with the same problems in each run and in each arm. A repetition of the study
would have other runs (new seeds) and other problems (another validation set). The variances of both are estimated and added
(Miller 2024, arXiv:2411.00640, for problems; Agarwal et al. 2021, arXiv:2108.13264, and Hochlehnert et al. 2025,
arXiv:2504.07086, on why the interval must cover the spread between few runs):

- A difference of two arms is paired: seed by seed, as runs of one seed share the order of their problems and, in some studies,
  the base model; and problem by problem. What both arms share cancels out.
- The interval uses Student's t with the degrees of freedom of Satterthwaite (1946), rounded down.
- The interaction of run and problem is part of both estimates, and is counted once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Scores = NDArray[np.float64]
LEVEL = 0.95

# With one run per arm, the run variance is unknown. Instead of it: the standard deviation of five runs of one configuration on
# MATH (garg-2026 in claims.yaml).
ASSUMED_RUN_SD, ASSUMED_DF = 0.045, 4
TINY = 1e-9  # zero up to rounding


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float
    problems: int
    se: float  # standard error
    df: float  # degrees of freedom of Student's t

    def __str__(self) -> str:
        return format_interval(self.ends())

    def ends(self) -> dict[str, float]:
        """Only ``value``, ``low`` and ``high``."""
        return {"value": self.value, "low": self.low, "high": self.high}


def mean_of(scores: Scores, fixed: bool = False) -> Interval:
    """Mean reward of an arm, kept within 0..1.

    ``scores``: (runs, problems). ``fixed``: all runs are the same policy (the untrained model), so the variance between runs is
    zero.
    """
    scores = np.atleast_2d(np.asarray(scores, dtype=float))
    found = _interval([scores], fixed, LEVEL)
    low, high = found.low, found.high
    if found.se < TINY:  # all rewards are equal, mostly zero
        low, high = wilson_interval(float(scores.mean()) * scores.shape[1], scores.shape[1])
    return replace(found, low=max(0.0, low), high=min(1.0, high))


def difference_of(first: Scores, second: Scores, level: float = LEVEL, fixed: bool = False) -> Interval:
    """Difference of two arms' mean rewards, ``second`` minus ``first``, kept within -1..1.

    Args:
        first, second: (runs, problems), with seeds and problems in the same order. If one arm has more seeds, its last ones are
            left out.
        level: :func:`simultaneous` for several contrasts together.
        fixed: as in :func:`mean_of`.
    """
    first, second = (np.atleast_2d(np.asarray(scores, dtype=float)) for scores in (first, second))
    runs = min(len(first), len(second))
    found = _interval([second[:runs] - first[:runs]], fixed, level, arms=2)
    return replace(found, low=max(-1.0, found.low), high=min(1.0, found.high))


def simultaneous(contrasts: int) -> float:
    """The level of each interval at which all of them cover at once with 95% (Sidak 1967, JASA 62:626)."""
    return float(LEVEL ** (1 / contrasts))


def mean_of_any(numbers: Scores) -> Interval:
    """Mean of an arm's numbers of any size, (runs, problems)."""
    return _interval([numbers], False, LEVEL)


def mean_of_pairs(differences: Sequence[Scores]) -> Interval:
    """Mean of the paired differences of two arms in one or several studies, in which each run counts alike.

    ``differences``: (runs, problems) for each set of problems: studies with the same problems are one table.
    """
    return _interval(differences, False, LEVEL, arms=2)


def _interval(tables: Sequence[Scores], fixed: bool, level: float, arms: int = 1) -> Interval:
    """The interval of the mean of tables (runs, problems): the scores of one arm, or the differences of two ``arms``.

    The tables are about different problems; their variances over problems are added, each by the square of its share of runs.
    """
    shares = [len(table) / sum(map(len, tables)) for table in tables]
    parts = [] if fixed else [_between_runs(tables, arms)]  # variances, each with its degrees of freedom
    for table, share in zip(tables, shares, strict=True):
        (runs, problems), by_problem = table.shape, table.mean(axis=0)
        if problems > 1:
            squares = float(((by_problem - by_problem.mean()) ** 2).sum())
            if squares < TINY and arms > 1:
                squares = 1.0  # as if the arms differed in one problem (Agresti and Min 2005), so that the width is not zero
            rest = 0.0 if fixed else _rest(table) / runs
            parts.append((max(0.0, squares / (problems - 1) / problems - rest) * share**2, problems - 1))
    problems = sum(table.shape[1] for table in tables)
    variance, df = satterthwaite(parts)
    df = df or float(max(1, problems - 1))
    value = sum(share * float(table.mean(axis=0).mean()) for table, share in zip(tables, shares, strict=True))
    half = float(stats.t.ppf((1 + level) / 2, df)) * math.sqrt(variance)
    return Interval(value, value - half, value + half, problems, math.sqrt(variance), df)


def satterthwaite(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Add variances, each with its degrees of freedom: the sum and its degrees of freedom, rounded down; 0 if all are zero."""
    variance, weights = sum(part for part, _ in parts), sum(part**2 / df for part, df in parts)
    return variance, max(1.0, math.floor(variance**2 / weights + TINY)) if weights > 0 else 0.0


def _between_runs(tables: Sequence[Scores], arms: int) -> tuple[float, float]:
    """Variance of the tables' mean between runs and its degrees of freedom.

    It is at least that of sampling within single problems. Where the tables differ by more than their runs explain (F test at
    5%), such as by what each study chose, it is that of their means.
    """
    means, sizes = np.concatenate([table.mean(axis=1) for table in tables]), [len(table) for table in tables]
    if (runs := len(means)) == 1:
        return arms * ASSUMED_RUN_SD**2, ASSUMED_DF
    if 1 < (studies := len(tables)) < runs:
        apart = sum(len(table) * (table.mean() - means.mean()) ** 2 for table in tables) / (studies - 1)
        within = sum(((table.mean(axis=1) - table.mean()) ** 2).sum() for table in tables) / (runs - studies)
        if apart > within * stats.f.ppf(LEVEL, studies - 1, runs - studies) + TINY:
            return float(apart) / runs, studies - 1
    between, rest = float(means.var(ddof=1)), sum(size / runs * _rest(of) for size, of in zip(sizes, tables, strict=True))
    df = sum((size - 1) * (table.shape[1] - 1) for size, table in zip(sizes, tables, strict=True)) or 1
    return (between / runs, runs - 1) if between > rest else (rest / runs, df)


def _rest(table: Scores) -> float:
    """Variance of a run's mean due to sampling within problems: the mean square within, divided by the number of problems."""
    runs, problems = table.shape
    if runs == 1 or problems == 1:
        return 0.0
    left = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + table.mean()
    return float((left**2).sum() / ((runs - 1) * (problems - 1) * problems))


# ----------------------------------------------------------------------------------------- proportions, and means over problems


def wilson_interval(successes: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Score interval for a proportion (Wilson 1927, JASA 22:209).

    For numbers between 0 and 1, such as partial rewards, the interval is conservative: with mean p, their variance is at most
    the p(1 - p) of a proportion (Bhatia and Davis 2000, American Mathematical Monthly 107:353).

    ``successes``: number of successes in ``n``, or the sum of ``n`` numbers. A sum that is not a whole number gets the lower
    end of the next smaller count and the upper end of the next larger one. Raises ValueError: ``n`` is not positive.
    """
    if n <= 0:
        raise ValueError("an interval needs at least one observation")
    total = round(float(successes), 9)
    below, above = (stats.binomtest(count, n) for count in (math.floor(total), math.ceil(total)))
    low = below.proportion_ci(level, method="wilson").low
    return float(low), float(above.proportion_ci(level, method="wilson").high)


def interval_of_mean(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """95% interval of the mean of one number per problem: :func:`wilson_interval` for numbers between 0 and 1, else normal."""
    if min(values) >= 0 and max(values) <= 1:
        return wilson_interval(float(np.sum(values)), len(values))
    half = float(stats.norm.ppf((1 + LEVEL) / 2)) * float(np.std(values)) / math.sqrt(len(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def t_interval(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Mean of two or more numbers with its 95% interval (Student 1908)."""
    value, half = float(np.mean(values)), float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * float(stats.sem(values))
    return {"value": value, "low": value - half, "high": value + half}


def mean_over_problems(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Mean of one number per problem, with a 95% t-interval kept within 0..1.

    If each number averages several samples of its problem, this is the interval clustered by problem (Miller 2024,
    arXiv:2411.00640). Raises ValueError: fewer than two problems.
    """
    if len(values) < 2:
        raise ValueError("an interval over problems needs at least two problems")
    found = t_interval(values)
    return found | {"low": max(0.0, found["low"]), "high": min(1.0, found["high"]), "problems": len(values)}


def probability_of_improvement(first: Sequence[float], second: Sequence[float]) -> float:
    """The probability that one of the ``first`` numbers is higher than one of the ``second``, over all pairs; ties count half.

    It is the U of Mann and Whitney (1947, Annals of Mathematical Statistics 18:50) by the number of pairs, and for the ends of
    runs rliable's ``probability_of_improvement`` on one task (Agarwal et al. 2021, arXiv:2108.13264, Section 4.3).
    """
    return float(np.sign(np.subtract.outer(first, second)).mean() + 1) / 2


def format_interval(estimate: Mapping[str, float]) -> str:
    """Format an estimate as ``value (low to high)`` with three decimals."""
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"
