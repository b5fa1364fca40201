"""Seconds of a step by component, in one process and with asynchronous generator and learner (reports/timing)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from grpo.reporting.charts import INK, bars, panels
from grpo.reporting.sentences import interval
from grpo.reporting.style import readable
from grpo.results.intervals import difference_of
from grpo.results.markdown import markdown_table
from grpo.results.runs import Run, by_arm, value

Steps = Sequence[Mapping[str, float]]  # as in a timing file; times in seconds
GOAL = 1.15  # goal: a step takes at most so many times the longer of generation and training
PARTS = (
    "rollout",
    "scoring",
    "training",
    "synchronization",  # the learner sends weights
    "generator_synchronization",  # the generator loads them
    "waiting",  # the learner waits for rollouts
    "generator_waiting",  # the generator waits for a request
)
TURNS = {"rollout": "rollout", "scoring": "scoring", "training": "training", "synchronization": "weights"}
GENERATOR = {"rollout": "rollout", "generator_synchronization": "weights", "generator_waiting": "waiting"}
LEARNER = {"training": "training", "synchronization": "weights", "waiting": "waiting"}
STYLES = {
    "rollout": ("#0072B2", "rollout"),
    "scoring": ("#E69F00", "scoring"),
    "training": ("#009E73", "training"),
    "weights": ("#CC79A7", "weights sent or loaded"),
    "waiting": ("#999999", "waiting for the other side"),
}


@dataclass(frozen=True)
class Variant:
    """An arm with its times.

    Attributes:
        lag: ``max_policy_lag``; None in one process.
        times: see :func:`time_breakdown`; None without steady steps.
        restarts: restarts of actors, over all its runs.
    """

    name: str
    lag: int | None
    times: dict[str, float] | None
    restarts: int = 0


def variants(runs: list[Run], read_timing: Callable[[Run], dict[str, Any]]) -> list[Variant]:
    """Average each arm's times over the steady steps of all its runs."""
    found = []
    for arm, of_arm in by_arm(runs).items():
        apart = value(of_arm[0], "asynchronous")
        lag = None if apart is None else int(apart["max_policy_lag"])
        timings = [read_timing(run) for run in of_arm]
        steps = [
            step
            for run, timing in zip(of_arm, timings, strict=True)
            for step in steady_steps(timing["steps"], run.validation["step"].tolist(), lag)
        ]
        found.append(Variant(arm, lag, time_breakdown(steps), sum(sum(timing["restarts"].values()) for timing in timings)))
    return found


def steady_steps(steps: Steps, evaluated: Collection[int], lag: int | None) -> list[Mapping[str, float]]:
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


def time_breakdown(steps: Steps) -> dict[str, float] | None:
    """Mean seconds of a step and of its parts; None if there are no steps.

    Returns:
        each of ``PARTS`` (0 if a run has no such part), ``step``, ``efficiency`` (the longer of rollout and training as a share
        of the step; 1 if all else overlaps with it) and ``steps`` (number of steps averaged).
    """
    if not steps:
        return None
    means = {part: float(np.mean([step.get(f"{part}_s", 0.0) for step in steps])) for part in (*PARTS, "step")}
    return means | {"efficiency": max(means["rollout"], means["training"]) / means["step"], "steps": len(steps)}


def draw_time_breakdown(found: list[Variant]) -> Figure:
    """Draw the seconds of a step: one bar for one process, two (generator above learner) for asynchronous arms.

    A number beside each gives its efficiency, a stroke the goal: ``GOAL`` times the longer of rollout and training.
    """
    parts: list[dict[str, Any]] = []
    marks: list[tuple[str, float, str]] = []
    goals: list[tuple[str, float]] = []
    for variant in found:
        name = readable(variant.name)
        if variant.times is None:
            parts.append({"name": f"{name}: too few steps", "kind": STYLES["rollout"][1], "start": 0.0, "end": 0.0})
            continue
        apart = variant.lag is not None
        own = {f"{name}: generator": GENERATOR, f"{name}: learner": LEARNER} if apart else {f"{name}: one process": TURNS}
        laid = [part for side, of in own.items() for part in _laid_out(side, variant.times, of)]
        goal = GOAL * max(variant.times["rollout"], variant.times["training"])
        goals += [(side, goal) for side in own if apart]
        marks.append(
            (next(iter(own)), max([part["end"] for part in laid] + [goal] * apart), f"{variant.times['efficiency']:.2f}")
        )
        parts += laid
    lines = list(dict.fromkeys(part["name"] for part in parts))
    figure, (axes,) = panels(1, height=1.7 + 0.24 * len(lines))
    bars(axes, parts, dict(STYLES[key][::-1] for key in STYLES))
    for name, goal in goals:
        at = lines.index(name)
        axes.vlines(goal, at - 0.45, at + 0.45, color=INK, linewidth=2)
    for name, end, share in marks:
        axes.annotate(share, (end, lines.index(name)), (4, 0), textcoords="offset points", va="center")
    axes.set_xlabel(
        f"seconds of a step, mean; number: the longer of rollout and\ntraining by the step; stroke: {GOAL:g} times the longer"
    )
    return figure


