"""Levels of a training metric: medians over blocks of steps, on which a single step has no influence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from grpo.results.evidence import NotMeasured
from grpo.results.findings import RUNS_AND_STEPS, STEPS, Interval
from grpo.results.intervals import difference_of
from grpo.results.runs import Run

BLOCK = 4  # steps
SMALLEST = 1e-8  # replaces smaller values before taking the logarithm


def per_step(run: Run, metric: str, how: str = "mean") -> NDArray[np.float64]:
    """A metric by step: ``mean`` or ``max`` over its optimizer steps; infinite if one of them is not finite.

    Raises:
        NotMeasured: the run has no such metric.
    """
    if metric not in run.history:
        raise NotMeasured(f"the runs have no {metric}")
    values = run.history[metric].astype(float)
    steps = values.where(np.isfinite(values), np.inf).groupby(run.history["step"])
    return steps.agg(how).to_numpy(dtype=float)


def blocks(values: NDArray[np.float64], share: float = 0.5) -> NDArray[np.float64]:
    """The median (or the quantile ``share``) of each block of consecutive steps."""
    parts = np.array_split(values, max(1, len(values) // BLOCK))
    return np.array([np.quantile(part, share, method="nearest") for part in parts])


def log_ratio(larger: Sequence[Run], smaller: Sequence[Run], metric: str, late: bool = False) -> Interval:
    """Log ratio of two arms' levels of a metric, block by block, with its interval over runs and blocks of steps.

    With one run per arm the interval is over blocks alone.

    Args:
        late: use only the last quarter of the steps that all runs took, and at least two blocks.

    Raises:
        NotMeasured: there are fewer than three blocks; with ``late``, fewer than two.
    """
    values = [[per_step(run, metric) for run in runs] for runs in (smaller, larger)]
    steps = min(len(run) for arm in values for run in arm)
    tables = [np.stack([blocks(run[:steps]) for run in arm]) for arm in values]
    finite = np.isfinite(np.concatenate(tables)).all(axis=0)
    tables = [np.log(np.maximum(table[:, finite], SMALLEST)) for table in tables]
    fewest = 2 if late else 3
    if late:
        tables = [table[:, -max(fewest, table.shape[1] // 4) :] for table in tables]
    if tables[0].shape[1] < fewest:
        raise NotMeasured("the runs took too few steps")
    one = min(len(table) for table in tables) == 1
    return replace(difference_of(tables[0], tables[1], fixed=one, scale=math.inf), covers=STEPS if one else RUNS_AND_STEPS)


def changes(runs: Sequence[Run], metric: str, since: str) -> NDArray[np.float64]:
    """For each run, the ratio of its final level (last quarter) to its ``first`` or ``highest`` level."""
    found = []
    for run in runs:
        levels = blocks(per_step(run, metric))
        last = float(np.median(levels[-max(1, len(levels) // 4) :]))
        found.append(last / max(float(levels[0] if since == "first" else levels.max()), SMALLEST))
    return np.array(found)


def peaks(runs: Sequence[Run], metric: str) -> NDArray[np.float64]:
    """For each run, the 90% quantile over blocks of a block's largest value, on which a single spike has no influence."""
    return np.array([np.quantile(blocks(per_step(run, metric, "max"), 1.0), 0.9, method="nearest") for run in runs])
