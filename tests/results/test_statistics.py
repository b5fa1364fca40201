"""Intervals of proportions and means against published values and simulated truth."""

from __future__ import annotations

import numpy as np
import pytest

from grpo.results.statistics import interval_of_mean, mean_over_problems, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        # Newcombe 1998, Statistics in Medicine 17:857, Table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_with_another_level() -> None:
    # p = 1/2, n = 4, z = 1: center 1/2, half width sqrt(1/16 + 1/64) / 1.25 = .223607
    assert wilson_interval(2, 4, level=0.6826894921370859) == pytest.approx((0.276393, 0.723607), abs=1e-6)


@pytest.mark.parametrize("n", [0, -3])
def test_no_observations_have_no_interval(n: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        wilson_interval(0, n)


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
