"""An experiment's result: its arms, the leader, and the winner that later experiments build on."""

from __future__ import annotations

from grpo.results.collapses import collapses_of, held
from grpo.results.findings import ArmResult, Contrast, ExperimentResult
from grpo.results.intervals import Scores, against_the_best, difference_of, mean_of, run_sd
from grpo.results.runs import Run, by_arm, final_scores, first_scores, read_runs
from grpo.study.schema import Study


def read_result(study: Study, experiment: str) -> ExperimentResult:
    """What an experiment's runs came to.

    Raises:
        UserError: a run of the experiment is missing.
    """
    arms, tie = by_arm(read_runs(study, experiment)), study.experiments[experiment].tie
    return result_of(experiment, arms, study.last_k(experiment), study.selection.pinned.get(experiment), tie)


def result_of(
    experiment: str, arms: dict[str, list[Run]], last_k: int, pinned: str | None = None, tie: str = "first"
) -> ExperimentResult:
    """What these runs come to.

    An arm counts by the mean, over its seeds and its last evaluations, of the validation answer reward; collapsed runs are
    counted apart. The arm with the highest mean leads, of those without a collapsed run where there are such. Arms whose
    difference to the leader cannot be told from zero, all contrasts with it taken together, are tied with it: one of these and
    the leader is truly the best in 95% of studies or more.

    Args:
        arms: each arm's runs, in the order of params.yaml.
        pinned: the winner that ``selection.pinned`` names.
        tie: who wins of the leader and those tied with it: the ``first`` in params.yaml, or the ``leader``.
    """
    scores = {arm: final_scores(held(runs, last_k), last_k) for arm, runs in arms.items()}
    collapses = {arm: collapses_of(runs, last_k) for arm, runs in arms.items()}
    eligible = [arm for arm in arms if not collapses[arm]] or [arm for arm in arms if len(collapses[arm]) < len(arms[arm])]
    eligible = eligible or list(arms)
    leader = max(eligible, key=lambda arm: float(scores[arm].mean()))  # max keeps the first of equals
    contrasts = {arm: contrast_of(arm, leader, scores, len(arms) - 1) for arm in arms if arm != leader}
    tied = [arm for arm in eligible if arm != leader and not contrasts[arm].told_apart]
    best = leader if tie == "leader" else next(arm for arm in eligible if arm == leader or arm in tied)
    value, out = float(scores[leader].mean()), [arm for arm in arms if arm not in eligible]
    reason = _pinned(leader, value, pinned) if pinned else _reason(leader, value, tied, best, len(eligible), tie)
    reason += f"; left out because a run collapsed: {', '.join(out)}" if out else ""
    return ExperimentResult(
        experiment,
        last_k,
        tuple(
            ArmResult(
                arm,
                runs[0].config["overrides"],
                tuple(run.name for run in runs),
                tuple(float(row.mean()) for row in final_scores(runs, last_k)),
                mean_of(scores[arm]),
                mean_of(first_scores(runs), fixed=True),
                collapses[arm],
                contrasts.get(arm),
                run_sd(scores[arm]),
            )
            for arm, runs in arms.items()
        ),
        leader,
        tuple(tied),
        pinned or best,
        pinned is not None,
        reason,
    )


def contrast_of(arm: str, against: str, scores: dict[str, Scores], contrasts: int = 1) -> Contrast:
    """How far an arm is above a leader, alone and as one of so many contrasts with it."""
    first, second = scores[against], scores[arm]
    return Contrast(
        arm, against, difference_of(first, second), difference_of(first, second, against_the_best(contrasts)), contrasts
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
