"""The report reports/index.html: one file that embeds its figures, data and script."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from grpo.common.files import read_text, write_text
from grpo.reporting import answer
from grpo.reporting.answer import Found
from grpo.reporting.charts import INK, WIDTH
from grpo.reporting.discussion import Numbers
from grpo.reporting.provenance import stages_in_lock
from grpo.reporting.record import Record, collect
from grpo.reporting.sections import markdown_sections
from grpo.reporting.sentences import templates
from grpo.reporting.style import readable, style, with_readable_names
from grpo.study import paths
from grpo.study.schema import Study

TEMPLATES = Path(__file__).with_name("templates")
POINTS = 72  # of an inch
TITLES = {
    "answers": "The handouts' questions, answered",
    "base_model": "The base model",
    "kissing_number": "Kissing numbers in dimension 11",
    "claims": "What others reported, with a verdict for each claim",
    "method": "Method, data, software, hardware; every run",
}
TO_BROWSE = ("runs", "alike", "files", "samples")  # the record's entries that the page's script reads


def write_page(study: Study, found: Found, numbers: Mapping[str, Numbers], by_dvc: bool = True) -> None:
    """Write reports/index.html, which needs no network.

    Args:
        numbers: experiment -> :func:`grpo.reporting.discussion.numbers_of`.
        by_dvc: whether DVC's stages made the results, so that dvc.lock has their hashes.
    """
    lock = stages_in_lock() if by_dvc else {}
    record = collect(study, found, numbers, lock)
    drawn = [path for folder in (paths.FIGURES, paths.TIMING_REPORT) for path in sorted(folder.glob("*.svg"))]
    figures = {f"{path.parent.name}/{path.stem}": path for path in drawn}
    shown = {name: _main_figures(name, figures) for name in numbers}
    texts = markdown_sections(study, found, numbers, lock, folded=True)
    if paths.ANSWERS.is_file():
        texts = {"answers": read_text(paths.ANSWERS, made_by="report")} | texts
    above = {name for of in shown.values() for name in of}
    inline = {name: inlined(path) for name, path in figures.items() if name not in above}
    details = {name: to_html(text, inline) for name, text in texts.items()}
    environment = templates(autoescape=True)
    environment.filters |= {"readable": readable, "swatch": lambda place: style(place).color, "named": with_readable_names}
    page = environment.get_template("page.html").render(
        record=record,
        numbers=numbers,
        counted=sorted({arm["arm"] for of in numbers.values() for arm in of["arms"] if re.search(r"_\d", arm["arm"])}),
        overview=inline["figures/overview"],
        forest=inline.get("figures/forest", ""),
        shown={name: [inlined(figures[path]) for path in of] for name, of in shown.items()},
        more={name: [inline[f"figures/{name}-{kind}"] for kind in ("ends", "metrics")] for name in numbers},
        chains=chains(record["experiments"]),
        details=details,
        titles={name: title for name, title in TITLES.items() if name in details},
        command=answer.command(study, by_dvc),
        left_out=[study.title(name) for name in study.left_out],
        css=_asset("page.css"),
        script=_asset("page.js"),
        data=embedded({key: record[key] for key in TO_BROWSE} | {"experiments": _to_choose(record), "best": record["best"]}),
    )
    write_text(paths.PAGE, page)


def _main_figures(experiment: str, figures: Mapping[str, Path]) -> list[str]:
    """An experiment's figure, and that over wall-clock time if there is one."""
    own = (f"{folder.name}/{experiment}" for folder in (paths.FIGURES, paths.TIMING_REPORT))
    return [name for name in own if name in figures]


def _to_choose(record: Record) -> list[Record]:
    """The experiments and arms for the choice of rollouts."""
    return [
        {key: e[key] for key in ("name", "title", "winner")}
        | {"arms": [{"arm": arm["arm"], "title": readable(arm["arm"]), "runs": arm["runs"]} for arm in e["arms"]]}
        for e in record["experiments"]
    ]


def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that is safe in a script element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def inlined(path: Path) -> str:
    """A figure for the page: as wide as its column, with axes in the page's text colour."""
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    count = max(1, round(float(re.findall(r' width="([\d.]+)pt"', svg)[0]) / POINTS / WIDTH))
    svg = re.sub(r'<svg [^>]*viewBox="([^"]+)"[^>]*>', r'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="\1">', svg)
    return f'<div class="figure" style="--panels:{count}" tabindex="0" role="img">{svg}</div>'


def chains(experiments: list[Record]) -> list[list[Record]]:
    """Arrange the experiments by what they build on.

    Returns:
        a chain for each experiment that builds on none. Each entry of a chain has ``experiment`` and ``branches``: chains, if
        several experiments build on it.
    """
    after: dict[str, list[Record]] = {}
    for experiment in experiments:
        after.setdefault(experiment["builds_on"][0] if experiment["builds_on"] else "", []).append(experiment)

    def chain(first: Record) -> list[Record]:
        following = after.get(first["name"], [])
        if len(following) == 1:
            return [{"experiment": first, "branches": []}, *chain(following[0])]
        return [{"experiment": first, "branches": [chain(each) for each in following]}]

    return [chain(first) for first in after.get("", [])]


def to_html(markdown: str, figures: Mapping[str, str]) -> str:
    """Convert Markdown to HTML for a section of the page, without its first heading.

    Args:
        figures: SVG by path below reports/, without the ending. A figure that is missing here is left out of the text.
    """
    html: str = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    html = re.sub(r"^<h1>.*?</h1>\n", "", html).replace("&lt;br&gt;", "<br>")
    html = re.sub(r"<(/?)h2>", r"<\1h4>", html)
    html = re.sub(
        r"<table>.*?</table>", r'<div class="wide" tabindex="0" role="region" aria-label="table">\g<0></div>', html, flags=re.S
    )

    def place(picture: re.Match[str]) -> str:
        path, alt = picture.groups()
        return figures.get(path, "").replace('role="img"', f'role="img" aria-label="{alt}"', 1)

    return re.sub(r'<p><img src="(?:\.\./)*([^"]+)\.svg" alt="([^"]*)"[^>]*></p>', place, html)
