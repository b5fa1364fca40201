"""What the report says of an experiment beyond what it says of each: the pieces that its entry names under ``report:``.

A piece of one's own is an entry here, and its name in :data:`grpo.study.settings.ReportPiece`.
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
    """A figure of its own: the name of its file, its caption, and how it is drawn."""

    name: str
    caption: str
    draw: Callable[[Study, list[Run], Selection], Figure]


@dataclass(frozen=True)
class Piece:
    """Each part may be missing: sentences of discussion, a figure."""

    discuss: Callable[[Study, list[Run], Numbers], str] | None = None
    figure: ExtraFigure | None = None


def sft_report() -> dict[str, Any]:
    """What the stage sft_dataset says of its traces."""
    report: dict[str, Any] = read_json(
        paths.sft_report(MAIN), made_by=f"sft_dataset@{MAIN}", keys=("examples", "correct", "digest")
    )
    return report


def in_turns(study: Study) -> list[Run]:
    """The runs that asynchronous ones rival: the first arm of the experiment in one process; none where it is left out."""
    return [runs for name in study.with_report("colocated") for runs in next(iter(by_arm(read_runs(study, name)).values()))]


PIECES: dict[ReportPiece, Piece] = {
    # Reasoning traces: what the right ones among them are worth, and how many are needed.
    "traces": Piece(
        discuss=lambda study, runs, numbers: discuss_sft(runs, numbers["last_k"], sft_report()),
        figure=ExtraFigure(
            "sft_examples", "Answer reward by number of examples", lambda _, runs, selection: draw_by_examples(runs, selection)
        ),
    ),
    "expert_iteration": Piece(discuss=lambda _, runs, numbers: discuss_expert_iteration(runs, numbers)),
    # One process that samples and trains in turns; asynchronous runs are compared with its first arm.
    "colocated": Piece(),
    "staleness": Piece(
        discuss=lambda study, runs, _: discuss_bounds(runs, in_turns(study)),
        figure=ExtraFigure(
            "staleness",
            "Reward, gradient norm, ratios and clipping against measured staleness",
            lambda study, runs, _: draw_staleness(runs, study.last_k(runs[0].experiment)),
        ),
    ),
    # Whether the reward was won by writing sentences.
    "degenerate_answers": Piece(discuss=lambda _study, runs, _numbers: discuss_keyword(runs)),
    # Parts of the page that are not about one experiment's runs alone, or stand elsewhere in it.
    "samples": Piece(),  # the same problems before and after training
    "wall_clock": Piece(),  # reward over seconds
    "methods": Piece(),  # supervised fine-tuning, expert iteration and GRPO beside one another
    "leaderboard": Piece(),  # scores on the whole validation set
}


def pieces_of(study: Study, experiment: str) -> list[Piece]:
    """The pieces that an experiment's entry names."""
    return [PIECES[name] for name in study.experiments[experiment].report]
