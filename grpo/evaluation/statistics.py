"""Intervals for the numbers that are reported."""

from __future__ import annotations

import math
from collections.abc import Mapping

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


def format_interval(estimate: Mapping[str, float]) -> str:
    """``value (low to high)`` with three decimals, for tables and sentences."""
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"
