"""Moves of a curve, on points with an obvious shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from grpo.reporting.trends import MEASURES, trend, trend_of

NAN = float("nan")


def moves(values: list[float], least: float = 0.05) -> list[Any]:
    found = trend([8 * place for place in range(len(values))], values, least)
    assert found is not None
    return [(move["verb"], move["start"], move["end"], move["by"]) for move in found.moves] + [
        found.low,
        found.high,
        found.settled,
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Rises until a step, then stays: within a tenth of the way from its end.
        ([0.07, 0.4, 0.65, 0.82, 0.91, 0.94, 0.93, 0.93, 0.96], [("rises", 0.07, 0.91, 32), 0.91, 0.96, True]),
        # Still falls at the last step.
        ([0.9, 0.7, 0.5, 0.2], [("falls", 0.9, 0.2, 24), 0.2, 0.2, False]),
        # An early peak and a collapse.
        ([0.07, 0.64, 0.5, 0.45, 0.2, 0.08], [("rises", 0.07, 0.64, 8), ("falls", 0.64, 0.08, 40), 0.08, 0.08, False]),
        # A dip of under a fifth of the range is no turn.
        ([0.1, 0.5, 0.4, 0.9, 1.0], [("rises", 0.1, 1.0, 32), 1.0, 1.0, False]),
        # A range that is too small, by itself or beside the mean.
        ([0.07, 0.08, 0.1, 0.07], [0.07, 0.1, True]),
        ([100.0, 101.0, 104.0, 103.0], [100.0, 104.0, True]),
        # Too many turns to tell.
        ([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], [0.0, 1.0, False]),
        # What was not measured is left out.
        ([0.0, NAN, 0.5, 1.0], [("rises", 0.0, 1.0, 24), 1.0, 1.0, False]),
    ],
)
def test_the_moves_of_a_curve(values: list[float], expected: list[Any]) -> None:
    assert moves(values) == expected


def test_one_point_has_no_trend() -> None:
    assert trend([0, 8], [0.5, NAN], 0.05) is None


def test_a_move_that_the_digits_do_not_show_is_none() -> None:
    """A norm with two digits: the turns between 0.1052 and 0.1149 are all written 0.11."""
    (norm,) = (measure for measure in MEASURES if measure.key == "norm")
    history = pd.DataFrame({"step": range(1, 7), "gradient_norm": [0.1012, 0.1149, 0.1052, 0.1149, 0.1052, 0.1149]})
    found = trend_of([SimpleNamespace(history=history)], norm)  # type: ignore[list-item]
    assert found is not None and found.moves == ({"verb": "rises", "start": 0.1, "end": 0.11, "by": 2},)
    assert (found.low, found.high, found.settled) == (0.11, 0.11, True)
