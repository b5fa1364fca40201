"""Figure and section on the search for kissing configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import read_json, read_jsonl
from grpo.reporting.charts import INK, panels
from grpo.reporting.sentences import render
from grpo.reporting.style import styles
from grpo.study import paths
from grpo.study.schema import Study, read_yaml

STAGE = "kissing_number"
KNOWN_BOUNDS = Path(__file__).with_name("known_bounds.yaml")
DRAWN_BOUNDS = (566, 582, 594, 600, 604)  # lines in the figure; the table has all bounds
TOP = (540, 610)  # points, where the bounds are
KEYS = ("strategy", "note", "best", "best_from", "best_of_search", "committed_program", "by_kind", "failures", "course")


def read_report() -> dict[str, Any]:
    """Read reports/kissing_number.json.

    Raises:
        UserError: it is missing or damaged.
    """
    report: dict[str, Any] = read_json(paths.KISSING_NUMBER_REPORT, STAGE, keys=KEYS)
    return report


def read_scores() -> pd.DataFrame:
    """Read a row per attempt: ``attempt``, ``kind``, ``num_points``, ``score``, ``best`` and ``message``.

    Raises:
        UserError: the file is missing or damaged.
    """

    def row(value: dict[str, Any]) -> dict[str, Any]:
        return {name: value[name] for name in ("attempt", "kind", "num_points", "score", "best", "message")}

    return pd.DataFrame(read_jsonl(paths.KISSING_SEARCH / "scores.jsonl", STAGE, row))


def write_search_curve(study: Study) -> None:
    """Write reports/search.csv, the best score so far by attempt; without rows if the study has no search."""
    columns = ["attempt", "best"]
    found = read_scores()[columns] if study.kissing_number is not None else pd.DataFrame(columns=columns)
    found.to_csv(paths.REPORTS / "search.csv", index=False, lineterminator="\n")


def known_bounds() -> dict[str, list[dict[str, Any]]]:
    """Read the known ``lower`` and ``upper`` bounds in dimension 11, each with its source, oldest first."""
    bounds: dict[str, list[dict[str, Any]]] = read_yaml(KNOWN_BOUNDS)
    return bounds


def draw_search(report: dict[str, Any], scores: pd.DataFrame) -> Figure:
    """Draw the score of each attempt and the best so far; a second panel shows the top with known bounds."""
    figure, axes = panels(2)
    known = {bound["points"]: f"{bound['points']}: {bound['who']}, {bound['year']}" for bound in known_bounds()["lower"]}
    looks = styles(sorted(set(scores["kind"])))
    for place in axes:
        place.step(scores["attempt"], scores["best"], where="post", color=INK, linewidth=1.2)
        for kind, look in looks.items():
            of_kind = scores[scores["kind"] == kind]
            place.plot(of_kind["attempt"], of_kind["score"], "o", color=look.color, markersize=4, alpha=0.85, label=kind)
        place.set_xlabel("attempt")
    axes[0].set_title(f"points of a valid set (0: none), best as a line; {report['strategy']}, seed {report['seed']}")
    axes[0].legend()
    axes[1].set_title(f"from {TOP[0]} points on, with known bounds")
    axes[1].set_ylim(*TOP)
    for points in DRAWN_BOUNDS:
        axes[1].axhline(points, color=INK, linestyle=(0, (4, 3)), linewidth=1)
        at = (0.01, points)
        axes[1].annotate(known[points], at, (0, 2), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=7)
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
