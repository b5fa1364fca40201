"""An experiment's result: its arms, the leader, and the winner on which later experiments build."""

from __future__ import annotations

from typing import Any

from grpo.results.evidence import Evidence, evidence_of
from grpo.results.findings import ArmResult, ExperimentResult
from grpo.results.intervals import against_the_best, detectable, mean_of
from grpo.results.runs import REWARD, Run, final_scores, first_scores
from grpo.study.methods import OFF_POLICY_RANK
from grpo.study.schema import Study

ENDS = ("value", "low", "high", "level")


def read_result(study: Study, experiment: str) -> ExperimentResult:
    """Read an experiment's runs and compute its result.

    Raises:
        UserError: a run of the experiment is missing.
    """
    return result_of(study, evidence_of(study, experiment))


def result_of(study: Study, found: Evidence) -> ExperimentResult:
    """Compute an experiment's result.

    An arm's result is its mean validation answer reward over its seeds and its last evaluations; collapsed runs are counted
    separately. The arm with the highest mean leads, among the arms without a collapsed run if there are any. Arms whose
    difference from the leader may be zero, adjusted for the number of arms, are tied with it. The truly best arm is the leader
    or tied with it in at least 95% of studies. Of the leader and the tied arms the first in params.yaml wins, or the leader
    (``tie``), unless ``selection.pinned`` names another winner.
    """
    arms, leader, eligible = found.arms, found.leader, found.eligible
    pinned, tie = study.selection.pinned.get(found.experiment), study.experiments[found.experiment].tie
    contrasts = {arm: found.contrast(arm, leader, len(arms) - 1, against_the_best) for arm in arms if arm != leader}
    tied = [arm for arm in eligible if arm != leader and not contrasts[arm].excludes_zero]
    best = leader if tie == "leader" else next(arm for arm in eligible if arm == leader or arm in tied)
    value, out = found.mean(leader), [arm for arm in arms if arm not in eligible]
    reason = _pinned(leader, value, pinned) if pinned else _reason(leader, value, tied, best, len(eligible), tie)
    reason += f"; left out because a run collapsed: {', '.join(out)}" if out else ""
    results = [
        ArmResult(
            arm,
            runs[0].config["overrides"],
            tuple(run.name for run in runs),
            tuple(float(row.mean()) for row in final_scores(runs, found.last_k)),
            mean_of(found.final(arm)),
            mean_of(first_scores(runs), fixed=True),
            found.collapses(arm),
            contrasts.get(arm),
        )
        for arm, runs in arms.items()
    ]
    winner = pinned or best
    return ExperimentResult(
        found.experiment, found.last_k, tuple(results), leader, tuple(tied), winner, pinned is not None, reason
    )


def _pinned(leader: str, value: float, pinned: str) -> str:
    agrees = "which also leads" if leader == pinned else f"although {leader} leads ({value:.3f})"
    return f"pinned by hand in params.yaml (selection.pinned), {agrees}"


def _reason(leader: str, value: float, tied: list[str], best: str, eligible: int, tie: str) -> str:
    simpler = "of arms that are tied the simpler one, which stands earlier in params.yaml, wins"
    simpler = "no arm is simpler than another, so the leader wins" if tie == "leader" else simpler
    if best != leader:
        also = [arm for arm in tied if arm != best]
        nor = f" (nor can {', '.join(also)})" if also else ""
        return f"cannot be told from {leader}, which leads with {value:.3f}{nor}; {simpler}"
    if tied:
        return f"leads, but cannot be told from {', '.join(tied)}; {simpler}"
    return "leads; each other arm can be told from it" if eligible > 1 else "the only arm that counts"


def select(study: Study, experiment: str) -> dict[str, Any]:
    """Select the winner of an experiment, by :func:`result_of`.

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
