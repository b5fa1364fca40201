"""The search for kissing configurations: figure, section, and the handout's deliverables."""

from __future__ import annotations

import shutil
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import atomic_folder, note_that_off, read_json, read_jsonl, write_json, write_text
from grpo.common.yaml_file import parse_yaml
from grpo.discovery.log import BEST_PROGRAM, LOG, Attempt, read_log, to_json
from grpo.discovery.strategies import BASELINE
from grpo.reporting.charts import INK, legend, panels, styles
from grpo.reporting.labels import render
from grpo.study import paths
from grpo.study.schema import Study

STAGE = "kissing_number"
KNOWN_BOUNDS = Path(__file__).with_name("known_bounds.yaml")
DRAWN_BOUNDS = (566, 582, 594, 600, 604)  # lines in the figure; the table has all bounds
TOP = (540, 610)  # points, where the bounds are
KEYS = ("strategy", "note", "best", "best_from", "best_of_search", "committed_program", "by_kind", "failures", "course")
PROGRAMS = "For an attempt with a recipe, grpo.discovery.mutation.program_of(recipe) returns its exact program."
EXAMPLES = 2  # conversations with a language model that the report shows


def read_report() -> dict[str, Any]:
    """Read reports/kissing_number.json; a missing or damaged file is a UserError."""
    return read_json(paths.KISSING_NUMBER_REPORT, STAGE, keys=KEYS)


def read_scores() -> pd.DataFrame:
    """Read a row per attempt; a missing or damaged file is a UserError."""
    path, names = paths.KISSING_SEARCH / "scores.jsonl", ("attempt", "kind", "num_points", "score", "best", "message")
    return pd.DataFrame(read_jsonl(path, STAGE, lambda value: {name: value[name] for name in names}))


def known_bounds() -> dict[str, list[dict[str, Any]]]:
    """Read the known ``lower`` and ``upper`` bounds in dimension 11, each with its source, oldest first."""
    bounds: dict[str, list[dict[str, Any]]] = parse_yaml(KNOWN_BOUNDS)
    return bounds


def draw_search(report: dict[str, Any], scores: pd.DataFrame) -> Figure:
    """Draw the score of each attempt and the best so far; a second panel shows the top with known bounds."""
    figure, axes = panels(2, 10.0, 3.0)
    known = {bound["points"]: f"{bound['points']}: {bound['who']}, {bound['year']}" for bound in known_bounds()["lower"]}
    looks = styles(sorted(set(scores["kind"])))
    for place in axes:
        place.step(scores["attempt"], scores["best"], where="post", color=INK, linewidth=1.2)
        for kind, look in looks.items():
            of_kind = scores[scores["kind"] == kind]
            place.plot(of_kind["attempt"], of_kind["score"], "o", color=look["color"], markersize=4, alpha=0.85)
        place.set_xlabel("attempt")
    axes[0].set_title(f"points of a valid set (0: none), best as a line; {report['strategy']}, seed {report['seed']}")
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


def section(report: dict[str, Any]) -> str:
    """The section on method, course, result and failures (Markdown), with links relative to a folder of reports/."""
    bounds = known_bounds()
    passed = [bound for bound in bounds["lower"] if bound["points"] <= report["best_of_search"]]
    return render(
        "kissing_number.md.j2",
        report=report,
        bounds=bounds,
        passed=passed[-1] if passed else None,
        record=max(bound["points"] for bound in bounds["lower"]),
        record_in_integers=max(bound["points"] for bound in bounds["lower"] if bound["integers"]),
    )


def write_delivery(study: Study) -> None:
    """Write reports/kissing_number/; only a note if the study has no search, as DVC requires a stage's outputs.

    The log leaves out the programs of recipes, each of which contains the whole text of the constructions;
    :func:`grpo.discovery.mutation.program_of` restores them exactly.
    """
    with atomic_folder(paths.KISSING_NUMBER_DELIVERY) as folder:
        if study.kissing_number is None:
            note_that_off(folder, "kissing_number")
            return
        report = read_report()
        settings, attempts = read_log(paths.CONVERSATION_LOG, STAGE)
        shutil.copy(paths.KISSING_SEARCH / BEST_PROGRAM, folder / BEST_PROGRAM)
        log = to_json(settings, attempts)
        log["programs"] = PROGRAMS if any(attempt.proposal.recipe is not None for attempt in attempts) else ""
        for entry in log["attempts"]:
            if entry["proposal"]["recipe"] is not None:
                entry["proposal"]["program"] = None
        write_json(folder / LOG, log)
        for name, text in prompts_of(attempts).items():
            write_text(folder / "prompts" / f"{name}.md", text)
        values = {"section": section(report), "prompts": prompts_of(attempts), "turns": turns(attempts)}
        write_text(folder / "report.md", render("kissing_report.md.j2", report=report, **values))


def prompts_of(attempts: list[Attempt]) -> dict[str, str]:
    """The baseline prompt and, for a search with a model, the last conversations that improved the best score (or any)."""
    later = [one for one in attempts if one.proposal.messages and one.proposal.parents]
    best = list(accumulate((one.score for one in attempts), max, initial=0.0))
    further = [one for one in later if one.score > best[one.index]] or later
    texts = {"problem": BASELINE + "\n"}
    for number, one in enumerate(further[-EXAMPLES:], start=1):
        messages = (f"[{message['role']}]\n{message['content'].strip()}" for message in one.proposal.messages or [])
        texts[f"sent_{number}"] = "\n\n".join(messages) + "\n"
    return texts


def turns(attempts: list[Attempt]) -> dict[str, int]:
    """Count the answers that followed a failure or a valid set in their conversation, and those that improved on it."""
    pairs = [(attempts[a.proposal.parents[-1]].score, a.score) for a in attempts if a.proposal.messages and a.proposal.parents]
    return {
        "after_failure": sum(before == 0 for before, _ in pairs),
        "mended": sum(before == 0 < now for before, now in pairs),
        "after_valid": sum(before > 0 for before, _ in pairs),
        "enlarged": sum(0 < before < now for before, now in pairs),
    }
