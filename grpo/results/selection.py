"""Selection of an experiment's winner, on which later experiments build."""

from __future__ import annotations

from typing import Any

from grpo.results.evidence import evidence_of
from grpo.results.experiments import result_of
from grpo.results.findings import ArmResult
from grpo.results.intervals import detectable
from grpo.results.runs import REWARD, Run
from grpo.study.methods import OFF_POLICY_RANK
from grpo.study.schema import Study

ENDS = ("value", "low", "high", "level")


def select(study: Study, experiment: str) -> dict[str, Any]:
    """Select the winner of an experiment, by :func:`grpo.results.experiments.result_of`.

    Returns:
        ``experiment``, ``winner``, ``leader``, ``tied`` (with the leader), ``pinned``, ``reason``, ``metric``, ``last_k``,
        ``value`` with ``low`` and ``high`` (95%, over runs and problems), ``overrides`` (hyperparameters that the winner sets),
        ``before`` (the winners on which the runs build, first to last) and ``candidates``. Each candidate has its runs, those
        that ``collapsed``, and the distance ``behind`` the leader (interval adjusted for the number of arms). A sweep whose
        ranking another experiment uses also has ``off_policy_ranking``, its best few off-policy arms: the winner if it is one
        of them, then by mean, arms with a collapsed run last.

    Raises:
        UserError: a run of the experiment is missing.
    """
    found = evidence_of(study, experiment)
    result = result_of(study, found)
    candidates = [_candidate(arm, found.arms[arm.arm]) for arm in result.arms]
    winner = next(candidate for candidate in candidates if candidate["arm"] == result.winner)
    selection = {
        "experiment": experiment,
        "winner": result.winner,
        "leader": result.leader,
        "tied": list(result.tied),
        "pinned": result.pinned,
        "reason": result.reason,
        "metric": REWARD,
        "last_k": result.last_k,
        **{key: winner[key] for key in ("value", "low", "high", "overrides")},
        "before": found.arms[result.winner][0].config["before"],
        "candidates": candidates,
    }
    if _is_ranked(study, experiment):
        off_policy = [c for c in candidates if c["updates_per_rollout_batch"] > 1]  # every sweep is one of GRPO runs
        ranking = sorted(off_policy, key=lambda c: (c is not winner, bool(c["collapsed"]), -c["value"]))
        selection["off_policy_ranking"] = [{k: c[k] for k in ("arm", "overrides")} for c in ranking[: study.selection.best_few]]
    return selection


def winner_file(result: dict[str, Any]) -> dict[str, Any]:
    """The part of a selection on which later runs depend; they are trained again only if it changes.

    It includes the earlier winners, so that a run depends on one such file.
    """
    return {key: result[key] for key in ("experiment", "winner", "overrides", "off_policy_ranking", "before") if key in result}


def _is_ranked(study: Study, experiment: str) -> bool:
    """Whether another experiment of the study takes arms of this one by their rank."""
    after = (entry for entry in study.experiments.values() if entry.builds_on == experiment)
    return any(OFF_POLICY_RANK in arm for entry in after for arm in entry.arms.values())


def _candidate(arm: ArmResult, runs: list[Run]) -> dict[str, Any]:
    behind = arm.contrast.turned().adjusted if arm.contrast else None
    return {
        "arm": arm.arm,
        "overrides": arm.overrides,
        "updates_per_rollout_batch": runs[0].config.get("updates_per_rollout_batch"),
        **{key: getattr(arm.final, key) for key in ("value", "low", "high", "covers")},
        "diverged": [run.name for run in runs if run.metrics["diverged_step"] is not None],
        "collapsed": [collapse.run for collapse in arm.collapses],
        "runs": [
            {
                "run": run.name,
                "seed": run.seed,
                "identity": run.config["identity"],
                "value": value,
                **{key: run.metrics[key] for key in ("diverged_step", "diverged_reason")},
            }
            for run, value in zip(runs, arm.by_run, strict=True)
        ],
        "behind": behind and {key: getattr(behind, key) for key in ENDS} | {"detectable": detectable(behind)},
    }
