"""Sentences and figures for the pieces that an experiment names under ``report:``.

Add a piece of your own as an entry here and a name in :data:`grpo.study.settings.ReportPiece`. Some names have no entry,
because other modules look for them: ``colocated`` (the experiment with which asynchronous runs are compared), ``samples`` (the
same problems before and after training), ``wall_clock`` (reward over seconds), ``methods`` (SFT, expert iteration and GRPO
compared) and ``leaderboard`` (scores on the whole validation set).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import read_json
from grpo.reporting.asynchronous import discuss_bounds, draw_staleness
from grpo.reporting.fine_tuning import discuss_expert_iteration, discuss_sft, draw_by_examples
from grpo.reporting.record import Record, Values
from grpo.reporting.sentences import paragraphs
from grpo.results.runs import Run, by_arm
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN, ReportPiece

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
    report: Values = read_json(paths.sft_report(MAIN), made_by=f"sft_dataset@{MAIN}", keys=("examples", "correct", "digest"))
    return report


def one_process(record: Record) -> list[Run]:
    """The runs with which asynchronous ones are compared: the colocated experiment's first arm; none if it is left out."""
    return [run for name in record.study.with_report("colocated") for run in next(iter(by_arm(record.runs[name]).values()))]


def discuss_keyword(runs: list[Run]) -> str:
    """State the share of each kind of response before and after training, and whether degenerate ones earn reward."""
    ends = pd.concat([run.validation[list(KEYWORDS)].iloc[[0, -1]].set_axis([0, 1]) for run in runs]).groupby(level=0).mean()
    kinds = [(words, *ends[column]) for column, words in KEYWORDS.items()]
    (text,) = paragraphs("keyword_sentences.md.j2", problems=runs[0].outcomes.shape[1], kinds=kinds)
    return text


DISCUSSIONS: dict[ReportPiece, Callable[[Record, str], str]] = {
    "traces": lambda record, name: discuss_sft(record.runs[name], record.results[name].last_k, sft_report()),
    "expert_iteration": lambda record, name: discuss_expert_iteration(record.runs[name], record.results[name]),
    "staleness": lambda record, name: discuss_bounds(record.runs[name], one_process(record)),
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
