"""Verdicts on a study's claims: the published ones about its experiments, and its own.

claims.yaml holds the published ones; a study's file may hold others (``claims:``). :mod:`grpo.results.verdicts` has the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from grpo.common.yaml_file import parse_yaml
from grpo.results.intervals import mean_of
from grpo.results.pairs import Pairs, read_pairs
from grpo.results.runs import Arm, ExperimentRuns, NotMeasured, first_scores, value
from grpo.results.verdicts import NOT_TESTED, Verdict, decide_by, judge
from grpo.study import paths
from grpo.study.claims import PLACES, AnyClaim
from grpo.study.compose import BY_TASK
from grpo.study.config import MAIN, setting_of
from grpo.study.effective import digest
from grpo.study.schema import Study

PUBLISHED = Path(__file__).with_name("claims.yaml")
TEXTS = ("title", "question", "note", "resources", "timed", "one_stage")  # keys of an experiment that change no run
OF_THE_BASE = ("zero_shot_problems", "zero_shot_prompts", "best_of_n")  # keys of `evaluation` that change no run


@dataclass(frozen=True)
class Published:
    """The published claims, which are about one task."""

    task: str
    sources: dict[str, str]
    claims: list[AnyClaim]
    untested: list[dict[str, Any]]  # fields of the verdicts on claims that no study here can test


@cache
def read_published() -> Published:
    """Read claims.yaml."""
    values = parse_yaml(PUBLISHED)
    values["claims"] = TypeAdapter(list[AnyClaim]).validate_python(values["claims"])
    return Published(**values)


def claims_of(study: Study) -> list[tuple[AnyClaim, bool]]:
    """The claims about a study's experiments, each with whether it is the study's own; published ones come first."""
    published = [(claim, False) for claim in read_published().claims if claim.experiment in study.active_experiments]
    return published + [(claim, True) for claim in study.own_claims]


def needed_experiments(study: Study) -> list[str]:
    """The experiments that claims are about, and those that these build on or start from; all if there are no claims."""
    needed = {name for claim, own in claims_of(study) if own or stands_for(study, claim) for name in claim.experiments()}
    for name in reversed(study.active_experiments):  # each stands after those that it needs
        if name in needed:
            starts = {arm["start_from"].split("/")[0] for arm in study.experiments[name].arms.values() if arm.get("start_from")}
            needed |= {*study.needed_selections(name), *starts}
    return [name for name in study.active_experiments if name in needed] or study.active_experiments


def key_of(study: Study) -> str:
    """A digest of the settings of the experiments that claims are about: replicates of a study with other ones do not count."""
    names = needed_experiments(study)
    tasks = sorted({MAIN, *(study.experiments[name].task for name in names)})
    values = study.model_dump(mode="json", exclude_unset=True)  # so that a new key of the package changes nothing
    general = ("seeds", "grpo", "sft", "expert_iteration", "selection", "divergence")
    found = [{key: values.get(key) for key in general}, *(values[part].get(task) for part in BY_TASK for task in tasks)]
    found += [{key: value for key, value in values["evaluation"].items() if key not in OF_THE_BASE}]
    found += [{key: value for key, value in values["experiments"][name].items() if key not in TEXTS} for name in names]
    return digest(found)[:8]


def read_replicates(study: Study) -> dict[str, dict[str, Pairs]]:
    """Read what finished replicates of this study left (`grpo replicate`): name of the replicate -> claim -> pairs."""
    prefix = f"{key_of(study)}-"
    found = sorted(paths.REPLICATES.glob(f"{prefix}*.csv"))
    return {path.stem.removeprefix(prefix): read_pairs(path, made_by="") for path in found}


def judge_claims(
    study: Study, evidence: Mapping[str, ExperimentRuns], replicates: Iterable[Mapping[str, Pairs]] = ()
) -> list[Verdict]:
    """Judge each claim about an experiment of the study: published ones in the order of claims.yaml, then the study's own.

    Each interval has 95% by itself. It is not widened for the number of claims, so that the interval shown is the one that
    decides and means the same in every study; what one study decides by chance, other seeds do not repeat (`grpo replicate`).

    ``evidence``: by experiment (:func:`grpo.results.runs.evidence_of`). ``replicates``: the pairs of each replicate of the
    study by claim, for the verdict of all studies together.
    """
    found, others = [], [*replicates]
    for claim, own in claims_of(study):
        verdict = _judged(study, claim, own, evidence)
        studies = [study_pairs for study_pairs in (verdict.pairs, *(other.get(claim.id) for other in others)) if study_pairs]
        found.append(replace(verdict, together=together(claim, studies) if others else None))
    return found + [Verdict(**entry) for entry in read_published().untested if entry["experiment"] in study.active_experiments]


def together(claim: AnyClaim, studies: Sequence[Pairs]) -> dict[str, Any] | None:
    """The verdict on a claim by the runs of several studies together; None if there are fewer than two."""
    if len(studies) < 2:
        return None
    found = decide_by(claim, studies)
    counts = {"studies": len(studies), "seeds": sum(len(pairs.seeds) for pairs in studies)}
    return {key: getattr(found, key) for key in ("verdict", "reason", "interval", "could_see")} | counts


def _judged(study: Study, claim: AnyClaim, own: bool, evidence: Mapping[str, ExperimentRuns]) -> Verdict:
    """Judge one claim."""
    about: dict[str, Any] = {"kind": claim.KIND, "own": own}
    about |= {key: getattr(claim, key) for key in ("id", "experiment", "statement", "reported")}
    about["by_design"] = claim.by_design if own or study.models[MAIN].source == "pretrain" else None
    try:
        if not own and not stands_for(study, claim):
            task = read_published().task
            raise NotMeasured(f"published for the task {task}, which this study's task does not stand for (Task.stands_for)")
        if missing := [name for name in claim.experiments() if name not in evidence]:
            raise NotMeasured(f"the study leaves {missing[0]} out")
        _require(claim, evidence[claim.experiment])
        arms = [_arm(evidence[experiment], name) for experiment, name in claim.arms()]
        found = judge(claim, *arms)
    except NotMeasured as lacking:
        return Verdict(**about, reason=str(lacking))
    whole = [run for arm in arms for run in arm.runs if run.metrics["diverged_step"] is None]  # the others were stopped early
    steps = min((int(run.validation["step"].iloc[-1]) for run in whole), default=0)
    if steps < claim.horizon:
        reason = f"the claim is about step {claim.horizon} and later, and the runs took {steps} steps"
        found = replace(found, verdict=NOT_TESTED, reason=reason, pairs=None)
    if found.pairs:  # of another study these may be other problems
        task_of = study.experiments[claim.experiment].task
        found = replace(found, pairs=replace(found.pairs, problems=digest([study.tasks[task_of], study.evaluation.seed])[:8]))
    return replace(found, **about)


def stands_for(study: Study, claim: AnyClaim) -> bool:
    """Whether the claim's experiment has a task that published claims are about."""
    task: str | None = study.task(study.experiments[claim.experiment].task).stands_for
    return task == read_published().task


