"""Sentences and a figure on supervised fine-tuning and expert iteration."""

from __future__ import annotations

import itertools
from typing import Any

from matplotlib.figure import Figure

from grpo.reporting.charts import INK, Dot, draw_dots, frame, legend, panels, powers_of_two, readable, styles
from grpo.reporting.sentences import paragraphs
from grpo.results.findings import ExperimentResult
from grpo.results.intervals import difference_of
from grpo.results.runs import REWARD, Run, by_arm, final_scores, mean_curve, value

# Settings that arms of expert iteration vary, in words.
VARIED = {"ei_batch_size": "questions per step", "group_size": "rollouts per question", "epochs_per_ei_step": "epochs per step"}
SERIES = {False: ("o", "all kinds of examples"), True: ("s", "only examples that earn the reward")}


def examples_of(runs: list[Run]) -> dict[bool, list[list[Run]]]:
    """Runs of the arms by ``filtered`` (only examples that earn the reward), sorted by number of examples."""
    arms = sorted(by_arm(runs).values(), key=lambda of_arm: of_arm[0].metrics["examples"])
    return {filtered: [of_arm for of_arm in arms if value(of_arm[0], "filtered") is filtered] for filtered in SERIES}


def discuss_sft(runs: list[Run], last_k: int, report: dict[str, Any]) -> str:
    """State how many traces there are, and whether more of them or filtering helps.

    Args:
        report: reports/dataset/sft/TASK.json.
    """
    every, filtered = (
        [{"examples": of[0].metrics["examples"], "scores": final_scores(of, last_k)} for of in arms]
        for arms in examples_of(runs).values()
    )
    (text,) = paragraphs(
        "sft_sentences.md.j2",
        report=report,
        every=every,
        filtered=filtered,
        more=difference_of(every[0]["scores"], every[-1]["scores"]) if len(every) > 1 else None,
        filtering=difference_of(every[-1]["scores"], filtered[-1]["scores"]) if every and filtered else None,
    )
    return text


def draw_by_examples(runs: list[Run], result: ExperimentResult) -> Figure:
    """Draw answer reward over the number of unique examples, all and filtered, with 95% intervals and each run."""
    figure, (axes,) = panels(1)
    looks = styles(map(readable, by_arm(runs)))
    for filtered, arms in examples_of(runs).items():
        shape, title = SERIES[filtered]
        dots = []
        for of_arm in arms:
            name, count, own = of_arm[0].arm, of_arm[0].metrics["examples"], result.arm(of_arm[0].arm)
            dots.append(Dot(readable(name), count, own.final.value, own.final.low, own.final.high, own.by_run))
        draw_dots(axes, dots, looks, shape)
        axes.plot([], [], shape, color=INK, label=title)
    frame(axes, f"answer reward, mean of the last {result.last_k} evaluations", "unique examples", share=True)
    powers_of_two(axes, [run.metrics["examples"] for run in runs])
    axes.legend(fontsize=8)
    legend(figure, looks)
    return figure


def discuss_expert_iteration(runs: list[Run], result: ExperimentResult) -> str:
    """State whether the reward rises over the steps, and the effect of each setting."""
    arms = by_arm(runs)
    scores = {arm: final_scores(of_arm, result.last_k) for arm, of_arm in arms.items()}
    pairs = [
        {
            "words": words,
            "values": [value(arms[arm][0], key) for arm in pair],
            "difference": difference_of(scores[pair[0]], scores[pair[1]]),
        }
        for key, words in VARIED.items()
        for pair in _pairs(arms, key)
    ]
    curve = mean_curve(arms[result.winner], REWARD)
    rises = int((curve.diff() > 0).sum())
    (text,) = paragraphs(
        "expert_iteration_sentences.md.j2", winner=result.winner, curve=curve.tolist(), rises=rises, pairs=pairs
    )
    return text


def _pairs(arms: dict[str, list[Run]], key: str) -> list[tuple[str, str]]:
    """Pairs of arms that differ only in ``key``, each with the next larger value."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for arm, runs in arms.items():
        groups.setdefault(tuple(value(runs[0], other) for other in VARIED if other != key), []).append(arm)
    pairs: list[tuple[str, str]] = []
    for members in groups.values():
        pairs += itertools.pairwise(sorted(members, key=lambda arm: value(arms[arm][0], key)))
    return [(a, b) for a, b in pairs if value(arms[a][0], key) < value(arms[b][0], key)]
