"""Which component dominates an asynchronous step, and what would overlap better."""

from __future__ import annotations

import math
from collections.abc import Mapping

from grpo.reporting.time_breakdown import Variant, variants
from grpo.reporting.timing import read_timing
from grpo.results.runs import read_runs
from grpo.study.schema import Study

ABOUT_EQUAL = 1.25  # times: the longer of generation and training over the shorter


def asynchronous_variants(study: Study) -> list[Variant]:
    """The arms whose generator and learner are apart, with the times of their steady steps."""
    runs = [run for name in study.with_report("staleness") for run in read_runs(study, name)]
    return [variant for variant in variants(runs, read_timing) if variant.lag is not None]


def floor(times: Mapping[str, float]) -> float:
    """Seconds that a step takes at least with one generator and one learner: the longer of what either does itself."""
    return max(times["rollout"] + times["generator_synchronization"], times["training"] + times["synchronization"])


def dominates(found: list[Variant]) -> str:
    """What fills a step of each arm, how near it is to its floor, and what would bring it lower (Markdown)."""
    timed = [(variant, variant.times) for variant in found if variant.times is not None]
    if not timed:
        return "The runs are too short: no step is free of an evaluation's traces."
    lines = [
        "| arm | largest component | share of the step | rollout / training | step (s) | floor (s) | learner waits (s) |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant, times in timed:
        largest = _largest(times)
        cells = [
            variant.name,
            largest,
            f"{times[largest] / times['step']:.2f}",
            f"{times['rollout'] / times['training']:.2f}",
            *(f"{seconds:.3f}" for seconds in (times["step"], floor(times), times["waiting"])),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    overlapped = [(variant, times) for variant, times in timed if variant.lag]
    return "\n".join([*lines, "", *(_advice(variant, times) for variant, times in overlapped[:1])])


def _largest(times: Mapping[str, float]) -> str:
    return max(("rollout", "scoring", "training", "synchronization"), key=lambda part: times[part])


def _advice(variant: Variant, times: Mapping[str, float]) -> str:
    """For the arm with the least lag that overlaps at all: which side the other waits for, and what more would bring."""
    ratio, largest = times["rollout"] / times["training"], _largest(times)
    above = times["step"] - floor(times)
    text = (
        f"In {variant.name}, the least lag at which the two overlap, **{largest} dominates**: a step is {above:+.3f} s from "
        "its floor, the longer of what generator and learner do themselves."
    )
    slower, faster, times_more = ("generator", "learner", ratio) if ratio > 1 else ("learner", "generator", 1 / ratio)
    if times_more <= ABOUT_EQUAL:
        return (
            f"{text} Generator and learner take about as long as each other ({times_more:.2f} times), so little is left to "
            "overlap: a step becomes shorter only if both do."
        )
    return (
        f"{text} The {slower} takes {times_more:.2f} times as long as the {faster}, so beyond that floor more lag overlaps "
        f"nothing; only a faster {slower} would help, and {math.ceil(times_more)} of its kind side by side would hide it "
        f"behind the {faster}, at {min(times['rollout'], times['training']):.3f} s a step."
    )
