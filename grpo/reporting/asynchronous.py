"""Colocated GRPO (one process) and asynchronous GRPO: bounds and effects of policy lag, and what its steps wait for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from grpo.reporting.charts import INK, Dot, averaged, draw_dots, frame, legend, panels, readable, styles
from grpo.reporting.discussion import Numbers, updates_of
from grpo.reporting.sentences import paragraph, paragraphs, table
from grpo.reporting.timing import at_equal_time, seconds_of_a_step
from grpo.reporting.wall_clock import Times
from grpo.results.evidence import Evidence
from grpo.results.intervals import difference_of, mean_of
from grpo.results.runs import Run, by_arm, final_scores, value

ABOUT_EQUAL = 1.25  # generation and training take about equally long if the longer takes at most so many times the shorter
SERIES = {"each batch trained on once": "o", "drawn from a buffer": "s"}


def arms_in_order(runs: list[Run]) -> tuple[list[list[Run]], list[list[Run]]]:
    """Runs of the asynchronous arms: without a replay buffer, sorted by lag, and with one, sorted by capacity."""
    arms = sorted(by_arm(runs).values(), key=lambda of: (_setting(of, "replay_capacity"), _setting(of, "max_policy_lag")))
    plain = [of_arm for of_arm in arms if _setting(of_arm, "replay_capacity") == 1]
    return plain, arms[len(plain) :]


def _setting(of_arm: list[Run], key: str) -> Any:
    return value(of_arm[0], "asynchronous")[key]


def lag_bound(run: Run) -> int:
    """The largest lag of a token (policy versions) that the run's settings allow.

    New rollouts lag by at most ``max_policy_lag``; those in a buffer of N batches are up to N - 1 steps older.
    """
    settings = value(run, "asynchronous")
    oldest = int(settings["max_policy_lag"] + settings["replay_capacity"] - 1)
    return oldest if settings["replay_max_age"] is None else min(oldest, int(settings["replay_max_age"]))


def staleness(of_arm: list[Run]) -> dict[str, float]:
    """Average lag, clipping, gradient norm and ratios over all runs of an arm.

    Returns:
        ``lag_mean`` (versions, over tokens) and ``clip_fraction``, means over the updates; ``gradient_norm``, ``ratio_min``,
        ``ratio_mean`` and ``ratio_max`` (smallest, mean and largest over an update's tokens), medians over the updates.
    """
    history = pd.concat([run.history for run in of_arm])
    means = {key: float(history[key].mean()) for key in ("lag_mean", "clip_fraction")}
    return means | {key: float(history[key].median()) for key in ("gradient_norm", "ratio_min", "ratio_mean", "ratio_max")}


def draw_staleness(runs: list[Run], last_k: int) -> Figure:
    """Draw final answer reward, gradient norm, ratios and share of clipped tokens of each arm over its measured lag."""
    figure, axes = panels(4)
    looks = styles(map(readable, by_arm(runs)))
    for shape, arms in zip(SERIES.values(), arms_in_order(runs), strict=True):
        dots: list[list[Dot]] = [[], [], [], []]
        for of_arm in arms:
            of, scores = staleness(of_arm), final_scores(of_arm, last_k)
            name, lag, reward = readable(of_arm[0].arm), of["lag_mean"], mean_of(scores)
            norm, clipped = of["gradient_norm"], 100 * of["clip_fraction"]
            dots[0].append(Dot(name, lag, reward.value, reward.low, reward.high, tuple(scores.mean(axis=1))))
            dots[1].append(Dot(name, lag, norm, norm, norm))
            dots[2].append(Dot(name, lag, of["ratio_mean"], of["ratio_min"], of["ratio_max"]))
            dots[3].append(Dot(name, lag, clipped, clipped, clipped))
        for place, of_panel in zip(axes, dots, strict=True):
            draw_dots(place, of_panel, looks, shape)
    titles = (
        f"answer reward, {averaged(last_k)}, 95%; dots: runs",
        "gradient norm before clipping, median of updates",
        "ratio to the sampling policy: smallest, mean, largest",
        "clipped tokens (%), mean of updates",
    )
    for place, title in zip(axes, titles, strict=True):
        frame(place, title, "measured lag (versions), mean over tokens")
    axes[2].set_yscale("log")
    axes[2].set_ylabel("median of updates")
    for series, shape in SERIES.items():
        axes[0].plot([], [], shape, color=INK, label=series)
    axes[0].legend(fontsize=8)
    legend(figure, looks)
    return figure


def discuss_bounds(runs: list[Run], synchronous: list[Run]) -> str:
    """State whether lag 0 equals the run in one process, whether lags kept their bound, and how often groups were reused.

    Args:
        synchronous: the runs with one update per rollout batch in one process, to compare with lag 0.
    """
    plain, buffered = arms_in_order(runs)
    one_process = {run.seed: run for run in synchronous}
    measured = {run.name: int(run.history["lag_max"].max()) for run in runs}
    return paragraph(
        "bounds_sentences.md.j2",
        agreements=[_agreement(of, one_process) for of in plain if _setting(of, "max_policy_lag") == 0],
        lags=[(arm, max(measured[run.name] for run in of), lag_bound(of[0])) for arm, of in by_arm(runs).items()],
        broken=[(run.name, measured[run.name]) for run in runs if measured[run.name] > lag_bound(run)],
        runs=len(runs),
        reuse=[(of[0].arm, *_reuse(of)) for of in buffered],
    )


def _agreement(lag_0: list[Run], one_process: dict[int, Run]) -> dict[str, Any]:
    """The seeds that lag 0 and one process share, and the first step at which results of a seed differ."""
    pairs = [(run, one_process[run.seed]) for run in lag_0 if run.seed in one_process]
    return {
        "arm": lag_0[0].arm,
        "seeds": [run.seed for run, _ in pairs],
        "other": pairs[0][1].arm if pairs else None,
        "losses": [value(run, "loss_type") for run in pairs[0]] if pairs else [],
        "until": min((last_common(*pair) for pair in pairs), default=math.inf),
        "parted": {run.seed: step for run, other in pairs if (step := first_difference(run, other)) is not None},
    }


def first_difference(first: Run, second: Run) -> int | None:
    """The step of the first evaluation at which two runs differ on a problem, or which one of them lacks.

    Evaluations after the end of the shorter run do not count, unless that run diverged.
    """
    until = last_common(first, second)
    steps = [[step for step in run.validation["step"].tolist() if step <= until] for run in (first, second)]
    for i in range(max(map(len, steps))):
        if i >= min(map(len, steps)) or steps[0][i] != steps[1][i] or (first.outcomes[i] != second.outcomes[i]).any():
            return int(min(of[i] for of in steps if i < len(of)))
    return None


def last_common(first: Run, second: Run) -> float:
    """The last step up to which two runs can be compared."""
    whole = [run for run in (first, second) if run.metrics["diverged_step"] is None]
    return min((float(run.validation["step"].iloc[-1]) for run in whole), default=math.inf)


def _reuse(of_arm: list[Run]) -> tuple[float, float, float, float]:
    """Groups that left an arm's replay buffers, their mean and largest number of uses, and the share never drawn."""
    last = pd.DataFrame([run.history.iloc[-1] for run in of_arm])
    left = last["replay/left"]
    uses, never = (float((left * last[key]).sum() / max(1, left.sum())) for key in ("replay/uses_mean", "replay/never_drawn"))
    return float(left.sum()), uses, float(last["replay/uses_max"].max()), never


def effects(runs: list[Run], last_k: int) -> list[dict[str, Any]]:
    """Compare the arms with the least and the most lag, and those without and with the largest buffer.

    Returns:
        for each ``what`` (lag, buffer), ``arms`` (names), ``difference`` (second minus first in final answer reward),
        ``stale`` (:func:`staleness` of both) and ``collapsed`` (number of collapsed runs of both).
    """
    found, (plain, buffered) = Evidence("", by_arm(runs), last_k), arms_in_order(runs)
    pairs = {"lag": (plain[0], plain[-1])} if len(plain) > 1 else {}
    if buffered:
        same_lag = [of for of in plain if _setting(of, "max_policy_lag") == _setting(buffered[-1], "max_policy_lag")]
        pairs["buffer"] = ((same_lag or buffered)[0], buffered[-1])
    return [
        {
            "what": what,
            "arms": [first[0].arm, second[0].arm],
            "difference": difference_of(found.final(first[0].arm), found.final(second[0].arm)),
            "stale": [staleness(first), staleness(second)],
            "collapsed": [len(found.collapses(of[0].arm)) for of in (first, second)],
        }
        for what, (first, second) in pairs.items()
        if first is not second
    ]


def discuss_updates(numbers: Numbers) -> list[str]:
    """Compare several updates per rollout batch with one: convergence, stability and run time; empty with one arm."""
    arms = sorted(numbers["arms"], key=updates_of)
    if len(arms) < 2:
        return []
    ends = []
    for arm in (arms[0], arms[-1]):
        history = pd.concat([run.history for run in arm["all"]])
        ends.append(
            {
                "arm": arm,
                "updates": updates_of(arm),
                "norm": float(np.nanmax(history["gradient_norm"])),
                "ratios": [history["ratio_min"].min(), history["ratio_max"].max()] if "ratio_max" in history else None,
                "seconds": seconds_of_a_step(arm["all"]),
            }
        )
    return paragraphs("colocated_sentences.md.j2", ends=ends, at_equal_time=at_equal_time(arms[0]["all"], arms[-1]["all"]))


def discuss_effects(numbers: Numbers, one_process: Numbers | None) -> list[str]:
    """State the effect of lag and of a larger buffer, and compare the smallest lag above zero with one process at equal time.

    Args:
        one_process: the colocated experiment; None if the study leaves it out.
    """
    runs = [run for arm in numbers["arms"] for run in arm["all"]]
    overlapping = [of for of in arms_in_order(runs)[0] if value(of[0], "asynchronous")["max_policy_lag"]]
    compared = at_equal_time(one_process["arms"][0]["all"], overlapping[0]) if one_process and overlapping else ""
    found = effects(runs, numbers["last_k"])
    return paragraphs("asynchronous_sentences.md.j2", effects=found, seeds=numbers["seeds"], at_equal_time=compared)


def floor(times: Times) -> float:
    """Minimal seconds of a step with one generator and one learner: the longer of their own times."""
    return float(max(times["rollout"] + times["generator_synchronization"], times["training"] + times["synchronization"]))


def dominates(found: list[Times]) -> str:
    """Largest component and floor of each arm's step, and what would make it shorter (Markdown)."""
    arms = [times for times in found if times["steps"]]
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
    return paragraph(
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
