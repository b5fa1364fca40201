"""Intervals and comparisons for the numbers that are reported."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054  # 97.5% quantile of the standard normal distribution


def wilson_interval(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Score interval for a proportion (Wilson 1927, JASA 22:209).

    Args:
        successes: how many of ``n`` succeeded.

    Returns:
        lower and upper end, within 0..1.

    Raises:
        ValueError: ``n`` is not positive.
    """
    if n <= 0:
        raise ValueError("an interval needs at least one observation")
    p = successes / n
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def clustered_standard_error(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Standard error of a mean whose observations are dependent within clusters, such as samples of one problem.

    The cluster-robust estimator (Liang and Zeger 1986, Biometrika 73:13; for evaluations Miller 2024, arXiv:2411.00640)
    with the correction G / (G - 1) for G clusters. With equal clusters it is the standard error of the clusters' means.

    Args:
        values: one for each observation.
        clusters: which cluster each observation belongs to.

    Raises:
        ValueError: fewer than two clusters, or the lengths differ.
    """
    sums: dict[Hashable, float] = {}
    mean = sum(values) / len(values)
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + value - mean
    if len(sums) < 2:
        raise ValueError("a clustered standard error needs at least two clusters")
    squares = sum(total * total for total in sums.values())
    return math.sqrt(squares * len(sums) / (len(sums) - 1)) / len(values)


def mean_over_problems(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Mean of one number a problem, with a 95% interval from the normal distribution, kept within 0..1.

    Where the number is itself estimated from several samples of its problem, this is the interval clustered by problem.

    Raises:
        ValueError: fewer than two problems.
    """
    value = float(np.mean(values))
    half = Z95 * clustered_standard_error(list(values), range(len(values)))
    return {"value": value, "low": max(0.0, value - half), "high": min(1.0, value + half), "problems": len(values)}


def paired_bootstrap(
    first: Sequence[float], second: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> dict[str, float]:
    """Difference of two policies' means on the same problems, by resampling problems.

    The percentile interval of Efron and Tibshirani (An Introduction to the Bootstrap, 1993, chapter 13). A problem's two
    scores stay together, so how hard the drawn problems are cancels out.

    Args:
        first, second: score of each problem (a mean, where there are several samples), in the same order.
        resamples: how many sets of problems are drawn.

    Returns:
        ``value`` (mean of ``second`` minus mean of ``first``), ``low`` and ``high`` (95%), ``p`` (two-sided: twice the smaller
        share of resamples on one side of 0, with 1 added above and below) and ``problems``.

    Raises:
        ValueError: the lengths differ, or there is nothing to compare.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"paired scores are needed for the same problems, but there are {len(first)} and {len(second)}")
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    generator = np.random.default_rng(seed)
    n = len(differences)
    # One resample at a time: all at once would need resamples x problems numbers.
    means = np.array([differences[generator.integers(n, size=n)].mean() for _ in range(resamples)])
    low, high = np.quantile(means, [0.025, 0.975])
    one_side = min((means <= 0).sum(), (means >= 0).sum())
    p = min(1.0, 2 * (one_side + 1) / (resamples + 1))
    return {"value": float(differences.mean()), "low": float(low), "high": float(high), "p": float(p), "problems": n}


def format_interval(estimate: Mapping[str, float]) -> str:
    """``value (low to high)`` with three decimals, for tables and sentences."""
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"
