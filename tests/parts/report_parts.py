"""Made-up runs and results for tests of the report: small enough to work each sentence out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from grpo.reporting.record import Record
from grpo.results.findings import ArmResult, Collapse, Contrast, ExperimentResult, Interval, Verdict
from grpo.results.runs import Run
from grpo.study.schema import Study

EXPERIMENT = "grpo_learning_rate"
PROBLEMS = 100


def each(score: float) -> NDArray[np.float64]:
    """The same reward for every problem: the interval over problems is one point."""
    return np.full(PROBLEMS, score)


def solved(share: float) -> NDArray[np.float64]:
    """Rewards of the problems of which this share, the first ones, is solved."""
    return (np.arange(PROBLEMS) < round(PROBLEMS * share)).astype(float)


def run(
    arm: str,
    rewards: Sequence[float | NDArray[np.float64]],
    seed: int = 0,
    experiment: str = EXPERIMENT,
    every: int = 8,
    steps: int | None = None,
    forms: list[float] | None = None,
    diverged: int | None = None,
    cut: int | None = None,
    updates: int = 1,
    values: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    validation: Mapping[str, Any] | None = None,
    **history: Any,
) -> Run:
    """A run with an evaluation after every eighth step, the untrained one first, and a row of history for each evaluated step.

    Args:
        rewards: of each evaluation, as a share of solved problems or by problem.
        steps: number of steps with a row of history, if not those that were evaluated.
        forms: format reward of each evaluation; 1 in all.
        values: of the configuration.
        metrics, validation, history: further or other values of these files; in columns one for each row, or one for all.
    """
    outcomes = [solved(reward) if isinstance(reward, float | int) else reward for reward in rewards]
    means = [float(of.mean()) if reward is of else reward for of, reward in zip(outcomes, rewards, strict=True)]
    evaluated = [every * place for place in range(len(means))]
    rows = {"step": evaluated[1:] if steps is None else range(1, steps + 1), "token_entropy": 0.5, "gradient_norm": 0.25}
    rows |= {"clip_fraction": 0.0, "ratio_min": 1.0, "ratio_mean": 1.0, "ratio_max": 1.0} | history
    evaluations = {"step": evaluated, "val/answer_reward": means, "val/format_reward": forms or 1.0}
    evaluations |= {"val/response_length": 20.0, "val/token_entropy": 0.5} | dict(validation or {})
    final = {
        "first/answer_reward": means[0],
        "best/answer_reward": max(means),
        "best/step": evaluated[int(np.argmax(means))],
        "diverged_step": diverged,
        "diverged_reason": "answer reward under its start" if diverged is not None else "",
        "time_limit_step": cut,
        "steps": evaluated[-1],
    }
    config = {
        "identity": f"{arm}-{seed}",
        "same_as": None,
        "overrides": {},
        "before": [],
        "config": {key: {"value": value, "from": "study"} for key, value in (values or {}).items()},
        "software": {},
        "updates_per_rollout_batch": updates,
    }
    frames = pd.DataFrame(rows), pd.DataFrame(evaluations)
    return Run(experiment, arm, seed, config, final | dict(metrics or {}), *frames, np.stack(outcomes), outcomes[-1], 0)


def interval(value: float, low: float | None = None, high: float | None = None, runs: int = 2) -> Interval:
    """An interval of 0.05 to both sides, if nothing else is said."""
    ends = value - 0.05 if low is None else low, value + 0.05 if high is None else high
    return Interval(value, *ends, level=0.95, covers="runs and problems", runs=runs, problems=PROBLEMS, se=0.025, df=4.0)


def collapse(
    arm: str,
    seed: int = 0,
    seen_in: Literal["divergence", "evaluations", "training rewards"] = "evaluations",
    step: int = 8,
    reached: float = 0.75,
    ended: float = 0.125,
) -> Collapse:
    return Collapse(f"{EXPERIMENT}/{arm}/{seed}", seen_in, step, reached, ended)


def arm_result(
    arm: str,
    final: float,
    below: tuple[float, float, float] | None = None,
    *collapses: Collapse,
    seeds: int = 2,
    start: float = 0.1,
    **overrides: Any,
) -> ArmResult:
    """What an arm came to; ``below`` the leader ``a`` by so much, with both ends."""
    contrast = None
    if below is not None:
        difference = interval(-below[0], -below[2], -below[1])
        contrast = Contrast(arm, "a", difference, difference, contrasts=1)
    runs = tuple(f"{EXPERIMENT}/{arm}/{seed}" for seed in range(seeds))
    changed = overrides or {"learning_rate": arm}
    return ArmResult(arm, changed, runs, (final,) * seeds, interval(final), interval(start), collapses, contrast)


def result(*arms: ArmResult, tied: tuple[str, ...] = (), winner: str = "a", last_k: int = 1) -> ExperimentResult:
    """Arm ``a`` leads."""
    return ExperimentResult(EXPERIMENT, last_k, arms, "a", tied, winner, False, "leads")


def seeds(arm: str, rewards: list[float], **columns: Any) -> list[Run]:
    """Two runs with equal numbers."""
    return [run(arm, rewards, seed, **columns) for seed in (0, 1)]


def record(study: Study, found: dict[str, tuple[list[Run], ExperimentResult]], *verdicts: Verdict, **read: Any) -> Record:
    """A study's results from made-up runs and results; ``read``: what would be read from files, such as ``baseline``."""
    made = Record(
        study, {name: of[0] for name, of in found.items()}, {name: of[1] for name, of in found.items()}, list(verdicts)
    )
    vars(made).update(read)
    return made
