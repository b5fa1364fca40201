"""The figure of all contrasts: each difference that was measured, its interval, and what others published."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from grpo.reporting.charts import Row, Spec, on_paper

VERDICTS = {"agrees": "#009E73", "disagrees": "#D55E00", "cannot tell": "#7a7a7a", "not tested here": "#bbbbbb"}


def forest_rows(claims: list[dict[str, Any]]) -> list[Row]:
    """Each difference that a published claim was judged by, as a row of :func:`forest`."""
    return [
        {
            **{key: claim[key] for key in ("statement", "experiment", "verdict")},
            "between": f"{contrast['arm']} above {contrast['against']}",
            **{key: contrast["difference"][key] for key in ("value", "low", "high")},
            "published": list(claim["published"].values()),
            "reported": claim["reported"] if place == 0 else {},
        }
        for claim in claims
        for place, contrast in enumerate(claim["contrasts"])
    ]


def forest(rows: list[Row]) -> Spec:
    """Differences of answer rewards with their intervals, and what was published.

    Args:
        rows: as :func:`forest_rows` gives them.
    """
    shown, published, names = [], [], []
    for place, row in enumerate(rows):
        said = place > 0 and rows[place - 1]["statement"] == row["statement"]  # once for all its differences
        lines = [*([] if said else textwrap.wrap(row["statement"], 62)), *textwrap.wrap(f"({row['between']})", 70)]
        names.append(lines)
        shown.append(
            {"place": place, "between": row["between"], **{key: row[key] for key in ("value", "low", "high", "verdict")}}
        )
        published += [{"place": place, "value": value} for value in row["published"]]
    axis = {
        "labelExpr": f"{json.dumps(names)}[datum.value]",
        "labelLimit": 420,
        "title": None,
        "grid": False,
        "labelFontSize": 11,
    }
    y = {"field": "place", "type": "ordinal", "axis": axis}
    colour = {"field": "verdict", "scale": {"domain": list(VERDICTS), "range": list(VERDICTS.values())}}
    colour |= {"legend": {"title": None, "orient": "top"}}
    x = {"type": "quantitative", "title": "difference of answer rewards, 95% interval; diamond: published"}
    spec = {
        "description": "Differences of answer rewards with 95% intervals, and published ones",
        "datasets": {"ours": shown, "published": published},
        "data": {"name": "ours"},
        "layer": [
            {"data": {"values": [{}]}, "mark": {"type": "rule", "color": "#888"}, "encoding": {"x": {"datum": 0}}},
            {
                "mark": {"type": "rule", "strokeWidth": 3},
                "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": colour},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                "encoding": {"x": {**x, "field": "value"}, "y": y, "color": colour},
            },
            {
                "data": {"name": "published"},
                "mark": {"type": "point", "shape": "diamond", "size": 90, "color": "#444"},
                "encoding": {"x": {**x, "field": "value"}, "y": y},
            },
        ],
    }
    return on_paper(spec, {"step": 14 * max(map(len, names)) + 6}) | {"width": 380}
