"""The kissing number: the figure of a search, and the handout's deliverables with their report."""

from __future__ import annotations

import shutil
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from grpo.common.files import atomic_folder, note_that_off, read_json, write_text
from grpo.common.yaml_file import parse_yaml
from grpo.discovery.log import BEST_PROGRAM, LOG, Attempt, read_log
from grpo.discovery.strategies import BASELINE
from grpo.reporting.charts import INK, legend, panels, styles
from grpo.reporting.labels import render
from grpo.study import paths
from grpo.study.schema import Study

STAGE = "kissing_number"
KNOWN_BOUNDS = Path(__file__).with_name("known_bounds.yaml")
DRAWN_BOUNDS = (566, 582, 594, 600, 604)  # lines in the figure; the table has all bounds
TOP = (540, 610)  # points, where the bounds are
KEYS = ("strategy", "attempts", "valid", "best", "best_from", "best_of_search", "committed_program")
FIRST, LATER = "from scratch", "refined"  # kinds of attempts: without and with earlier answers in the prompt
EXAMPLES = 2  # later prompts that the report shows


def read_report() -> dict[str, Any]:
    """Read reports/kissing_number.json; a missing or damaged file is a UserError."""
    return read_json(paths.KISSING_NUMBER_REPORT, STAGE, keys=KEYS)


def known_bounds() -> dict[str, list[dict[str, Any]]]:
    """Read the known ``lower`` and ``upper`` bounds in dimension 11, each with its source, oldest first."""
    bounds: dict[str, list[dict[str, Any]]] = parse_yaml(KNOWN_BOUNDS)
    return bounds


def draw_search() -> Figure | None:
    """Draw the score of each attempt and the best so far; a second panel shows the top with known bounds.

    Returns None if no search ran. Raises UserError: the log is missing or damaged.
    """
    settings, attempts = read_log(paths.CONVERSATION_LOG, STAGE)
    if not attempts:
        return None
    figure, axes = panels(2, 10.0, 3.0)
    known = {bound["points"]: f"{bound['points']}: {bound['who']}, {bound['year']}" for bound in known_bounds()["lower"]}
    kinds = [LATER if attempt.proposal.parents else FIRST for attempt in attempts]
    looks = styles(sorted(set(kinds)))
    best = list(accumulate((attempt.score for attempt in attempts), max))
    for place in axes:
        place.step(range(len(best)), best, where="post", color=INK, linewidth=1.2)
        for kind, look in looks.items():
            drawn = [attempt for attempt, its_kind in zip(attempts, kinds, strict=True) if its_kind == kind]
            steps, scores = [attempt.index for attempt in drawn], [attempt.score for attempt in drawn]
            place.plot(steps, scores, "o", color=look["color"], markersize=4, alpha=0.85)
        place.set_xlabel("attempt")
    axes[0].set_title(f"points of a valid set (0: none), best as a line; {settings.strategy}, seed {settings.seed}")
    axes[1].set_title(f"from {TOP[0]} points on, with known bounds")
    axes[1].set_ylim(*TOP)
    for points in DRAWN_BOUNDS:
        axes[1].axhline(points, color=INK, linestyle=(0, (4, 3)), linewidth=1)
        # A text stands under its line, but the highest above it, as the highest two are near each other.
        offset, side = (2, "bottom") if points == DRAWN_BOUNDS[-1] else (-2, "top")
        axes[1].annotate(
            known[points], (0.01, points), (0, offset), ("axes fraction", "data"), "offset points", va=side, fontsize=8.5
        )
    legend(figure, looks)
    return figure


def write_delivery(study: Study) -> None:
    """Write program, log and report to reports/kissing_number/; only a note if the stage is off, as DVC requires outputs."""
    with atomic_folder(paths.KISSING_NUMBER_DELIVERY) as folder:
        if study.kissing_number is None:
            note_that_off(folder, STAGE)
            return
        shutil.copy(paths.KISSING_SEARCH / BEST_PROGRAM, folder / BEST_PROGRAM)
        shutil.copy(paths.CONVERSATION_LOG, folder / LOG)
        write_text(folder / "report.md", report_of(read_report(), read_log(paths.CONVERSATION_LOG, STAGE)[1]))


def report_of(report: dict[str, Any], attempts: list[Attempt]) -> str:
    """The report on method, course, result, prompts and reflection (Markdown), with links relative to its folder.

    ``report``: contents of reports/kissing_number.json.
    """
    bounds = known_bounds()
    best = [0.0, *accumulate((attempt.score for attempt in attempts), max)]
    improved = [attempt for attempt in attempts if attempt.score > best[attempt.index]]
    later = [attempt for attempt in attempts if attempt.proposal.parents]
    return render(
        "kissing_report.md.j2",
        report=report,
        bounds=bounds,
        record=max(bound["points"] for bound in bounds["lower"]),
        record_in_integers=max(bound["points"] for bound in bounds["lower"] if bound["integers"]),
        improved=improved,
        first_prompt=BASELINE,
        later_prompts=[_prompt(one) for one in ([one for one in later if one in improved] or later)[-EXAMPLES:]],
        turns=turns(attempts),
    )


def _prompt(attempt: Attempt) -> str:
    """The whole conversation that an attempt answered."""
    return "\n\n".join(f"[{message['role']}]\n{message['content'].strip()}" for message in attempt.proposal.messages)


def turns(attempts: list[Attempt]) -> dict[str, int]:
    """Count the answers that followed a failure or a valid set in their conversation, and those that improved on it."""
    pairs = [(attempts[a.proposal.parents[-1]].score, a.score) for a in attempts if a.proposal.parents]
    return {
        "after_failure": sum(before == 0 for before, _ in pairs),
        "mended": sum(before == 0 < now for before, now in pairs),
        "after_valid": sum(before > 0 for before, _ in pairs),
        "enlarged": sum(0 < before < now for before, now in pairs),
    }
