"""Levels of a metric over a stretch of a run: medians, on which a single step has little influence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from grpo.common.files import read_json
from grpo.results.evidence import NotMeasured
from grpo.results.runs import Run
from grpo.study import paths

BLOCK = 4  # steps
KL = "kl/"  # metrics of kept checkpoints, such as kl/per_token_low_variance
SMALLEST = 1e-8  # replaces smaller values before taking the logarithm
Numbers = NDArray[np.float64]


def series(run: Run, metric: str, how: str = "mean") -> tuple[Numbers, Numbers]:
    """Steps, and a metric's values at them: training steps, the evaluations of a validation metric, or kept checkpoints.

    Args:
        how: ``mean`` or ``max`` over a step's optimizer updates. The value is infinite if one of them is not finite.

    Raises:
        NotMeasured: the run has no such metric.
    """
    if metric.startswith(KL):
        return _kl(run, metric.removeprefix(KL))
    table = next((table for table in (run.history, run.validation) if metric in table), None)
    if table is None:
        raise NotMeasured(f"the runs have no {metric}")
    values = table[metric].astype(float)
    by_step = values.where(np.isfinite(values), np.inf).groupby(table["step"]).agg(how)
    return by_step.index.to_numpy(dtype=float), by_step.to_numpy(dtype=float)


def _kl(run: Run, estimate: str) -> tuple[Numbers, Numbers]:
    """Steps, and the KL of the run's kept checkpoints to its start, as the stage ``kl`` measured them."""
    path, made_by = paths.KL_REPORTS / f"{run.experiment}.json", f"kl@{run.experiment}"
    steps = read_json(path, made_by, keys=("arms",))["arms"].get(run.arm, []) if path.exists() else []
    points = [(one["step"], one["by_run"][run.name][estimate]) for one in steps if run.name in one["by_run"]]
    if not points:
        raise NotMeasured(f"the runs of {run.experiment} keep no checkpoints whose KL is measured (keep_steps)")
    places, values = np.array(points, dtype=float).T
    return places, values


def level(run: Run, metric: str, at: str, steps: tuple[float, float] = (0, math.inf)) -> float:
    """The median of a metric over a part of a stretch of steps.

    Args:
        at: ``start`` (the first sixteenth of the stretch), ``late`` (its last quarter), ``end`` (its last sixteenth) or
            ``throughout``; each has at least one value.
        steps: the first and the last step of the stretch.
    """
    places, values = series(run, metric)
    values = values[(places >= steps[0]) & (places <= steps[1])]
    if len(values) < 2:
        raise NotMeasured(f"{run.name} has fewer than two values of {metric} between the steps {steps[0]:g} and {steps[1]:g}")
    few, many = math.ceil(len(values) / 16), math.ceil(len(values) / 4)
    part = {"start": values[:few], "late": values[-many:], "end": values[-few:], "throughout": values}[at]
    return float(np.median(part))


def log_levels(runs: Sequence[Run], metric: str, at: str, steps: tuple[float, float] = (0, math.inf)) -> Numbers:
    """The logarithm of :func:`level` of each run, (runs,)."""
    return np.log(np.maximum([level(run, metric, at, steps) for run in runs], SMALLEST))


def last_common_step(runs: Sequence[Run]) -> float:
    """The last step that all runs have taken."""
    return min(float(run.history["step"].max()) for run in runs)


def highest(run: Run, metric: str, until: float = math.inf) -> float:
    """The highest median over a block of four steps of a metric's largest value in each step, up to a step."""
    places, values = series(run, metric, "max")
    values = values[places <= until]
    parts = np.array_split(values, max(1, len(values) // BLOCK))
    return max((float(np.median(part)) for part in parts if len(part)), default=-math.inf)