def _laid_out(name: str, times: Mapping[str, float], parts: Mapping[str, str]) -> list[dict[str, Any]]:
    """The parts of one bar, laid end to end."""
    ends = np.cumsum([0.0, *(times[part] for part in parts)]).tolist()
    return [
        {"name": name, "kind": STYLES[look][1], "start": start, "end": end}
        for look, start, end in zip(parts.values(), ends[:-1], ends[1:], strict=True)
    ]


def breakdown_table(found: list[Variant]) -> str:
    """Mean seconds of a step and its parts, one row per arm (Markdown)."""
    columns = [
        "arm", "steps", "rollout", "scoring", "training", "weights sent", "weights loaded", "learner waits", "generator waits",
        "step", "longer of rollout and training, share of step",
    ]  # fmt: skip
    rows = []
    for variant in found:
        cells = [""] * (len(columns) - 2)
        if variant.times is not None:
            apart_only = ("generator_synchronization", "waiting", "generator_waiting")
            parts = ["" if variant.lag is None and p in apart_only else f"{variant.times[p]:.3f}" for p in (*PARTS, "step")]
            cells = [*parts, f"{variant.times['efficiency']:.2f}"]
        count = 0 if variant.times is None else variant.times["steps"]
        rows.append([variant.name, f"{count:.0f}", *cells])
    return markdown_table(columns, rows)


def discuss_overlap(found: list[Variant]) -> str:
    """State which arms reach the goal for overlap, and how long a step takes compared with one process."""
    timed = [(variant, variant.times) for variant in found if variant.times is not None]
    apart = {v.name: (v.lag, 1 / times["efficiency"], times["step"]) for v, times in timed if v.lag is not None}
    sentences = [f"The goal is a step of at most {GOAL:g} times the longer of generation and training."]
    for verdict, wanted in (("meet it", True), ("miss it", False)):
        those = [f"{name} ({ratio:.2f})" for name, (lag, ratio, _) in apart.items() if lag and (ratio <= GOAL) == wanted]
        sentences += [f"These {verdict}: {', '.join(those)}."] if those else []
    turns = [f"{name} ({ratio:.2f})" for name, (lag, ratio, _) in apart.items() if lag == 0]
    sentences += [f"With no lag the two take turns and cannot meet it: {', '.join(turns)}."] if turns else []
    single = next(((v.name, times["step"]) for v, times in timed if v.lag is None), None)
    if single is not None and apart:
        steps = ", ".join(f"{step:.3f} s in {name} ({step / single[1]:.2f} times)" for name, (_, _, step) in apart.items())
        sentences.append(f"A step takes {single[1]:.3f} s in {single[0]} (one process) and {steps}.")
    if apart:
        shares = ", ".join(f"{v.name} {share_of_turns(times):.2f}" for v, times in timed if v.lag is not None)
        sentences.append(
            "A machine's speed changes from run to run, so compare a step also with the sum of its own rollout, scoring and "
            f"training, of which it takes this share: {shares}."
        )
    without = [variant.name for variant in found if variant.times is None]
    sentences += [f"No step counts in {', '.join(without)}: the runs are too short."] if without else []
    early = [name for name, (_, ratio, _) in apart.items() if ratio < 1]
    sentences += [f"Below 1, rollouts made during an evaluation were still in stock: {', '.join(early)}."] if early else []
    restarted = [f"{v.name} {v.restarts}" for v in found if v.restarts]
    sentences += [f"Actors that were restarted: {', '.join(restarted)}; their lost time counts."] if restarted else []
    return " ".join(sentences)


def share_of_turns(times: Mapping[str, float]) -> float:
    """A step's seconds as a share of the sum of its rollout, scoring and training."""
    return times["step"] / (times["rollout"] + times["scoring"] + times["training"])


def discuss_at_equal_time(first: list[Run], second: list[Run], elapsed: Callable[[Run], pd.Series[float]]) -> str:
    """Compare two arms at the time at which the first of their runs ends.

    Args:
        elapsed: seconds since a run's start, without evaluation, by step.
    """
    times = {run.name: elapsed(run) for run in (*first, *second)}
    end = min(float(seconds.iloc[-1]) for seconds in times.values())
    scores = tuple(np.stack([outcome_at(run, times[run.name], end) for run in arm]) for arm in (first, second))
    difference = difference_of(scores[0], scores[1])
    verdict = "" if difference.low > 0 or difference.high < 0 else ": these runs cannot tell the two apart"
    return (
        f"After {end:.1f} s without evaluation, when the first of their runs had ended, {first[0].arm} stood at "
        f"{scores[0].mean():.3f} and {second[0].arm} at {scores[1].mean():.3f} (last evaluation until then), a difference of "
        f"{interval(difference)}{verdict}."
    )


def outcome_at(run: Run, elapsed: pd.Series[float], seconds: float) -> NDArray[np.float64]:
    """Rewards in a run's last evaluation within so many seconds, (problems,)."""
    done = [i for i, step in enumerate(run.validation["step"]) if step == 0 or elapsed[step] <= seconds]
    return np.asarray(run.outcomes[done[-1]])
