"""Sentences and figures for the pieces that an experiment names under ``report:``.

Add a piece of your own as an entry here and a name in :data:`grpo.study.settings.ReportPiece`. Some names have no entry,
because other modules look for them: ``colocated`` (the experiment with which asynchronous runs are compared), ``samples`` (the
same problems before and after training), ``wall_clock`` (reward over seconds), ``methods`` (SFT, expert iteration and GRPO
compared) and ``leaderboard`` (scores on the whole validation set).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from grpo.common.files import read_json
from grpo.reporting.asynchronous import discuss_bounds, draw_staleness
from grpo.reporting.discussion import Numbers
from grpo.reporting.fine_tuning import discuss_expert_iteration, discuss_sft, draw_by_examples
from grpo.reporting.keyword import discuss_keyword
from grpo.results.runs import Run, by_arm, read_runs
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN, ReportPiece

Selection = dict[str, Any]


@dataclass(frozen=True)
class ExtraFigure:
    """A figure with its file name and caption."""

    name: str
    caption: str
    draw: Callable[[Study, list[Run], Selection], Figure]


def sft_report() -> dict[str, Any]:
    """Read what the stage sft_dataset reports on its traces."""
    report: dict[str, Any] = read_json(
        paths.sft_report(MAIN), made_by=f"sft_dataset@{MAIN}", keys=("examples", "correct", "digest")
    )
    return report


def one_process(study: Study) -> list[Run]:
    """The runs with which asynchronous ones are compared: the colocated experiment's first arm; none if it is left out."""
    return [runs for name in study.with_report("colocated") for runs in next(iter(by_arm(read_runs(study, name)).values()))]


DISCUSSIONS: dict[ReportPiece, Callable[[Study, list[Run], Numbers], str]] = {
    "traces": lambda study, runs, numbers: discuss_sft(runs, numbers["last_k"], sft_report()),
    "expert_iteration": lambda study, runs, numbers: discuss_expert_iteration(runs, numbers),
    "staleness": lambda study, runs, numbers: discuss_bounds(runs, one_process(study)),
    "degenerate_answers": lambda study, runs, numbers: discuss_keyword(runs),
}
FIGURES: dict[ReportPiece, ExtraFigure] = {
    "traces": ExtraFigure(
        "sft_examples", "Answer reward by number of examples", lambda _, runs, selection: draw_by_examples(runs, selection)
    ),
    "staleness": ExtraFigure(
        "staleness",
        "Reward, gradient norm, ratios and clipping by measured lag",
        lambda study, runs, _: draw_staleness(runs, study.last_k(runs[0].experiment)),
    ),
}


def discussions(study: Study, experiment: str, runs: list[Run], numbers: Numbers) -> list[str]:
    """The paragraphs of an experiment's pieces."""
    return [DISCUSSIONS[piece](study, runs, numbers) for piece in study.experiments[experiment].report if piece in DISCUSSIONS]


def extra_figures(study: Study, experiment: str) -> list[ExtraFigure]:
    """The figures of an experiment's pieces."""
    return [FIGURES[piece] for piece in study.experiments[experiment].report if piece in FIGURES]
