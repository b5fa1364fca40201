"""Answers on colocated GRPO (one process) and on asynchronous GRPO."""

from __future__ import annotations

import numpy as np
import pandas as pd

from grpo.reporting.answers.off_policy import seconds_of_a_step
from grpo.reporting.asynchronous import arms_in_order, effects
from grpo.reporting.discussion import Numbers
from grpo.reporting.sentences import paragraphs
from grpo.reporting.time_breakdown import discuss_at_equal_time
from grpo.reporting.timing import elapsed
from grpo.results.runs import value


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
    at_equal_time = discuss_at_equal_time(arms[0]["all"], arms[-1]["all"], elapsed)
    return paragraphs("colocated_sentences.md.j2", ends=ends, at_equal_time=at_equal_time)


def asynchronous(numbers: Numbers, one_process: Numbers | None) -> list[str]:
    """State the effect of lag and of a larger buffer, and compare the smallest lag above zero with one process at equal time.

    Args:
        one_process: the colocated experiment; None if the study leaves it out.
    """
    runs = [run for arm in numbers["arms"] for run in arm["all"]]
    overlapping = [of for of in arms_in_order(runs)[0] if value(of[0], "asynchronous")["max_policy_lag"]]
    at_equal_time = ""
    if one_process is not None and overlapping:
        at_equal_time = discuss_at_equal_time(one_process["arms"][0]["all"], overlapping[0], elapsed)
    found = effects(runs, numbers["last_k"])
    return paragraphs("asynchronous_sentences.md.j2", effects=found, seeds=numbers["seeds"], at_equal_time=at_equal_time)
