"""Sentences and a figure on supervised fine-tuning and expert iteration."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from grpo.reporting.charts import INK, Dot, draw_dots, frame, legend, panels, powers_of_two
from grpo.reporting.sentences import interval
from grpo.reporting.style import readable, styles
from grpo.results.findings import Interval
from grpo.results.intervals import difference_of
from grpo.results.runs import REWARD, Run, by_arm, final_scores, mean_curve, value

# Settings that arms of expert iteration vary, in words.
VARIED = {"ei_batch_size": "questions per step", "group_size": "rollouts per question", "epochs_per_ei_step": "epochs per step"}


# ---------------------------------------------------------------------------------------------------- fine-tuning


def examples_of(runs: list[Run]) -> dict[bool, list[list[Run]]]:
    """Runs of the arms by ``filtered`` (only examples that earn the reward), sorted by number of examples."""
    arms = sorted(by_arm(runs).values(), key=lambda of_arm: of_arm[0].metrics["examples"])
    return {filtered: [of_arm for of_arm in arms if value(of_arm[0], "filtered") is filtered] for filtered in (False, True)}


def discuss_sft(runs: list[Run], last_k: int, report: dict[str, Any]) -> str:
    """State how many traces there are, and whether more of them or filtering helps.

    Args:
        report: reports/dataset/sft/TASK.json.
    """
    found = examples_of(runs)
    n, right = report["examples"], report["correct"]
    sentences = [
        f"Of {n:,} examples {right:,} ({right / n:.1%}) earn the reward; the filtered set holds only these. In "
        f"{report['wrong_answer']:,} the answer is wrong, in {report['wrong_form']:,} the form."
    ]
    unfiltered = found[False]
    if len(unfiltered) > 1:
        fewest, most = unfiltered[0], unfiltered[-1]
        series = ", ".join(f"{final_scores(a, last_k).mean():.3f} with {a[0].metrics['examples']:,}" for a in unfiltered)
        difference = difference_of(final_scores(fewest, last_k), final_scores(most, last_k))
        sentences.append(
            f"Answer reward by number of unique examples: {series}. {most[0].metrics['examples']:,} instead of "
            f"{fewest[0].metrics['examples']:,} make a difference of {interval(difference)}: "
            f"{_verdict(difference, 'more examples help', 'more examples harm')}."
        )
    if found[True] and unfiltered:
        filtered, everything = found[True][-1], unfiltered[-1]
        difference = difference_of(final_scores(everything, last_k), final_scores(filtered, last_k))
        sentences.append(
            f"The {filtered[0].metrics['examples']:,} filtered examples end at {final_scores(filtered, last_k).mean():.3f}, "
            f"all {everything[0].metrics['examples']:,} at {final_scores(everything, last_k).mean():.3f}: a difference of "
            f"{interval(difference)}, so {_verdict(difference, 'filtering helps', 'filtering harms')}."
        )
    return " ".join(sentences)


def _verdict(difference: Interval, above: str, below: str) -> str:
    if difference.low > 0:
        return above
    return below if difference.high < 0 else "these runs cannot tell the two apart"


def draw_by_examples(runs: list[Run], selection: dict[str, Any]) -> Figure:
    """Draw answer reward over the number of unique examples, all and filtered, with 95% intervals and each run."""
    candidates = {candidate["arm"]: candidate for candidate in selection["candidates"]}
    figure, (axes,) = panels(1)
    looks = styles(map(readable, by_arm(runs)))
    counts = [run.metrics["examples"] for run in runs]
    series = {False: ("o", "all kinds of examples"), True: ("s", "only examples that earn the reward")}
    for filtered, arms in examples_of(runs).items():
        shape, title = series[filtered]
        dots = []
        for of_arm in arms:
            own, seeds = candidates[of_arm[0].arm], final_scores(of_arm, selection["last_k"]).mean(axis=1)
            value, low, high = (own[key] for key in ("value", "low", "high"))
            dots.append(Dot(readable(of_arm[0].arm), of_arm[0].metrics["examples"], value, low, high, tuple(seeds)))
        draw_dots(axes, dots, looks, shape, joined=True)
        axes.plot([], [], shape, color=INK, label=title)
    frame(axes, f"answer reward, mean of the last {selection['last_k']} evaluations", "unique examples", share=True)
    powers_of_two(axes, counts)
    axes.legend(fontsize=8)
    legend(figure, looks)
    return figure


# ----------------------------------------------------------------------------------------------- expert iteration


def discuss_expert_iteration(runs: list[Run], numbers: dict[str, Any]) -> str:
    """State whether the reward rises over the steps, and the effect of each setting.

    Args:
        numbers: see :func:`grpo.reporting.discussion.numbers_of`.
    """
    arms, last_k, winner = by_arm(runs), numbers["last_k"], numbers["winner"]["arm"]
    curve = mean_curve(arms[winner], REWARD)
    rises = int((np.diff(curve) > 0).sum())
    sentences = [
        f"In {winner} the answer reward went over the steps from {curve.iloc[0]:.3f} to "
        f"{', '.join(f'{point:.3f}' for point in curve.iloc[1:])}: it rose at {rises} of {len(curve) - 1} steps."
    ]
    for key, words in VARIED.items():
        for first, second in _pairs(arms, key):
            low, high = value(arms[first][0], key), value(arms[second][0], key)
            difference = difference_of(final_scores(arms[first], last_k), final_scores(arms[second], last_k))
            what = _verdict(difference, "more is better", "fewer is better")
            sentences.append(f"{high} instead of {low} {words}: {interval(difference)}, {what}.")
    return " ".join(sentences)


def _pairs(arms: dict[str, list[Run]], key: str) -> list[tuple[str, str]]:
    """Pairs of arms that differ only in ``key``, each with the next larger value."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for arm, runs in arms.items():
        others = tuple(value(runs[0], other) for other in VARIED if other != key)
        groups.setdefault(others, []).append(arm)
    pairs = []
    for members in groups.values():
        ordered = sorted(members, key=lambda arm: value(arms[arm][0], key))
        pairs += [(a, b) for a, b in itertools.pairwise(ordered) if value(arms[a][0], key) < value(arms[b][0], key)]
    return pairs
