"""Detection of a curve's rises and falls, which the report puts into words."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from grpo.results.runs import REWARD, Run
from grpo.results.verdicts import KL

SMALL = 0.05  # a curve whose range is below this share of its mean is flat
TURN = 0.2  # a curve turns if it goes back by this share of its range
LEVEL = 0.1  # a move ends where the rest of it is below this share
MOST_MOVES = 3  # most moves that a sentence describes
BLOCKS = 6  # a per-step metric is averaged over so many blocks of steps


@dataclass(frozen=True)
class Measure:
    """A metric whose curve the report describes."""

    key: str
    table: str  # ``history`` or ``validation``
    column: str
    name: str
    unit: str
    shown: str  # format specification of its values
    least: float  # a curve with a smaller range is flat


MEASURES = (
    Measure("reward", "validation", REWARD, "The validation answer reward", "", ".3f", 0.02),
    Measure("entropy", "validation", "val/token_entropy", "Token entropy", "nats", ".3f", 0.01),
    Measure("length", "validation", "val/response_length", "response length", "tokens", ".1f", 0.5),
    Measure("kl", "history", KL, "KL to the starting policy, low-variance estimate", "nats a token", ".2g", 0.0005),
    Measure("norm", "history", "gradient_norm", "The gradient norm", "", ".2g", 0.0),
)


@dataclass(frozen=True)
class Trend:
    """The rises and falls of a curve."""

    # ``verb`` (rises, falls), ``start``, ``end``, ``by`` (step at which it ends); none if the curve is flat or turns too often.
    moves: tuple[dict[str, Any], ...]
    low: float  # of the curve after its last move; without moves, of the whole curve
    high: float
    settled: bool  # whether it stays in that range; False if it still moves at the last step, or turns too often
    first: float
    last: float


def trend(steps: Sequence[int], values: Sequence[float], least: float) -> Trend | None:
    """Find the moves of a curve; None with fewer than two finite values.

    A curve turns where it goes back by a fifth of its range (zigzag filter). Its last move ends where the curve comes within a
    tenth of the move's end and stays there.

    Args:
        least: a curve with a smaller range, or one below a twentieth of its mean, is flat.
    """
    points = [(step, value) for step, value in zip(steps, values, strict=True) if np.isfinite(value)]
    if len(points) < 2:
        return None
    x, y = [step for step, _ in points], np.array([value for _, value in points])
    low, high, ends = float(y.min()), float(y.max()), (float(y[0]), float(y[-1]))
    if high - low < max(least, SMALL * abs(float(y.mean()))):
        return Trend((), low, high, True, *ends)
    turns = _turns(y, TURN * (high - low))
    moves = []
    for first, last in itertools.pairwise(turns):
        end = last if last != turns[-1] else _arrival(y, first, last)
        verb = "rises" if y[last] > y[first] else "falls"
        moves.append({"verb": verb, "start": float(y[first]), "end": float(y[end]), "by": int(x[end])})
    if len(moves) > MOST_MOVES:
        return Trend((), low, high, False, *ends)
    rest = y[end:]
    return Trend(tuple(moves), float(rest.min()), float(rest.max()), len(rest) > 1, *ends)


def _turns(y: np.ndarray, back: float) -> list[int]:  # type: ignore[type-arg]
    """Indices of the first value, of each turn, and of the last extreme."""
    turns, extreme, sign = [0], 0, 0.0
    for place in range(1, len(y)):
        if sign * (y[place] - y[extreme]) >= 0 and sign:
            extreme = place if y[place] != y[extreme] else extreme
        elif abs(y[place] - y[extreme]) >= back:
            if sign:
                turns.append(extreme)
            sign, extreme = float(np.sign(y[place] - y[extreme])), place
    return [*turns, extreme]


def _arrival(y: np.ndarray, first: int, last: int) -> int:  # type: ignore[type-arg]
    """Index from which the curve stays within a tenth of the move's size of its end (from ``first`` to ``last``)."""
    near = np.abs(y[first : last + 1] - y[last]) <= LEVEL * abs(y[last] - y[first])
    away = np.flatnonzero(~near)
    return first + (int(away[-1]) + 1 if len(away) else 0)


def trend_of(runs: list[Run], measure: Measure) -> Trend | None:
    """The trend of a metric's mean over runs, at the steps that all have; None if a run lacks the metric."""
    tables = [getattr(run, measure.table) for run in runs]
    if not tables or any(measure.column not in table for table in tables):
        return None
    each = [table.groupby("step")[measure.column].last() for table in tables]
    curve = pd.concat(each, axis=1, join="inner").mean(axis=1)
    if measure.table == "history":
        blocks = [curve.iloc[places] for places in np.array_split(np.arange(len(curve)), min(BLOCKS, len(curve)))]
        curve = pd.Series({int(block.index[-1]): block.mean() for block in blocks if len(block)}, dtype=float)
    shown = [float(format(value, measure.shown)) for value in curve]  # rounded, so that no invisible move is described
    return trend(curve.index.tolist(), shown, measure.least)
