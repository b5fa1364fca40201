"""Made-up runs and results for tests of the report: small enough to work each sentence out by hand."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd

from grpo.reporting.record import Record
from grpo.results.findings import ArmResult, Collapse, Contrast, ExperimentResult, Interval, Verdict
from grpo.results.runs import Run
from grpo.study.schema import Study

EXPERIMENT = "grpo_learning_rate"
PROBLEMS = 100


def solved(share: float) -> Any:
    """Rewards of the problems of which this share, the first ones, is solved."""
    return (np.arange(PROBLEMS) < round(PROBLEMS * share)).astype(float)


def run(
    arm: str,
    rewards: list[float],
    seed: int = 0,
    experiment: str = EXPERIMENT,
    forms: list[float] | None = None,
    diverged: int | None = None,
    cut: int | None = None,
    same_as: str | None = None,
    **columns: Any,
) -> Run:
    """A run with one update a step and an evaluation after every eighth step, the untrained one first.

    Args:
        forms: format reward of each evaluation; 1 in all.
        columns: of ``history`` (a value for each evaluation after the first) or, by ``val_NAME``, of ``validation``.
    """
    n = len(rewards)
    steps = [8 * place for place in range(n)]
    history = {"step": steps[1:], "token_entropy": 0.5, "gradient_norm": 0.25, "clip_fraction": 0.0}
    history |= {"ratio_min": 1.0, "ratio_max": 1.0} | {k: v for k, v in columns.items() if not k.startswith("val_")}
    validation = {"step": steps, "val/answer_reward": rewards, "val/format_reward": forms or [1.0] * n}
    validation |= {"val/response_length": 20.0, "val/token_entropy": 0.5}
    validation |= {f"val/{k.removeprefix('val_')}": v for k, v in columns.items() if k.startswith("val_")}
    metrics = {
        "first/answer_reward": rewards[0],
        "best/answer_reward": max(rewards),
        "best/step": steps[int(np.argmax(rewards))],
        "diverged_step": diverged,
        "diverged_reason": "answer reward under its start" if diverged is not None else "",
        "time_limit_step": cut,
        "steps": steps[-1],
    }
    config = {"identity": f"{arm}-{seed}", "same_as": same_as, "config": {}, "software": {}, "updates_per_rollout_batch": 1}
    frames = pd.DataFrame(history), pd.DataFrame(validation)
    return Run(experiment, arm, seed, config, metrics, *frames, np.stack([solved(reward) for reward in rewards]))


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
    return ArmResult(arm, changed, runs, (final,) * seeds, interval(final), interval(start), collapses, contrast, run_sd=None)


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
