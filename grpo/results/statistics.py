"""Intervals of proportions and of means over problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.95


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
