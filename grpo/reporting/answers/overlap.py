"""Answers on colocated GRPO (one process) and on asynchronous GRPO."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from grpo.reporting.asynchronous import arms_in_order, effects
from grpo.reporting.discussion import Numbers
from grpo.reporting.record import Record
from grpo.reporting.sentences import paragraphs, table
from grpo.reporting.timing import at_equal_time, seconds_of_a_step
from grpo.reporting.wall_clock import Times, timed, times_of_steps
from grpo.results.runs import value

ABOUT_EQUAL = 1.25  # generation and training take about equally long if the longer takes at most so many times the shorter


def colocated(numbers: Numbers) -> list[str]:
    """Compare several updates per rollout batch with one: convergence, stability and run time; empty with one arm."""
    arms = sorted(numbers["arms"], key=lambda arm: int(arm["all"][0].config["updates_per_rollout_batch"]))
    if len(arms) < 2:
        return []
    ends = []
    for arm in (arms[0], arms[-1]):
        history = pd.concat([run.history for run in arm["all"]])
        ends.append(
            {
                "arm": arm,
                "updates": arm["all"][0].config["updates_per_rollout_batch"],
                "norm": float(np.nanmax(history["gradient_norm"])),
                "ratios": [history["ratio_min"].min(), history["ratio_max"].max()] if "ratio_max" in history else None,
                "seconds": seconds_of_a_step(arm["all"]),
            }
        )
    return paragraphs("colocated_sentences.md.j2", ends=ends, at_equal_time=at_equal_time(arms[0]["all"], arms[-1]["all"]))


def asynchronous(numbers: Numbers, one_process: Numbers | None) -> list[str]:
    """State the effect of lag and of a larger buffer, and compare the smallest lag above zero with one process at equal time.

    Args:
        one_process: the colocated experiment; None if the study leaves it out.
    """
    runs = [run for arm in numbers["arms"] for run in arm["all"]]
    overlapping = [of for of in arms_in_order(runs)[0] if value(of[0], "asynchronous")["max_policy_lag"]]
    compared = at_equal_time(one_process["arms"][0]["all"], overlapping[0]) if one_process and overlapping else ""
    found = effects(runs, numbers["last_k"])
    return paragraphs("asynchronous_sentences.md.j2", effects=found, seeds=numbers["seeds"], at_equal_time=compared)


def asynchronous_times(record: Record) -> list[Times]:
    """The asynchronous arms with the times of their steady steps."""
    runs = [run for name in record.study.with_report("staleness") for run in record.runs[name]]
    return [times for times in times_of_steps(runs) if times["lag"] is not None]


def floor(times: Times) -> float:
    """Minimal seconds of a step with one generator and one learner: the longer of their own times."""
    return float(max(times["rollout"] + times["generator_synchronization"], times["training"] + times["synchronization"]))


def dominates(found: list[Times]) -> str:
    """Largest component and floor of each arm's step, and what would make it shorter (Markdown)."""
    arms = timed(found)
    if not arms:
        return "The runs are too short: every step is affected by an evaluation."
    rows = [
        {
            "arm": times["arm"],
            "largest component": largest(times),
            "share of the step": f"{times[largest(times)] / times['step']:.2f}",
            "rollout / training": f"{times['rollout'] / times['training']:.2f}",
            "step (s)": f"{times['step']:.3f}",
            "floor (s)": f"{floor(times):.3f}",
            "learner waits (s)": f"{times['waiting']:.3f}",
        }
        for times in arms
    ]
    overlapped = [times for times in arms if times["lag"]]  # the one with the smallest lag is discussed
    return "\n".join([table(rows), *(_advice(times) for times in overlapped[:1])])


def largest(times: Times) -> str:
    """The component of a step that takes longest."""
    return max(("rollout", "scoring", "training", "synchronization"), key=lambda part: times[part])


def _advice(times: Times) -> str:
    """State which side is slower and what would shorten the step."""
    sides = {"generator": times["rollout"], "learner": times["training"]}
    slower, faster = sorted(sides, key=lambda side: -sides[side])
    ratio = sides[slower] / sides[faster]
    (text,) = paragraphs(
        "overlap_sentences.md.j2",
        arm=times["arm"],
        largest=largest(times),
        above=times["step"] - floor(times),
        slower=slower,
        faster=faster,
        ratio=ratio,
        about_equal=ratio <= ABOUT_EQUAL,
        parallel=math.ceil(ratio),
        shorter=sides[faster],
    )
    return text
