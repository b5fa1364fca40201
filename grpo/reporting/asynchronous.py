"""Effects of policy lag in asynchronous training. For its seconds, see :mod:`grpo.reporting.time_breakdown`."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo.reporting.charts import INK, Dot, draw_dots, frame, legend, panels
from grpo.reporting.style import readable, styles
from grpo.results.collapses import collapses_of, held
from grpo.results.intervals import difference_of, mean_of
from grpo.results.runs import Run, by_arm, final_scores, value

SERIES = {"each batch trained on once": "o", "drawn from a buffer": "s"}


def arms_in_order(runs: list[Run]) -> tuple[list[list[Run]], list[list[Run]]]:
    """Runs of the asynchronous arms: without a replay buffer, sorted by lag, and with one, sorted by capacity."""
    arms = list(by_arm(runs).values())
    plain = [of_arm for of_arm in arms if _setting(of_arm, "replay_capacity") == 1]
    buffered = [of_arm for of_arm in arms if _setting(of_arm, "replay_capacity") > 1]
    return (
        sorted(plain, key=lambda of_arm: _setting(of_arm, "max_policy_lag")),
        sorted(buffered, key=lambda of_arm: _setting(of_arm, "replay_capacity")),
    )


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
            draw_dots(place, of_panel, looks, shape, joined=True)
    titles = (
        f"answer reward, mean of the last {last_k}, 95%; dots: runs",
        "gradient norm before clipping, median of updates",
        "ratio to the sampling policy: smallest, mean, largest",
        "clipped tokens (%), mean of updates",
    )
    for place, title in zip(axes, titles, strict=True):
        frame(place, title, "measured lag (versions), mean over tokens")
    axes[2].set_yscale("log")
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
    lag_0 = [of_arm for of_arm in plain if _setting(of_arm, "max_policy_lag") == 0]
    return " ".join([*(_agreement(of, synchronous) for of in lag_0), _bounds(runs), *(_reuse(of) for of in buffered)])


def effects(runs: list[Run], last_k: int) -> list[dict[str, Any]]:
    """Compare the arms with the least and the most lag, and those without and with the largest buffer.

    Returns:
        for each ``what`` (lag, buffer), ``arms`` (names), ``difference`` (second minus first in final answer reward),
        ``stale`` (:func:`staleness` of both) and ``collapsed`` (number of collapsed runs of both).
    """
    plain, buffered = arms_in_order(runs)
    unbuffered = {_setting(of_arm, "max_policy_lag"): of_arm for of_arm in plain}
    pairs = {"lag": (plain[0], plain[-1])} if len(plain) > 1 else {}
    if buffered:
        without = unbuffered.get(_setting(buffered[-1], "max_policy_lag"), buffered[0])
        pairs |= {"buffer": (without, buffered[-1])} if without is not buffered[-1] else {}
    scores = {of[0].arm: final_scores(held(of, last_k), last_k) for pair in pairs.values() for of in pair}
    return [
        {
            "what": what,
            "arms": [of_arm[0].arm for of_arm in pair],
            "difference": difference_of(scores[pair[0][0].arm], scores[pair[1][0].arm]),
            "stale": [staleness(of_arm) for of_arm in pair],
            "collapsed": [len(collapses_of(of_arm, last_k)) for of_arm in pair],
        }
        for what, pair in pairs.items()
    ]


def _agreement(lag_0: list[Run], synchronous: list[Run]) -> str:
    """State whether the runs with lag 0 equal those of one process, seed by seed."""
    one_process = {run.seed: run for run in synchronous}
    pairs = [(run, one_process[run.seed]) for run in lag_0 if run.seed in one_process]
    if not pairs:
        return f"There is no run in one process to compare {lag_0[0].arm} with."
    names = f"{lag_0[0].arm} and {pairs[0][1].arm}, its counterpart in one process,"
    parted = {run.seed: step for run, other in pairs if (step := first_difference(run, other)) is not None}
    if not parted:
        return (
            f"{names} agree exactly: with each seed ({', '.join(str(run.seed) for run, _ in pairs)}), every problem has the "
            "same reward at every evaluation."
        )
    losses = " and ".join(str(value(run, "loss_type")) for run in pairs[0])
    steps = ", ".join(f"with seed {seed} at step {step}" for seed, step in parted.items())
    return f"{names} differ (first evaluation at which a problem's reward differs; losses {losses}): {steps}."


def first_difference(first: Run, second: Run) -> int | None:
    """The step of the first evaluation at which two runs differ on a problem, or which one of them lacks."""
    steps = first.validation["step"].tolist(), second.validation["step"].tolist()
    for i in range(max(map(len, steps))):
        if i >= min(map(len, steps)) or steps[0][i] != steps[1][i] or (first.outcomes[i] != second.outcomes[i]).any():
            return int(min(of[i] for of in steps if i < len(of)))
    return None


def _bounds(runs: list[Run]) -> str:
    """State the largest lag of each arm, the bound by its settings, and where it was exceeded."""
    measured = {run.name: int(run.history["lag_max"].max()) for run in runs}
    of_arms = ", ".join(
        f"{max(measured[run.name] for run in of_arm)} of {lag_bound(of_arm[0])} ({arm})" for arm, of_arm in by_arm(runs).items()
    )
    broken = [f"{run.name} ({measured[run.name]})" for run in runs if measured[run.name] > lag_bound(run)]
    verdict = f"the bound was BROKEN in {', '.join(broken)}" if broken else f"the bound was respected in all {len(runs)} runs"
    return f"Largest lag measured in any token, of the largest allowed: {of_arms} versions; {verdict}."


def _reuse(of_arm: list[Run]) -> str:
    """State how often the groups of a replay buffer were drawn, over all runs of the arm."""
    last = pd.DataFrame([run.history.iloc[-1] for run in of_arm])
    left = last["replay/left"]
    if not left.sum():
        return f"No group had left the buffer of {of_arm[0].arm} when its runs ended."
    uses, never = (float((left * last[key]).sum() / left.sum()) for key in ("replay/uses_mean", "replay/never_drawn"))
    return (
        f"A group that left the buffer of {of_arm[0].arm} had been drawn {uses:.2f} times on average and at most "
        f"{last['replay/uses_max'].max():.0f} times; {never:.1%} of {left.sum():.0f} groups never were."
    )
