"""Seconds of a step by component, in one process and with asynchronous generator and learner."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo.reporting.charts import INK, bars
from grpo.reporting.sentences import paragraphs, table
from grpo.reporting.style import readable
from grpo.reporting.timing import read_timing
from grpo.results.runs import Run, by_arm, value

GOAL = 1.15  # goal: a step takes at most so many times the longer of generation and training
PARTS = {  # in a timing file -> in the table
    "rollout": "rollout",
    "scoring": "scoring",
    "training": "training",
    "synchronization": "weights sent",
    "generator_synchronization": "weights loaded",
    "waiting": "learner waits",
    "generator_waiting": "generator waits",
    "step": "step",
}
APART_ONLY = ("generator_synchronization", "waiting", "generator_waiting")
WEIGHTS, WAITING = "weights sent or loaded", "waiting for the other side"
COLOURS = {"rollout": "#0072B2", "scoring": "#E69F00", "training": "#009E73", WEIGHTS: "#CC79A7", WAITING: "#999999"}
# The parts of each bar, with their entries in the legend.
TURNS = {"rollout": "rollout", "scoring": "scoring", "training": "training", WEIGHTS: "synchronization"}
GENERATOR = {"rollout": "rollout", WEIGHTS: "generator_synchronization", WAITING: "generator_waiting"}
LEARNER = {"training": "training", WEIGHTS: "synchronization", WAITING: "waiting"}

Steps = Sequence[Mapping[str, float]]  # as in a timing file; times in seconds
Times = dict[str, Any]  # a row of :func:`times_of_steps`


def times_of_steps(runs: list[Run]) -> list[Times]:
    """Average each arm's times over the steady steps of all its runs.

    Returns:
        a row per arm: ``arm``, ``lag`` (``max_policy_lag``; None in one process), ``restarts`` (of actors, over all its runs),
        ``steps`` (number averaged) and, unless it is 0, the mean seconds of each of ``PARTS`` (0 if a run has no such part)
        and of the ``longer`` of rollout and training.
    """
    found = []
    for arm, of_arm in by_arm(runs).items():
        apart = value(of_arm[0], "asynchronous")
        lag = None if apart is None else int(apart["max_policy_lag"])
        timings = [(run.validation["step"].tolist(), read_timing(run)) for run in of_arm]
        steps = [step for evaluated, timing in timings for step in steady_steps(timing["steps"], evaluated, lag)]
        restarts = sum(sum(timing["restarts"].values()) for _, timing in timings)
        found.append({"arm": arm, "lag": lag, "restarts": restarts, "steps": len(steps)} | mean_times(steps))
    return found


def steady_steps(
    steps: Sequence[Mapping[str, float]], evaluated: Collection[int], lag: int | None
) -> list[Mapping[str, float]]:
    """The steps that no evaluation affects.

    The rollouts of the 1 + ``lag`` steps after an evaluation were requested before it. The generator finishes them during the
    evaluation, so the learner does not wait for them, and the generator is idle before those of the next step. These
    2 + ``lag`` steps are left out; in one process (None), the first one.

    Args:
        evaluated: the steps after which the policy was evaluated, including 0 (the untrained model).
    """
    left_out = 1 if lag is None else 2 + lag
    affected = {step + i for step in evaluated for i in range(1, left_out + 1)}
    return [step for step in steps if step["step"] not in affected]


def mean_times(steps: Steps) -> Times:
    """Mean seconds of ``PARTS`` and of the ``longer`` of rollout and training; empty without steps."""
    if not steps:
        return {}
    means = pd.DataFrame(steps).reindex(columns=[f"{part}_s" for part in PARTS]).fillna(0.0).mean()
    times: Times = dict(zip(PARTS, means.tolist(), strict=True))
    return times | {"longer": max(times["rollout"], times["training"])}


def timed(found: list[Times]) -> list[Times]:
    """The rows with steady steps."""
    return [times for times in found if times["steps"]]


def draw_components(found: list[Times]) -> Figure:
    """Draw the seconds of a step: one bar for one process, two (generator above learner) for asynchronous arms.

    A number beside each gives the longer of rollout and training by the step, a stroke the goal: ``GOAL`` times the longer.
    """
    widths: dict[str, dict[str, float]] = {}
    marks, goals = [], []
    for times in found:
        name = readable(times["arm"])
        if not times["steps"]:
            widths[f"{name}: too few steps"] = {}
            continue
        apart, goal = times["lag"] is not None, GOAL * times["longer"]
        sides = {"generator": GENERATOR, "learner": LEARNER} if apart else {"one process": TURNS}
        own = {f"{name}: {side}": {kind: times[part] for kind, part in parts.items()} for side, parts in sides.items()}
        end = max(sum(parts.values()) for parts in own.values())
        marks.append((len(widths), max(end, goal) if apart else end, f"{times['longer'] / times['step']:.2f}"))
        goals += [(place, goal) for place in range(len(widths), len(widths) + len(own)) if apart]
        widths |= own
    frame = pd.DataFrame.from_dict(widths, orient="index").reindex(index=list(widths), columns=list(COLOURS)).fillna(0.0)
    figure, axes = bars(frame, COLOURS, 1.7 + 0.24 * len(widths))
    for place, goal in goals:
        axes.vlines(goal, place - 0.45, place + 0.45, color=INK, linewidth=2)
    for place, end, share in marks:
        axes.annotate(share, (end, place), (4, 0), textcoords="offset points", va="center")
    axes.set_xlabel(
        f"seconds of a step, mean; number: the longer of\nrollout and training by the step;\nstroke: {GOAL:g} times the longer"
    )
    return figure


def components_table(found: list[Times]) -> str:
    """Mean seconds of a step and its parts, one row per arm (Markdown)."""

    def cell(times: Times, part: str) -> str:
        unknown = not times["steps"] or (times["lag"] is None and part in APART_ONLY)
        return "" if unknown else f"{times[part]:.3f}"

    return table(
        {"arm": times["arm"], "steps": times["steps"]}
        | {title: cell(times, part) for part, title in PARTS.items()}
        | {
            "longer of rollout and training, share of step": f"{times['longer'] / times['step']:.2f}" if times["steps"] else "",
        }
        for times in found
    )


def discuss_overlap(found: list[Times]) -> str:
    """State which arms reach the goal for overlap, and how long a step takes compared with one process."""
    apart = [times for times in timed(found) if times["lag"] is not None]
    overlapping = [times for times in apart if times["lag"]]
    groups = {
        "These meet it": [times for times in overlapping if times["step"] <= GOAL * times["longer"]],
        "These miss it": [times for times in overlapping if times["step"] > GOAL * times["longer"]],
        "With no lag the two take turns and cannot meet it": [times for times in apart if not times["lag"]],
    }
    (text,) = paragraphs(
        "components_sentences.md.j2",
        goal=GOAL,
        groups=groups,
        apart=apart,
        single=next((times for times in timed(found) if times["lag"] is None), None),
        short=[times for times in found if not times["steps"]],
        early=[times for times in apart if times["step"] < times["longer"]],
        restarted=[times for times in found if times["restarts"]],
    )
    return text
