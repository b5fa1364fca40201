"""Comparisons that a study could not decide, and the seeds, problems, runs and hours that would decide them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grpo.common.yaml_file import parse_yaml
from grpo.reporting.sentences import interval
from grpo.reporting.sentences import table as markdown
from grpo.results.claims import PUBLISHED, read_verdicts, shown
from grpo.results.evidence import evidence_of
from grpo.results.findings import CANNOT_TELL, Contrast, Verdict
from grpo.results.power import CHANCE, MOST_SEEDS, problems_needed, seeds_needed, spread_of
from grpo.results.selection import read_result
from grpo.study.schema import Study

Row = dict[str, Any]  # of :func:`undecided`
# A contrast of ``EXPERIMENT/ARM`` whose interval contains the bar, who asks (``selection`` or a claim's id), and the bar.
Undecided = tuple[Contrast, str, float]
ROUNDING = 1e-9  # a difference below it is zero


def undecided(study: Study) -> list[Row]:
    """List the undecided comparisons, a row for each pair of arms.

    Returns:
        ``experiments`` and ``arms`` (first, second), ``asked_by``, ``bar``, ``measured`` (second - first, with its interval),
        ``seeds`` (the study's), ``problems`` (their number), ``spread`` (variances; None with one seed). ``seeds_needed`` is
        the number that would detect a true difference of the measured size with a probability of 0.8; ``problems_needed`` is
        given if no number of seeds does. Both are None if unknown. ``needs_runs_of`` lists the experiments that more
        seeds would run.

    Raises:
        UserError: a run or a result file is missing.
    """
    found: dict[tuple[str, ...], Row] = {}
    for contrast, asked_by, bar in [*_of_selections(study), *_of_claims(study)]:
        arms = (contrast.against, contrast.arm)
        names = (*arms, str(bar)) if bar else tuple(sorted(arms))  # with a bar of zero in any order
        if names not in found:
            found[names] = _row(study, contrast, bar)
        if asked_by not in found[names]["asked_by"]:
            found[names]["asked_by"].append(asked_by)
    return list(found.values())


def not_a_matter_of_seeds(study: Study) -> list[Verdict]:
    """The claims with the verdict ``cannot tell`` for another reason than an interval that contains the bar."""
    asked = {asked_by for _, asked_by, _ in _of_claims(study)}
    return [verdict for verdict in _cannot_tell(study) if verdict.claim not in asked]


def _of_selections(study: Study) -> Iterator[Undecided]:
    """The leader of each experiment against each arm that cannot be told from it."""
    for experiment in study.made:
        for arm in read_result(study, experiment).arms:
            if arm.contrast and not arm.contrast.excludes_zero and arm.contrast.difference.value:
                yield _named(arm.contrast.turned(), experiment), "selection", 0.0


def _of_claims(study: Study) -> Iterator[Undecided]:
    """The contrasts of final rewards that left a claim undecided."""
    published = {claim["id"]: claim for claim in parse_yaml(PUBLISHED)["claims"]}
    for verdict in _cannot_tell(study):
        (kind,) = published[verdict.claim]["test"]
        bar = -(verdict.margin or 0.0) if kind == "not_below" else 0.0
        for contrast in verdict.contrasts:
            if contrast.against != "start" and contrast.adjusted.low <= bar <= contrast.adjusted.high:
                yield _named(contrast, verdict.experiment), verdict.claim, bar


def _named(contrast: Contrast, experiment: str) -> Contrast:
    """The contrast with arms as ``EXPERIMENT/ARM``."""
    arm, against = (name if "/" in name else f"{experiment}/{name}" for name in (contrast.arm, contrast.against))
    return replace(contrast, arm=arm, against=against)


def _cannot_tell(study: Study) -> list[Verdict]:
    return [verdict for verdict in shown(read_verdicts(), study) if verdict.verdict == CANNOT_TELL]


def _row(study: Study, contrast: Contrast, bar: float) -> Row:
    experiments, arms = zip(*(name.split("/") for name in (contrast.against, contrast.arm)), strict=True)
    first, second = (evidence_of(study, experiment).final(arm) for experiment, arm in zip(experiments, arms, strict=True))
    measured, distance = contrast.adjusted, contrast.adjusted.value - bar
    spread = seeds = problems = None
    if min(len(first), len(second)) > 1 and not np.array_equal(first, second):
        spread = spread_of(first, second)
        seeds = seeds_needed(spread, distance) if abs(distance) > ROUNDING else None
        problems = problems_needed(spread, distance) if abs(distance) > ROUNDING and not seeds else None
    return {
        "experiments": list(experiments),
        "arms": list(arms),
        "asked_by": [],
        "bar": bar,
        "measured": {key: getattr(measured, key) for key in ("value", "low", "high", "level")},
        "seeds": list(study.seeds),
        "problems": first.shape[1],
        "spread": None if spread is None else {key: getattr(spread, key) for key in ("runs", "problems", "rest")},
        "seeds_needed": seeds,
        "problems_needed": problems,
        "needs_runs_of": _with_predecessors(study, experiments),
    }


def _with_predecessors(study: Study, experiments: Iterable[str]) -> list[str]:
    """The experiments and all that they build on or start from, in the study's order."""
    needed, new = set[str](), set(experiments)
    while new:
        needed |= new
        new = {before for name in new for before in study.needed_experiments(name)} - needed
    return [name for name in study.made if name in needed]


def contents(rows: list[Row], others: list[Verdict]) -> dict[str, Any]:
    """The result file: the required probability, the contrasts, and the claims that seeds alone do not decide."""
    kept = ("claim", "experiment", "statement", "measured", "reason")
    return {
        "chance": CHANCE,
        "undecided": [row | {"command": command(row)} for row in rows],
        "not_a_matter_of_seeds": [{key: getattr(claim, key) for key in kept} for claim in others],
    }


def command(row: Row) -> str:
    """The command that runs the missing seeds of a contrast; empty if none is missing or their number is unknown."""
    present, more = row["seeds"], (row["seeds_needed"] or 0) - len(row["seeds"])
    if more <= 0:
        return ""
    targets = " ".join(f"select@{name}" for name in dict.fromkeys(row["experiments"]))
    known, first = ",".join(map(str, present)), max(present) + 1
    return f'dvc exp run -S "seeds=[{known},$(seq -s, {first} {first + more - 1})]" {targets}'


def hours(row: Row, seconds: Mapping[str, float]) -> tuple[float, float] | None:
    """Hours of the missing runs of the two arms, and of all runs of the command; None if the number of seeds is unknown.

    Args:
        seconds: ``EXPERIMENT/ARM`` -> seconds of a run; 0 if it is taken over from an identical run.
    """
    if row["seeds_needed"] is None:
        return None
    more = max(0, row["seeds_needed"] - len(row["seeds"]))
    pair = [f"{experiment}/{arm}" for experiment, arm in zip(row["experiments"], row["arms"], strict=True)]
    every = [arm for arm in seconds if arm.partition("/")[0] in row["needs_runs_of"]]
    two, everything = (more * sum(seconds[arm] for arm in arms) / 3600 for arms in (pair, every))
    return two, everything


def table(rows: Sequence[Row], seconds: Mapping[str, float] | None = None) -> str:
    """Table of contrasts (Markdown).

    Args:
        seconds: as in :func:`hours`; without it, the table has no hours and is the same in every repetition.
    """
    if not rows:
        return "Nothing: this study left no comparison undecided.\n"
    lines = []
    for row in rows:
        line = {
            "which is better": f"{row['arms'][1]} or {row['arms'][0]}" + (f" (bar {row['bar']:g})" if row["bar"] else ""),
            "experiment": " and ".join(dict.fromkeys(row["experiments"])),
            "asked by": ", ".join(row["asked_by"]),
            "difference (95% interval)": interval(row["measured"]),
            "seeds now": len(row["seeds"]),
            "seeds needed": _needed(row),
        }
        if seconds is not None:
            two, everything = hours(row, seconds) or (None, None)
            line |= {"hours, these two arms": _hours(two), "hours, the command": _hours(everything)}
        lines.append(line | {"next command": f"`{row['command']}`" if row["command"] else ""})
    return markdown(lines)


def _needed(row: Row) -> str:
    if row["seeds_needed"] is not None and row["seeds_needed"] <= len(row["seeds"]):
        return "none for this comparison alone; it is one of several"
    if row["seeds_needed"] is not None:
        return f"{row['seeds_needed']:,}"
    if row["spread"] is None:
        return "unknown: one seed shows no spread between runs"
    if row["problems_needed"] is None:
        return "unknown: the measured difference is zero"
    if row["problems_needed"] <= row["problems"]:
        return f"more than {MOST_SEEDS:,}"
    return f"no number: {row['problems']:,} problems are too few, at least {row['problems_needed']:,} are needed"


def _hours(hours: float | None) -> str:
    return "" if hours is None else f"{hours:.2f}" if hours < 10 else f"{hours:,.0f}"
