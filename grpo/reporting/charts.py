"""Charts as Vega-Lite specifications: the page draws them in the browser, and :func:`save_svg` for paper. One question each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo.common.files import write_text
from grpo.reporting.style import Style

Spec = dict[str, Any]
Row = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
VEGA_LITE = "6.4"  # the version that the specifications are written for
LABEL_GAP = 0.055  # of the height of a chart, so that the names of two curves can be read
FONT = "system-ui, sans-serif"
CONFIG: Spec = {
    "view": {"stroke": None},
    "font": FONT,
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "gridOpacity": 0.35, "domain": False},
    "text": {"font": FONT, "fontSize": 12},
    "title": {"fontSize": 13, "fontWeight": "normal", "subtitleFontSize": 11, "anchor": "start", "frame": "group"},
}
GREY = "#7a7a7a"  # reads on light and on dark ground
WIDTH, HEIGHT = 560, 300  # pixels of a figure on paper, without its axes
PHONE = 52  # letters of a line that can be read on a telephone
LETTER = 7  # pixels of a letter in a name beside a curve, at most


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
    x: Spec = {"field": "x", "type": "quantitative", "title": "", "scale": {"nice": False}}
    x["axis"] = {"grid": False, "tickMinStep": 1, "tickCount": {"expr": "ceil(width / 80)"}, "labelOverlap": True}
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
                "mark": {"type": "text", "align": "left", "dx": 9, "baseline": "middle", "lineBreak": "\n"},
                "encoding": {"y": y, "text": {"field": "arm"}, "detail": {"field": "arm", "type": "nominal"}},
            },
        ],
        "config": CONFIG,
    }


def filled_curve(
    points: list[Row], looks: Mapping[str, Style], x_title: str, y_title: str, share: bool, log: bool = False
) -> Spec:
    """The curves with their data, for paper.

    Args:
        points: as :func:`curve` says.
        looks: of the arms, in the order of params.yaml.
        share: the values lie between 0 and 1.
        log: the axis counts in powers of two.
    """
    longest = max(len(line) for arm in looks for line in arm.split("\n"))
    spec = on_paper(curve(f"{y_title} over {x_title}: {', '.join(looks)}"), room=LETTER * longest + 90)
    spec["datasets"] = {"points": points, "labels": end_labels(points, share)}
    spec["encoding"]["x"]["title"] = x_title
    if log:
        spec["encoding"]["x"] |= powers_of_two(point["x"] for point in points)
    spec["encoding"]["color"]["scale"] = {"domain": list(looks), "range": [look.color for look in looks.values()]}
    spec["layer"][1]["encoding"]["strokeDash"]["scale"] = {
        "domain": list(looks),
        "range": [list(look.dashes) for look in looks.values()],
    }
    for layer in spec["layer"]:
        layer["encoding"]["y"] |= {"title": y_title, "scale": {"domain": [0, 1]} if share else {"zero": False}}
    if not any(point["ended"] for point in points):
        del spec["layer"][3]  # Vega complains of a layer without data
    return spec


def on_paper(spec: Spec, height: int | Spec = HEIGHT, room: int = 90) -> Spec:
    """A specification with the size, ground and letters of a figure.

    Args:
        room: pixels beside its plot, for axis and names; the page gives the plot what its column leaves.
    """
    frame = {"width": WIDTH, "height": height, "background": "white", "padding": 12, "config": CONFIG}
    return {"$schema": SCHEMA, **spec, **frame, "usermeta": {"room": room}}


def powers_of_two(values: Iterable[float], padding: int = 0) -> Spec:
    """A logarithmic axis that is marked at these values alone, with so many pixels beside them."""
    axis = {"values": sorted(set(values)), "grid": False, "format": "~d"}
    return {"scale": {"type": "log", "base": 2, "nice": False, "padding": padding}, "axis": axis}


def below_one_another(specs: Mapping[str, Spec]) -> Spec:
    """Figures of one width, each with its title; so they can be read in a narrow column too."""
    panels = []
    for title, spec in specs.items():
        kept: Spec = {key: spec[key] for key in ("width", "height", "data", "encoding", "layer") if key in spec}
        data = spec.get("datasets", {})
        kept["layer"] = [
            {**layer, "data": {"values": data[layer["data"]["name"]]}} if "name" in layer.get("data", {}) else layer
            for layer in kept["layer"]
        ]
        if "name" in kept["data"]:
            kept["data"] = {"values": data[kept["data"]["name"]]}
        panels.append({"title": textwrap.wrap(title, PHONE), **kept})
    first = next(iter(specs.values()))
    shared = {key: first[key] for key in ("$schema", "background", "padding", "config")}
    room = max(spec["usermeta"]["room"] for spec in specs.values())
    return {**shared, "description": "; ".join(specs), "vconcat": panels, "usermeta": {"room": room}}


def dots(rows: list[Row], looks: Mapping[str, Style], x: Spec, y: Spec, height: int = HEIGHT) -> Spec:
    """Arms as points with their intervals, those of one series joined.

    Args:
        rows: ``arm``, ``series``, ``x``, ``y``, ``low`` and ``high``, in the order in which they are joined.
        x, y: titles and scales.
    """
    x, y = {"type": "quantitative", **x}, {"type": "quantitative", **y}
    colour: Spec = {"field": "arm", "type": "nominal", "legend": None}
    colour["scale"] = {"domain": list(looks), "range": [look.color for look in looks.values()]}
    series = list(dict.fromkeys(row["series"] for row in rows))
    shape: Spec = {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": series, "range": ["circle", "square"][: len(series)]},
    }
    key = {"title": None, "orient": "top", "columns": 1, "labelLimit": 300, "symbolFillColor": GREY}
    shape["legend"] = key if len(series) > 1 else None
    at_x, at_y = {**x, "field": "x"}, {**y, "field": "y"}
    tooltip = [
        {"field": "arm"},
        *({"field": key, "type": "quantitative", "format": ".4~g"} for key in ("x", "y", "low", "high")),
    ]
    spec = {
        "description": f"{y['title']} over {x['title']}",
        "data": {"values": rows},
        "encoding": {"x": at_x},
        "layer": [
            {
                "mark": {"type": "line", "color": GREY, "strokeWidth": 1.2},
                "encoding": {"y": at_y, "detail": {"field": "series"}, "order": {"field": "x", "type": "quantitative"}},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
                "encoding": {"y": at_y, "color": colour, "shape": shape, "tooltip": tooltip},
            },
            {
                "mark": {"type": "text", "dy": -9, "baseline": "bottom"},
                "encoding": {"y": {**y, "field": "high"}, "color": colour, "text": {"field": "arm"}},
            },
        ],
    }
    return on_paper(spec, height)


def bars(rows: list[Row], kinds: Mapping[str, str], x_title: str, row_height: int = 34) -> Spec:
    """Bars laid end to end, a line each.

    Args:
        rows: ``name`` (of the line), ``kind``, ``start`` and ``end``, and ``text`` at ``at``.
        kinds: what the parts are, with their colours.
    """
    names = list(dict.fromkeys(row["name"] for row in rows))
    y = {
        "field": "name",
        "type": "nominal",
        "sort": names,
        "title": None,
        "axis": {"labelLimit": 240, "domain": False, "ticks": False},
    }
    shown = {kind: colour for kind, colour in kinds.items() if any(row["kind"] == kind for row in rows)}
    colour: Spec = {
        "field": "kind",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": list(shown), "range": list(shown.values())},
    }
    colour["legend"] = {"title": None, "orient": "top", "columns": 2, "labelLimit": 260}
    x = {"type": "quantitative", "title": x_title}
    tooltip = [{"field": "name"}, {"field": "kind"}, {"field": "size", "type": "quantitative", "format": ".4~g"}]
    spec: Spec = {
        "description": f"{x_title}: {', '.join(shown)}",
        "data": {"values": [row | {"size": row["end"] - row["start"]} for row in rows]},
        "encoding": {"y": y},
        "layer": [
            {
                "mark": {"type": "bar", "height": {"band": 0.8}},
                "encoding": {"x": {**x, "field": "start"}, "x2": {"field": "end"}, "color": colour, "tooltip": tooltip},
            },
        ],
    }
    if any("text" in row for row in rows):
        text = {"mark": {"type": "text", "align": "left", "dx": 4, "color": "#000"}}
        spec["layer"].append({**text, "encoding": {"x": {**x, "field": "at"}, "text": {"field": "text"}}})
    return on_paper(spec, {"step": row_height}, room=LETTER * max(map(len, names)) + 60)


def end_labels(points: list[Row], share: bool) -> list[Row]:
    """The names of arms at the ends of their curves, moved apart where they would overlap."""
    last = {row["arm"]: row for row in points if row["y"] is not None}
    ordered = sorted(last.values(), key=lambda row: row["y"])
    heights = [row[key] for row in points for key in ("low", "high") if row[key] is not None]
    bottom, top = (0.0, 1.0) if share or not heights else (min(heights), max(heights))
    lines = max((row["arm"].count("\n") + 1 for row in ordered), default=1)
    gap, right = LABEL_GAP * lines * (top - bottom), max((row["x"] for row in points), default=0)
    placed: list[Row] = []
    for row in ordered:
        at = max(row["y"], placed[-1]["y"] + gap) if placed else row["y"]
        placed.append({"arm": row["arm"], "x": right, "y": at})
    limit = top
    for label in reversed(placed):
        label["y"], limit = min(label["y"], limit), min(label["y"], limit) - gap
    return placed


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


def save_figure(spec: Spec, path: Path) -> None:
    """Draw a specification into an SVG, or a PNG by the file's ending; no network, no browser."""
    import vl_convert

    if path.suffix == ".png":
        path.write_bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=1.5))
    else:
        # The reader's letters may be an eighth wider than those that are measured here, and labels are up to 240 pixels long.
        roomy = {**spec, "padding": {"left": 32, "right": 32, "top": 12, "bottom": 12}}
        write_text(path, vl_convert.vegalite_to_svg(roomy, vl_version=VEGA_LITE))


def browser_bundle() -> str:
    """The JavaScript of Vega, Vega-Lite and Vega-Embed, which defines ``vegaEmbed``."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle(vl_version=VEGA_LITE)  # type: ignore[call-arg]  # the stub knows no default
    return bundle
