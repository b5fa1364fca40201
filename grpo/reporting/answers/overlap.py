"""The dominant component of an asynchronous step, and what would increase the overlap."""

from __future__ import annotations

import math
from collections.abc import Mapping

from grpo.reporting.time_breakdown import Variant, variants
from grpo.reporting.timing import read_timing
from grpo.results.markdown import markdown_table
from grpo.results.runs import read_runs
from grpo.study.schema import Study

ABOUT_EQUAL = 1.25  # generation and training take about equally long if the longer takes at most so many times the shorter


def asynchronous_variants(study: Study) -> list[Variant]:
    """The asynchronous arms with the times of their steady steps."""
    runs = [run for name in study.with_report("staleness") for run in read_runs(study, name)]
    return [variant for variant in variants(runs, read_timing) if variant.lag is not None]


def floor(times: Mapping[str, float]) -> float:
    """Minimal seconds of a step with one generator and one learner: the longer of their own times."""
    return max(times["rollout"] + times["generator_synchronization"], times["training"] + times["synchronization"])


def dominates(found: list[Variant]) -> str:
    """Largest component and floor of each arm's step, and what would make it shorter (Markdown)."""
    timed = [(variant, variant.times) for variant in found if variant.times is not None]
    if not timed:
        return "The runs are too short: every step is affected by an evaluation."
    rows = [
        [
            variant.name,
            largest := _largest(times),
            f"{times[largest] / times['step']:.2f}",
            f"{times['rollout'] / times['training']:.2f}",
            *(f"{seconds:.3f}" for seconds in (times["step"], floor(times), times["waiting"])),
        ]
        for variant, times in timed
    ]
    columns = ["arm", "largest component", "share of the step", "rollout / training", "step (s)", "floor (s)"]
    overlapped = [(variant, times) for variant, times in timed if variant.lag]
    return "\n".join([markdown_table([*columns, "learner waits (s)"], rows), *(_advice(*one) for one in overlapped[:1])])


def _largest(times: Mapping[str, float]) -> str:
    return max(("rollout", "scoring", "training", "synchronization"), key=lambda part: times[part])


def _advice(variant: Variant, times: Mapping[str, float]) -> str:
    """State, for the arm with the smallest lag above zero, which side is slower and what would shorten the step."""
    ratio, largest = times["rollout"] / times["training"], _largest(times)
    above = times["step"] - floor(times)
    text = (
        f"In {variant.name}, the smallest lag at which the two overlap, **{largest} dominates**: a step is {above:+.3f} s from "
        "its floor, the longer of the generator's and the learner's own time."
    )
    slower, faster, times_more = ("generator", "learner", ratio) if ratio > 1 else ("learner", "generator", 1 / ratio)
    if times_more <= ABOUT_EQUAL:
        return (
            f"{text} Generator and learner take about equally long ({times_more:.2f} times), so a step becomes shorter only if "
            "both do."
        )
    return (
        f"{text} The {slower} takes {times_more:.2f} times as long as the {faster}, so more lag does not lower that floor. "
        f"A faster {slower} would: {math.ceil(times_more)} of them in parallel would take no longer than the {faster}, "
        f"{min(times['rollout'], times['training']):.3f} s per step."
    )
