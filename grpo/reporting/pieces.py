"""Sentences and figures for the pieces that an experiment names under ``report:``.

Add a piece of your own as an entry here and a name in :data:`grpo.study.settings.ReportPiece`. Some names have no entry,
because other modules look for them: ``colocated`` (the experiment with which asynchronous runs are compared), ``samples`` (the
same problems before and after training), ``wall_clock`` (reward over seconds), ``methods`` (SFT, expert iteration and GRPO
compared) and ``leaderboard`` (scores on the whole validation set).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import read_json
from grpo.reporting.asynchronous import discuss_bounds, draw_staleness
from grpo.reporting.charts import INK, Dot, averaged, draw_dots, frame, legend, panels, powers_of_two, readable, styles
from grpo.reporting.record import Record, Values
from grpo.reporting.sentences import paragraph
from grpo.results.findings import ExperimentResult
from grpo.results.intervals import difference_of
from grpo.results.runs import REWARD, Run, by_arm, final_scores, mean_curve, value
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN, ReportPiece

# Settings that arms of expert iteration vary, in words.
VARIED = {"ei_batch_size": "questions per step", "group_size": "rollouts per question", "epochs_per_ei_step": "epochs per step"}
SERIES = {False: ("o", "all kinds of examples"), True: ("s", "only examples that earn the reward")}
KEYWORDS = {  # kinds of responses in the keyword task
    "val/lists_only": "only list the keywords",
    "val/repeats_prompt": "repeat the prompt",
    "val/is_sentence": "are sentences of the grammar that the model was pretrained on",
}


@dataclass(frozen=True)
class ExtraFigure:
    """A figure with its file name and caption, drawn from a study's results for one of its experiments."""

    name: str
    caption: str
    draw: Callable[[Record, str], Figure]


def sft_report() -> Values:
    """Read what the stage sft_dataset reports on its traces."""
    return read_json(paths.sft_report(MAIN), made_by=f"sft_dataset@{MAIN}", keys=("examples", "correct", "digest"))


def discuss_keyword(runs: list[Run]) -> str:
    """State the share of each kind of response before and after training, and whether degenerate ones earn reward."""
    ends = pd.concat([run.validation[list(KEYWORDS)].iloc[[0, -1]].set_axis([0, 1]) for run in runs]).groupby(level=0).mean()
    kinds = [(words, *ends[column]) for column, words in KEYWORDS.items()]
    return paragraph("keyword_sentences.md.j2", problems=runs[0].outcomes.shape[1], kinds=kinds)


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
    return paragraph(
        "sft_sentences.md.j2",
        report=report,
        every=every,
        filtered=filtered,
        more=difference_of(every[0]["scores"], every[-1]["scores"]) if len(every) > 1 else None,
        filtering=difference_of(every[-1]["scores"], filtered[-1]["scores"]) if every and filtered else None,
    )


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
    frame(axes, f"answer reward, {averaged(result.last_k)}", "unique examples", share=True)
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
    return paragraph("expert_iteration_sentences.md.j2", winner=result.winner, curve=curve.tolist(), rises=rises, pairs=pairs)


def _pairs(arms: dict[str, list[Run]], key: str) -> list[tuple[str, str]]:
    """Pairs of arms that differ only in ``key``, each with the next larger value."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for arm, runs in arms.items():
        groups.setdefault(tuple(value(runs[0], other) for other in VARIED if other != key), []).append(arm)
    pairs: list[tuple[str, str]] = []
    for members in groups.values():
        pairs += itertools.pairwise(sorted(members, key=lambda arm: value(arms[arm][0], key)))
    return [(a, b) for a, b in pairs if value(arms[a][0], key) < value(arms[b][0], key)]


DISCUSSIONS: dict[ReportPiece, Callable[[Record, str], str]] = {
    "traces": lambda record, name: discuss_sft(record.runs[name], record.results[name].last_k, sft_report()),
    "expert_iteration": lambda record, name: discuss_expert_iteration(record.runs[name], record.results[name]),
    "staleness": lambda record, name: discuss_bounds(record.runs[name], record.one_process),
    "degenerate_answers": lambda record, name: discuss_keyword(record.runs[name]),
}
FIGURES: dict[ReportPiece, ExtraFigure] = {
    "traces": ExtraFigure(
        "sft_examples",
        "Answer reward by number of examples",
        lambda record, name: draw_by_examples(record.runs[name], record.results[name]),
    ),
    "staleness": ExtraFigure(
        "staleness",
        "Reward, gradient norm, ratios and clipping by measured lag",
        lambda record, name: draw_staleness(record.runs[name], record.results[name].last_k),
    ),
}


def discussions(record: Record, experiment: str) -> list[str]:
    """The paragraphs of an experiment's pieces."""
    named = record.study.experiments[experiment].report
    return [DISCUSSIONS[piece](record, experiment) for piece in named if piece in DISCUSSIONS]


def extra_figures(study: Study, experiment: str) -> list[ExtraFigure]:
    """The figures of an experiment's pieces."""
    return [FIGURES[piece] for piece in study.experiments[experiment].report if piece in FIGURES]