def _arm(evidence: ExperimentRuns, name: str) -> Arm:
    """Find an arm by its name in a claim. A setting stands for the arm with its best learning rate.

    The leader is the best arm on the problems that select, so that those that judge it did not choose it. Raises NotMeasured:
    the study has no such arm.
    """
    places = dict(zip(PLACES, (evidence.leader, *[*evidence.arms][:1], *[*evidence.arms][-1:]), strict=True))
    return evidence.arm(places.get(name, name))


def _require(claim: AnyClaim, evidence: ExperimentRuns) -> None:
    """Check a claim's preconditions. Raises NotMeasured: one of them is not met."""
    leader = evidence.leader
    if claim.requires.learns:
        final, start = mean_of(evidence.final(leader)), float(first_scores(evidence.runs(leader)).mean())
        if final.low <= start:
            raise NotMeasured(f"nothing was learned: the leader {leader} ends at {final} and starts at {start:.3f}")
    if tokens := claim.requires.response_tokens:
        length = float(np.mean([run.validation["val/response_length"].iloc[0] for run in evidence.runs(leader)]))
        if length < tokens:
            raise NotMeasured(f"the claim is about responses of {tokens} tokens or more, and these start with {length:.1f}")
    for arm in claim.requires.best_rate_inside:
        tried = [name for name in evidence.arms if setting_of(name) == arm]
        rates = [float(value(evidence.runs(name)[0], "learning_rate")) for name in tried]
        best = rates[tried.index(evidence.chosen[arm])] if rates else 0.0
        if len(rates) < 3 or best in (min(rates), max(rates)):
            raise NotMeasured(f"of the {len(rates)} learning rates of {arm}, the best ({best:g}) is the lowest or the highest")
