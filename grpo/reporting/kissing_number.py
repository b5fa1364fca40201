"""The search for kissing configurations: its scores over proposals, and its section of the write-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from grpo.common.files import read_json, read_jsonl
from grpo.reporting.style import style
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


def draw_search(report: dict[str, Any], scores: pd.DataFrame) -> Figure:
    """The score of each attempt by its kind and the best so far; beside it the top, with what others have reached."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    everything, top = figure.subplots(1, 2)
    for axis in (everything, top):
        for place, (kind, of_kind) in enumerate(scores.groupby("kind", sort=True)):
            look = style(place)
            axis.scatter(
                of_kind["attempt"], of_kind["score"], s=16, color=look.color, marker=look.marker, label=str(kind), alpha=0.8
            )
        axis.step(scores["attempt"], scores["best"], where="post", color="black", linewidth=1.5, label="best so far")
        axis.set_xlabel("attempt")
        axis.grid(alpha=0.3)
    known = {bound["points"]: bound for bound in known_bounds()["lower"]}
    for points in DRAWN_BOUNDS:
        top.axhline(points, color="grey", linewidth=0.8, linestyle="--")
        words = f"{points}: {known[points]['who']}, {known[points]['year']}"
        top.annotate(words, (0.01, points), xycoords=("axes fraction", "data"), fontsize=7, va="bottom", color="dimgrey")
    top.set_ylim(*TOP)
    top.set_title(f"from {TOP[0]} points on, with known bounds", fontsize=10)
    everything.set_ylabel("points of a valid set (0: none)")
    everything.legend(fontsize=8, loc="lower right")
    everything.set_title(f"kissing_number: {report['strategy']}, seed {report['seed']}", fontsize=10)
    return figure


def section(report: dict[str, Any]) -> str:
    """Method, course, result and what failed, in Markdown, from the stage's report; for a page in a folder of reports/."""
    environment = Environment(
        loader=PackageLoader("grpo.reporting"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    bounds = known_bounds()
    passed = [bound for bound in bounds["lower"] if bound["points"] <= report["best_of_search"]]
    return environment.get_template("kissing_number.md.j2").render(
        report=report,
        bounds=bounds,
        passed=passed[-1] if passed else None,
        record=max(bound["points"] for bound in bounds["lower"]),
        record_in_integers=max(bound["points"] for bound in bounds["lower"] if bound["integers"]),
    )
