"""Effects of policy lag in asynchronous training. For its seconds, see :mod:`grpo.reporting.wall_clock`."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo.reporting.charts import INK, Dot, draw_dots, frame, legend, panels, readable, styles
from grpo.reporting.sentences import paragraphs
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
            draw_dots(place, of_panel, looks, shape)
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
    one_process = {run.seed: run for run in synchronous}
    measured = {run.name: int(run.history["lag_max"].max()) for run in runs}
    (text,) = paragraphs(
        "bounds_sentences.md.j2",
        agreements=[_agreement(of, one_process) for of in plain if _setting(of, "max_policy_lag") == 0],
        lags=[(arm, max(measured[run.name] for run in of), lag_bound(of[0])) for arm, of in by_arm(runs).items()],
        broken=[(run.name, measured[run.name]) for run in runs if measured[run.name] > lag_bound(run)],
        runs=len(runs),
        reuse=[(of[0].arm, *_reuse(of)) for of in buffered],
    )
    return text


def _agreement(lag_0: list[Run], one_process: dict[int, Run]) -> dict[str, Any]:
    """The seeds that lag 0 and one process share, and the first step at which results of a seed differ."""
    pairs = [(run, one_process[run.seed]) for run in lag_0 if run.seed in one_process]
    return {
        "arm": lag_0[0].arm,
        "seeds": [run.seed for run, _ in pairs],
        "other": pairs[0][1].arm if pairs else None,
        "losses": [value(run, "loss_type") for run in pairs[0]] if pairs else [],
        "parted": {run.seed: step for run, other in pairs if (step := first_difference(run, other)) is not None},
    }


def first_difference(first: Run, second: Run) -> int | None:
    """The step of the first evaluation at which two runs differ on a problem, or which one of them lacks."""
    steps = first.validation["step"].tolist(), second.validation["step"].tolist()
    for i in range(max(map(len, steps))):
        if i >= min(map(len, steps)) or steps[0][i] != steps[1][i] or (first.outcomes[i] != second.outcomes[i]).any():
            return int(min(of[i] for of in steps if i < len(of)))
    return None


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
    plain, buffered = arms_in_order(runs)
    pairs = {"lag": (plain[0], plain[-1])} if len(plain) > 1 else {}
    if buffered:
        same_lag = [of for of in plain if _setting(of, "max_policy_lag") == _setting(buffered[-1], "max_policy_lag")]
        pairs["buffer"] = ((same_lag or buffered)[0], buffered[-1])
    return [
        {
            "what": what,
            "arms": [first[0].arm, second[0].arm],
            "difference": difference_of(final_scores(held(first, last_k), last_k), final_scores(held(second, last_k), last_k)),
            "stale": [staleness(first), staleness(second)],
            "collapsed": [len(collapses_of(of, last_k)) for of in (first, second)],
        }
        for what, (first, second) in pairs.items()
        if first is not second
    ]
