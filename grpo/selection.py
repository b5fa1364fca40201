"""Picking an experiment's winner, so that later experiments can build on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from grpo import paths
from grpo.effective import chain
from grpo.errors import UserError
from grpo.evaluation.statistics import wilson_interval
from grpo.files import read_json
from grpo.study import Study, read_yaml

METRIC = "val/answer_reward"


def select(study: Study, experiment: str) -> dict[str, Any]:
    """The winner of an experiment, with every candidate and the reason.

    An arm counts by the mean, over its seeds and the last ``selection.last_k`` evaluations, of the validation answer
    reward; of arms that are equal the earlier in params.yaml wins. ``selection.pinned`` overrides this.

    Returns:
        ``experiment``, ``winner``, ``pinned``, ``reason``, ``metric``, ``last_k``, ``value`` with ``low`` and ``high`` (95%
        Wilson interval over the validation problems), ``overrides`` (what the winner changes), and ``candidates``.

    Raises:
        UserError: a run of the experiment is missing.
    """
    candidates = [_candidate(study, experiment, arm) for arm in study.experiments[experiment].arms]
    best = max(candidates, key=lambda candidate: candidate["value"])  # max keeps the first of equals
    pinned = study.selection.pinned.get(experiment)
    winner = next(c for c in candidates if c["arm"] == pinned) if pinned else best
    return {
        "experiment": experiment,
        "winner": winner["arm"],
        "pinned": pinned is not None,
        "reason": _reason(candidates, best, pinned),
        "metric": METRIC,
        "last_k": study.selection.last_k,
        "value": winner["value"],
        "low": winner["low"],
        "high": winner["high"],
        "overrides": winner["overrides"],
        "candidates": candidates,
    }


def read_winners(experiment: str) -> list[dict[str, Any]]:
    """The selection files of the experiments that ``experiment`` builds on, first to last.

    Raises:
        UserError: one of them is missing.
    """
    return [read_json(paths.SELECT / f"{name}.json", made_by=f"select@{name}") for name in chain(experiment)]


def mean_of_last(folder: Path, last_k: int) -> float:
    """Mean validation answer reward over a run's last ``last_k`` evaluations (the first, untrained one never counts)."""
    rewards = pd.read_csv(folder / "validation.csv")[METRIC].iloc[1:]
    return float(rewards.tail(last_k).mean())


def _candidate(study: Study, experiment: str, arm: str) -> dict[str, Any]:
    runs = []
    for seed in study.seeds:
        name = f"{experiment}/{arm}-{seed}"
        folder = paths.RUNS / name
        if not (folder / "validation.csv").exists():
            raise UserError(f"{folder}: holds no finished run. Run `dvc repro {experiment}@{arm}-{seed}` to make it.")
        config = read_yaml(folder / "config.yaml")
        runs.append(
            {"run": name, "seed": seed, "identity": config["identity"], "value": mean_of_last(folder, study.selection.last_k)}
        )
    value = sum(run["value"] for run in runs) / len(runs)
    n = study.evaluation.problems
    low, high = wilson_interval(value * n, n)
    overrides = study.experiments[experiment].arms[arm]
    return {"arm": arm, "overrides": overrides, "value": value, "low": low, "high": high, "runs": runs}


def _reason(candidates: list[dict[str, Any]], best: dict[str, Any], pinned: str | None) -> str:
    if pinned is not None:
        agrees = "which is also the best" if best["arm"] == pinned else f"although {best['arm']} did best ({best['value']:.3f})"
        return f"pinned by hand in params.yaml (selection.pinned), {agrees}"
    ties = [c["arm"] for c in candidates if c["value"] == best["value"] and c is not best]
    if ties:
        return f"equal to {', '.join(ties)}; the earlier arm in params.yaml wins a tie"
    return "highest mean of the last evaluations"
