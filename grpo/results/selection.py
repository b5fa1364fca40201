"""Picking an experiment's winner, so that later experiments can build on it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo.common.errors import UserError, reason
from grpo.common.files import damaged, read_json, read_jsonl, require_keys
from grpo.results.statistics import two_level_difference, two_level_mean
from grpo.study import paths
from grpo.study.methods import OFF_POLICY_RANK
from grpo.study.runs import stage_of_run
from grpo.study.schema import Study, read_yaml

METRIC = "val/answer_reward"


def select(study: Study, experiment: str) -> dict[str, Any]:
    """The winner of an experiment, with every candidate and the reason.

    An arm counts by the mean, over its seeds and the last few evaluations (:meth:`Study.last_k`), of the validation answer
    reward. The arm with the highest mean leads. Arms whose difference to it cannot be told from zero (two-level bootstrap)
    are tied with it, and of those tied the earliest in params.yaml wins, where the simpler arms stand first. An arm of which
    a run diverged cannot win unless that is so of all. ``selection.pinned`` overrides all of this.

    Returns:
        ``experiment``, ``winner``, ``leader``, ``tied`` (with the leader), ``pinned``, ``reason``, ``metric``, ``last_k``,
        ``value`` with ``low`` and ``high`` (95%, over runs and problems), ``overrides`` (what the winner changes), ``before``
        (the winners that the runs knew of, first to last) and ``candidates``, each with its runs and how far it is ``behind``
        the leader; for a sweep that another experiment goes on with also ``off_policy_ranking``, its best few off-policy arms:
        the winner if it is one of them, then by their means, those that diverged last.

    Raises:
        UserError: a run of the experiment is missing.
    """
    last_k = study.last_k(experiment)
    scores = {
        arm: np.stack([mean_of_last(read_outcomes(experiment, arm, seed), last_k) for seed in study.seeds])
        for arm in study.experiments[experiment].arms
    }
    candidates = [_candidate(study, experiment, arm, scores[arm]) for arm in scores]
    eligible = [c for c in candidates if not c["diverged"]] or candidates
    leader = max(eligible, key=lambda candidate: candidate["value"])  # max keeps the first of equals
    for candidate in candidates:
        others = candidate is not leader
        candidate["behind"] = two_level_difference(scores[candidate["arm"]], scores[leader["arm"]]) if others else None
    tied = [c for c in eligible if c["behind"] is not None and c["behind"]["low"] <= 0]
    best = next(c for c in eligible if c is leader or c in tied)
    pinned = study.selection.pinned.get(experiment)
    winner = next(c for c in candidates if c["arm"] == pinned) if pinned else best
    result = {
        "experiment": experiment,
        "winner": winner["arm"],
        "leader": leader["arm"],
        "tied": [c["arm"] for c in tied],
        "pinned": pinned is not None,
        "reason": _reason(leader, tied, best, pinned) + _left_out(candidates, eligible),
        "metric": METRIC,
        "last_k": last_k,
        "value": winner["value"],
        "low": winner["low"],
        "high": winner["high"],
        "overrides": winner["overrides"],
        "before": winner["before"],
        "candidates": [{key: value for key, value in c.items() if key != "before"} for c in candidates],
    }
    if _is_ranked(study, experiment):
        off_policy = [c for c in candidates if c["updates_per_rollout_batch"] > 1]  # every sweep is one of GRPO runs
        ranking = sorted(off_policy, key=lambda c: (c is not winner, bool(c["diverged"]), -c["value"]))
        result["off_policy_ranking"] = [{k: c[k] for k in ("arm", "overrides")} for c in ranking[: study.selection.best_few]]
    return result


def winner_file(result: dict[str, Any]) -> dict[str, Any]:
    """The part of a selection that later runs depend on: they are not trained again while it stays the same.

    It holds the winners before it too, so that a run depends on one such file.
    """
    return {key: result[key] for key in ("experiment", "winner", "overrides", "off_policy_ranking", "before") if key in result}


def _is_ranked(study: Study, experiment: str) -> bool:
    """Whether an experiment that the study makes takes the values of some of its arms by their rank."""
    after = (entry for entry in study.experiments.values() if entry.builds_on == experiment)
    return any(OFF_POLICY_RANK in arm for entry in after for arm in entry.arms.values())


def read_selections(study: Study, experiment: str) -> list[dict[str, Any]]:
    """The winners that a run of ``experiment`` knows of, first to last, from the selection that it depends on.

    Raises:
        UserError: the file is missing.
    """
    needed = study.needed_selections(experiment)
    if not needed:
        return []
    last = read_json(
        paths.SELECT / f"{needed[-1]}.json",
        made_by=f"select@{needed[-1]}",
        keys=("experiment", "winner", "overrides", "before"),
    )
    return [*last.pop("before"), last]


def read_outcomes(experiment: str, arm: str, seed: int) -> NDArray[np.float64]:
    """Answer reward of each problem in each evaluation of a run, the untrained one first: (evaluations, problems).

    Raises:
        UserError: the run is missing; the message names the stage that makes it.
    """
    folder = paths.RUNS / paths.run_name(experiment, arm, seed)
    path, made_by = folder / "outcomes.jsonl", stage_of_run(paths.run_name(experiment, arm, seed))
    if not path.exists():
        raise UserError(f"{folder}: holds no finished run. Run `dvc repro {made_by}` to make it.")
    evaluations = read_jsonl(path, made_by, lambda record: np.array(record["answer_reward"], dtype=float))
    if any(evaluation.shape != evaluations[0].shape or evaluation.ndim != 1 for evaluation in evaluations):
        raise damaged(path, "not as many problems in each evaluation", made_by)
    if len(evaluations) < 2:
        raise damaged(path, "no evaluation after the untrained one", made_by)
    return np.stack(evaluations)


def read_config(experiment: str, arm: str, seed: int) -> dict[str, Any]:
    """A run's config.yaml.

    Raises:
        UserError: it is missing or damaged.
    """
    name = paths.run_name(experiment, arm, seed)
    path, made_by = paths.RUNS / name / "config.yaml", stage_of_run(name)
    if not path.exists():
        raise UserError(f"{path}: no such file. Run `dvc repro {made_by}` to make it.")
    try:
        config: dict[str, Any] = read_yaml(path)
    except UserError as error:
        raise damaged(path, reason(error), made_by) from error
    require_keys(path, config, ("identity", "overrides", "before"), made_by)
    return config


def read_metrics(experiment: str, arm: str, seed: int) -> dict[str, Any]:
    """A run's metrics.json.

    Raises:
        UserError: it is missing or damaged.
    """
    name = paths.run_name(experiment, arm, seed)
    metrics: dict[str, Any] = read_json(
        paths.RUNS / name / "metrics.json", stage_of_run(name), keys=("diverged_step", "diverged_reason")
    )
    return metrics


def mean_of_last(outcomes: NDArray[np.float64], last_k: int) -> NDArray[np.float64]:
    """The number that counts, by problem: mean answer reward over a run's last ``last_k`` evaluations, (problems,).

    The first, untrained evaluation never counts. A run that ended early, because it diverged or its time was up, may have
    fewer than ``last_k``, and then counts by those it has; the report's tables say so.

    Args:
        outcomes: (evaluations, problems), as :func:`read_outcomes` gives them.
    """
    return np.asarray(outcomes[1:][-last_k:].mean(axis=0))


def evaluations_counted(outcomes: NDArray[np.float64], last_k: int) -> int:
    """Of how many evaluations :func:`mean_of_last` is the mean."""
    return min(last_k, len(outcomes) - 1)


def _candidate(study: Study, experiment: str, arm: str, scores: NDArray[np.float64]) -> dict[str, Any]:
    runs = []
    for seed, row in zip(study.seeds, scores, strict=True):
        name = paths.run_name(experiment, arm, seed)
        config, metrics = (read(experiment, arm, seed) for read in (read_config, read_metrics))
        runs.append(
            {
                "run": name,
                "seed": seed,
                "identity": config["identity"],
                "value": float(row.mean()),
                "diverged_step": metrics["diverged_step"],
                "diverged_reason": metrics["diverged_reason"],
            }
        )
    estimate = two_level_mean(scores)
    return {
        "arm": arm,
        "overrides": config["overrides"],
        "before": config["before"],
        "updates_per_rollout_batch": config.get("updates_per_rollout_batch"),
        **{key: estimate[key] for key in ("value", "low", "high")},
        "diverged": [run["run"] for run in runs if run["diverged_step"] is not None],
        "runs": runs,
    }


def _reason(leader: dict[str, Any], tied: list[dict[str, Any]], best: dict[str, Any], pinned: str | None) -> str:
    if pinned is not None:
        agrees = "which also leads" if leader["arm"] == pinned else f"although {leader['arm']} leads ({leader['value']:.3f})"
        return f"pinned by hand in params.yaml (selection.pinned), {agrees}"
    others = ", ".join(c["arm"] for c in tied)
    if best is not leader:
        text = f"cannot be told from {leader['arm']}, which leads with {leader['value']:.3f}"
        also = [c["arm"] for c in tied if c is not best]
        text += f" (nor can {', '.join(also)})" if also else ""
        return f"{text}; of arms that are tied the simpler one, which stands earlier in params.yaml, wins"
    if tied:
        return f"leads, but cannot be told from {others}; of arms that are tied the simpler one, which stands earlier, wins"
    return "leads, and the difference of each other arm to it can be told from zero"


def _left_out(candidates: list[dict[str, Any]], eligible: list[dict[str, Any]]) -> str:
    out = [c["arm"] for c in candidates if c not in eligible]
    return f"; left out because a run diverged: {', '.join(out)}" if out else ""
