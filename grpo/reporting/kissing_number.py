"""The search for kissing configurations: its scores over proposals, and its section of the write-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from grpo.common.files import read_json, read_jsonl
from grpo.reporting.charts import GREY, Spec, below_one_another, on_paper
from grpo.reporting.sentences import templates
from grpo.reporting.style import styles
from grpo.study import paths
from grpo.study.schema import read_yaml

STAGE = "kissing_number"
KNOWN_BOUNDS = Path(__file__).with_name("known_bounds.yaml")
DRAWN_BOUNDS = (566, 582, 594, 600, 604)  # those worth a line in the figure; all are in the table
TOP = (540, 610)  # points, where the bounds are
KEYS = ("strategy", "note", "best", "best_from", "best_of_search", "committed_program", "by_kind", "failures", "course")


def read_report() -> dict[str, Any]:
    """reports/kissing_number.json, as the stage wrote it.

    Raises:
        UserError: it is missing or damaged.
    """
    report: dict[str, Any] = read_json(paths.KISSING_NUMBER_REPORT, STAGE, keys=KEYS)
    return report


def read_scores() -> pd.DataFrame:
    """One row for each attempt: ``attempt``, ``kind``, ``num_points``, ``score``, ``best`` and ``message``.

    Raises:
        UserError: the file is missing or damaged.
    """

    def row(value: dict[str, Any]) -> dict[str, Any]:
        return {name: value[name] for name in ("attempt", "kind", "num_points", "score", "best", "message")}

    return pd.DataFrame(read_jsonl(paths.KISSING_NUMBER / "scores.jsonl", STAGE, row))


def known_bounds() -> dict[str, list[dict[str, Any]]]:
    """``lower`` and ``upper`` bounds on the kissing number in dimension 11, each with its source, oldest first."""
    bounds: dict[str, list[dict[str, Any]]] = read_yaml(KNOWN_BOUNDS)
    return bounds


def draw_search(report: dict[str, Any], scores: pd.DataFrame) -> Spec:
    """The score of each attempt by its kind and the best so far; below it the top, with what others have reached."""
    attempts = scores[["attempt", "kind", "score", "best"]].to_dict("records")
    looks = styles(sorted(set(scores["kind"])))
    colour: Spec = {"field": "kind", "type": "nominal", "legend": {"title": None, "orient": "top"}}
    colour["scale"] = {"domain": list(looks), "range": [look.color for look in looks.values()]}
    x = {"field": "attempt", "type": "quantitative", "title": "attempt", "axis": {"grid": False}}
    y: Spec = {"type": "quantitative", "title": "points of a valid set (0: none)"}
    tooltip = [{"field": field} for field in ("attempt", "kind", "score", "best")]
    known = {bound["points"]: f"{bound['points']}: {bound['who']}, {bound['year']}" for bound in known_bounds()["lower"]}
    bounds = [{"points": points, "text": known[points]} for points in DRAWN_BOUNDS]

    def panel(scale: Spec, others: list[Spec]) -> Spec:
        within = {**y, "scale": scale}
        marks = [
            {
                "mark": {"type": "line", "interpolate": "step-after", "color": "#000000", "clip": bool(scale)},
                "encoding": {"x": x, "y": {**within, "field": "best"}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 40, "opacity": 0.85, "clip": bool(scale)},
                "encoding": {"x": x, "y": {**within, "field": "score"}, "color": colour, "tooltip": tooltip},
            },
        ]
        return on_paper({"data": {"values": attempts}, "layer": [*others, *marks]}, height=240)

    at: Spec = {"y": {**y, "scale": {"domain": TOP}, "field": "points"}}
    lines: list[Spec] = [
        {"data": {"values": bounds}, "mark": {"type": "rule", "color": GREY, "strokeDash": [4, 3]}, "encoding": at},
        {
            "data": {"values": bounds},
            "mark": {"type": "text", "align": "left", "x": 2, "dy": -6, "fontSize": 11, "color": GREY},
            "encoding": {**at, "text": {"field": "text"}},
        },
    ]
    return below_one_another(
        {
            f"Each attempt and the best so far (line): {report['strategy']}, seed {report['seed']}": panel({}, []),
            f"From {TOP[0]} points on, with what others have reached": panel({"domain": TOP}, lines),
        }
    )


def section(report: dict[str, Any]) -> str:
    """Method, course, result and what failed, in Markdown, from the stage's report; for a page in a folder of reports/."""
    bounds = known_bounds()
    passed = [bound for bound in bounds["lower"] if bound["points"] <= report["best_of_search"]]
    return (
        templates()
        .get_template("kissing_number.md.j2")
        .render(
            report=report,
            bounds=bounds,
            passed=passed[-1] if passed else None,
            record=max(bound["points"] for bound in bounds["lower"]),
            record_in_integers=max(bound["points"] for bound in bounds["lower"] if bound["integers"]),
        )
    )
