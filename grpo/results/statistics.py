"""Intervals and comparisons for the numbers that are reported.

scipy has Wilson's interval too, of whole counts only, and a bootstrap whose ends differ in their last bits. Neither is shorter,
and importing ``scipy.stats`` takes a second of each stage that trains.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054  # 97.5% quantile of the standard normal distribution
Z80 = 0.8416212335729143  # 80% quantile


def wilson_interval(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Score interval for a proportion (Wilson 1927, JASA 22:209).

    Of numbers that lie between 0 and 1, such as partial rewards, it is too wide if anything: with mean p their variance is at
    most the p(1 - p) that it reckons with (Bhatia and Davis 2000, American Mathematical Monthly 107:353).

    Args:
        successes: how many of ``n`` succeeded, or the sum of the ``n`` numbers.

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


def two_level_mean(scores: NDArray[np.float64], resamples: int = 10_000, seed: int = 0) -> dict[str, float]:
    """Mean score of one configuration with a 95% interval over its runs and over the problems.

    Args:
        scores: (runs, problems).

    Returns:
        ``value``, ``low`` and ``high`` (kept within 0..1), ``runs``, ``problems``.
    """
    scores = np.atleast_2d(np.asarray(scores, dtype=float))
    counts, generator = _problem_counts(scores.shape[1], resamples, seed), np.random.default_rng([seed, 1])
    low, high = np.quantile(_resampled_means(scores, counts, generator), [0.025, 0.975])
    return {
        "value": float(scores.mean()),
        "low": max(0.0, float(low)),
        "high": min(1.0, float(high)),
        "runs": len(scores),
        "problems": scores.shape[1],
    }


def two_level_difference(
    first: NDArray[np.float64], second: NDArray[np.float64], resamples: int = 10_000, seed: int = 0
) -> dict[str, float]:
    """Difference of two configurations' means (second - first): runs are resampled, then problems.

    Each resample draws every configuration's runs anew, and one set of problems for both, because the problems are the
    same (paired); so how hard the drawn problems are cancels out, and the spread between runs does not. With one run a
    configuration there is no spread between runs to see, and the interval is over problems only.

    Args:
        first, second: (runs, problems), problems in the same order; the numbers of runs may differ.

    Returns:
        ``value``, ``low`` and ``high`` (95% percentile interval), ``runs`` (of the configuration with fewer), ``problems``,
        and ``detectable``: the difference that would have been found with chance 0.8, that is
        1.96 + 0.84 standard errors, as the resamples show them.

    Raises:
        ValueError: the numbers of problems differ.
    """
    first, second = (np.atleast_2d(np.asarray(scores, dtype=float)) for scores in (first, second))
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"paired scores are needed for the same problems: {first.shape[1]} and {second.shape[1]}")
    counts, generator = _problem_counts(first.shape[1], resamples, seed), np.random.default_rng([seed, 1])
    differences = _resampled_means(second, counts, generator) - _resampled_means(first, counts, generator)
    low, high = np.quantile(differences, [0.025, 0.975])
    return {
        "value": float(second.mean() - first.mean()),
        "low": float(low),
        "high": float(high),
        "detectable": float((Z95 + Z80) * differences.std()),
        "runs": min(len(first), len(second)),
        "problems": first.shape[1],
    }


@lru_cache(maxsize=2)
def _problem_counts(n: int, resamples: int, seed: int) -> NDArray[np.float32]:
    """How often each of ``n`` problems is drawn in each resample: (resamples, n)."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float32)


def _resampled_means(
    scores: NDArray[np.float64], counts: NDArray[np.float32], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Mean score in each resample: its drawn problems, and as many runs drawn with replacement.

    Resampling n runs shows only (n - 1) / n of the variance between them, which matters where runs are few; their
    deviations are blown up to make good for it (Davison and Hinkley, Bootstrap Methods and their Application, 1997, 2.3).
    """
    runs, problems = scores.shape
    by_run = counts @ scores.T.astype(np.float32) / problems  # (resamples, runs)
    mean = by_run.mean(axis=1, keepdims=True)
    if runs == 1:
        return np.asarray(mean[:, 0], dtype=float)
    blown_up = mean + np.sqrt(runs / (runs - 1)) * (by_run - mean)
    drawn = generator.integers(runs, size=by_run.shape)
    return np.asarray(np.take_along_axis(blown_up, drawn, axis=1).mean(axis=1), dtype=float)


def format_interval(estimate: Mapping[str, float]) -> str:
    """``value (low to high)`` with three decimals, for tables and sentences."""
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"
