"""Charts as Vega-Lite specifications: the page draws them in the browser, and :func:`save_svg` for paper. One question each."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from grpo.common.files import write_text
from grpo.reporting.style import dashes, style

Spec = dict[str, Any]
Row = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
VEGA_LITE = "6.4"  # the version that the specifications are written for
LABEL_GAP = 0.055  # of the height of a chart, so that the names of two curves can be read
VERDICTS = {"agrees": "#009E73", "disagrees": "#D55E00", "cannot tell": "#7a7a7a", "not measured": "#bbbbbb"}
FONT = "system-ui, sans-serif"
CONFIG: Spec = {
    "view": {"stroke": None},
    "font": FONT,
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "gridOpacity": 0.35, "domain": False},
    "text": {"font": FONT, "fontSize": 12},
}


def curve(description: str = "") -> Spec:
    """Curves of an experiment's arms, without data.

    Its datasets are ``points`` (``arm``, ``series``, ``x``, ``y``, ``low``, ``high``, ``ended``), where a series is an arm's
    mean or one of its runs, and ``labels`` (``arm``, ``x``, ``y``), the names at the curves' ends.
    """
    number = {"type": "quantitative", "format": ".6~g"}
    tooltip = [
        {"field": "series", "title": "arm"},
        {"field": "x", "title": "x", **number},
        {"field": "y", "title": "value", **number},
        {"field": "low", "title": "smallest of the seeds", **number},
        {"field": "high", "title": "largest of the seeds", **number},
    ]
    colour: Spec = {"field": "arm", "type": "nominal", "scale": {"domain": [], "range": []}, "legend": None}
    dash: Spec = {"field": "arm", "type": "nominal", "scale": {"domain": [], "range": []}, "legend": None}
    x = {"field": "x", "type": "quantitative", "title": "", "axis": {"grid": False, "tickMinStep": 1}}
    y = {"field": "y", "type": "quantitative", "title": ""}
    series = {"field": "series", "type": "nominal"}
    return {
        "$schema": SCHEMA,
        "description": description,
        "datasets": {"points": [], "labels": []},
        "data": {"name": "points"},
        "encoding": {"x": x, "color": colour, "detail": series},
        "layer": [
            {"mark": {"type": "area", "opacity": 0.14}, "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}}},
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"y": y, "strokeDash": dash}},
            {"mark": {"type": "point", "filled": True, "size": 36, "opacity": 1}, "encoding": {"y": y, "tooltip": tooltip}},
            {
                "transform": [{"filter": "datum.ended"}],
                "mark": {"type": "point", "shape": "cross", "angle": 45, "filled": True, "size": 190, "opacity": 1},
                "encoding": {"y": y, "tooltip": tooltip},
            },
            {
                "data": {"name": "labels"},
                "mark": {"type": "text", "align": "left", "dx": 9, "baseline": "middle"},
                "encoding": {"y": y, "text": {"field": "arm"}, "detail": {"field": "arm", "type": "nominal"}},
            },
        ],
        "config": CONFIG,
    }


def filled_curve(points: list[Row], arms: list[str], x_title: str, y_title: str, share: bool) -> Spec:
    """The curves with their data, for paper.

    Args:
        points: as :func:`curve` says.
        arms: in the order of params.yaml, which decides their looks.
        share: the values lie between 0 and 1.
    """
    spec = curve(f"{y_title} over {x_title}: {', '.join(arms)}")
    spec |= {"width": 560, "height": 300, "background": "white", "padding": 12}
    spec["datasets"] = {"points": points, "labels": end_labels(points, share)}
    looks = [style(place) for place in range(len(arms))]
    spec["encoding"]["x"]["title"] = x_title
    spec["encoding"]["color"]["scale"] = {"domain": arms, "range": [look.color for look in looks]}
    spec["layer"][1]["encoding"]["strokeDash"]["scale"] = {"domain": arms, "range": [dashes(look) for look in looks]}
    for layer in spec["layer"]:
        layer["encoding"]["y"] |= {"title": y_title, "scale": {"domain": [0, 1]} if share else {"zero": False}}
    return spec


def end_labels(points: list[Row], share: bool) -> list[Row]:
    """The names of arms at the ends of their curves, moved apart where they would overlap."""
    last = {row["arm"]: row for row in points if row["y"] is not None}
    ordered = sorted(last.values(), key=lambda row: row["y"])
    heights = [row[key] for row in points for key in ("low", "high") if row[key] is not None]
    bottom, top = (0.0, 1.0) if share or not heights else (min(heights), max(heights))
    gap, right = LABEL_GAP * (top - bottom), max((row["x"] for row in points), default=0)
    placed: list[Row] = []
    for row in ordered:
        at = max(row["y"], placed[-1]["y"] + gap) if placed else row["y"]
        placed.append({"arm": row["arm"], "x": right, "y": at})
    limit = top
    for label in reversed(placed):
        label["y"], limit = min(label["y"], limit), min(label["y"], limit) - gap
    return placed


def forest_rows(claims: list[dict[str, Any]]) -> list[Row]:
    """Each difference that a published claim was judged by, as a row of :func:`forest`."""
    return [
        {
            **{key: claim[key] for key in ("statement", "experiment", "verdict")},
            "between": between,
            **{key: difference[key] for key in ("value", "low", "high")},
            "published": list(claim["published"].values()),
            "reported": claim["reported"] if place == 0 else {},
        }
        for claim in claims
        for place, (between, difference) in enumerate(claim["differences"].items())
    ]


def forest(rows: list[Row]) -> Spec:
    """Differences of answer rewards with their intervals, and what was published.

    Args:
        rows: ``statement``, ``between``, ``value``, ``low``, ``high``, ``verdict``, ``published`` (a list of numbers).
    """
    shown, published = [], []
    for row in rows:
        name = "\n".join([*textwrap.wrap(row["statement"], 52), *textwrap.wrap(f"({row['between']})", 60)])
        shown.append({"name": name, **{key: row[key] for key in ("value", "low", "high", "verdict")}})
        published += [{"name": name, "value": value} for value in row["published"]]
    order = [row["name"] for row in shown]
    axis = {"labelExpr": "split(datum.label, '\\n')", "labelLimit": 420, "title": None, "grid": False, "labelFontSize": 11}
    y = {"field": "name", "type": "nominal", "sort": order, "axis": axis}
    colour = {"field": "verdict", "scale": {"domain": list(VERDICTS), "range": list(VERDICTS.values())}}
    colour |= {"legend": {"title": None, "orient": "top"}}
    x = {"type": "quantitative", "title": "difference of answer rewards, 95% interval; diamond: published"}
    return {
        "$schema": SCHEMA,
        "description": "Differences of answer rewards with 95% intervals, and published ones",
        "width": 380,
        "height": {"step": 46},
        "background": "white",
        "padding": 12,
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
        "config": CONFIG,
    }


def heat_map() -> Spec:
    """Problems by evaluations, without data: rows ``step``, ``place`` (of the problem), ``problem`` and ``reward``."""
    return {
        "$schema": SCHEMA,
        "description": "Answer reward of each problem at each evaluation",
        "height": 260,
        "datasets": {"cells": []},
        "data": {"name": "cells"},
        "mark": {"type": "rect"},
        "encoding": {
            "x": {
                "field": "place",
                "type": "ordinal",
                "title": "problems, the soonest solved first",
                "axis": {"labels": False, "ticks": False},
            },
            "y": {"field": "step", "type": "ordinal", "title": "step"},
            "color": {
                "field": "reward",
                "type": "quantitative",
                "scale": {"domain": [0, 1], "scheme": "viridis"},
                "legend": {"title": "answer reward", "orient": "top", "gradientLength": 120},
            },
            "tooltip": [{"field": "problem"}, {"field": "step"}, {"field": "reward", "format": ".3~f"}],
        },
        "config": CONFIG,
    }


def save_svg(spec: Spec, path: Path) -> None:
    """Draw a specification into an SVG file; no network, no browser."""
    import vl_convert

    write_text(path, vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE))


def browser_bundle() -> str:
    """The JavaScript of Vega, Vega-Lite and Vega-Embed, which defines ``vegaEmbed``."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle(vl_version=VEGA_LITE)  # type: ignore[call-arg]  # the stub knows no default
    return bundle
