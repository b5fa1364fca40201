"""reports/index.html: the report as one file, with its data and scripts inside."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from grpo.common.files import read_text, write_text
from grpo.reporting import answer
from grpo.reporting.answer import Found
from grpo.reporting.charts import Spec, browser_bundle, curve, heat_map
from grpo.reporting.discussion import Numbers
from grpo.reporting.figures import other_figures
from grpo.reporting.forest import forest_rows
from grpo.reporting.provenance import stages_in_lock
from grpo.reporting.record import Record, collect
from grpo.reporting.sections import markdown_sections
from grpo.reporting.sentences import templates
from grpo.reporting.timing import timing_figures
from grpo.results.claims import PUBLISHED
from grpo.results.statistics import format_interval
from grpo.study import paths
from grpo.study.schema import Study, read_yaml

TEMPLATES = Path(__file__).with_name("templates")
TITLES = {
    "answers": "The handouts' questions, answered",
    "base_model": "The base model",
    "kissing_number": "Kissing numbers in dimension 11",
    "claims": "What others reported, in full",
    "method": "How it was measured; data, software, hardware; every run",
}


def write_page(study: Study, found: Found, numbers: Mapping[str, Numbers], by_dvc: bool = True) -> None:
    """Write reports/index.html, which needs no network.

    Args:
        numbers: of each experiment.
        by_dvc: whether the results are those of DVC's stages, so that dvc.lock has their hashes.
    """
    lock, published = stages_in_lock() if by_dvc else {}, read_yaml(PUBLISHED)
    record = collect(study, found, numbers, lock)
    texts = markdown_sections(study, found, numbers, lock, folded=True)
    if paths.ANSWERS.is_file():
        texts = {"answers": read_text(paths.ANSWERS, made_by="report")} | texts
    figures = figures_by_path(study)
    html = {name: to_html(text, figures) for name, text in texts.items()}
    environment = templates(autoescape=True)
    environment.filters["interval"] = format_interval
    page = environment.get_template("page.html").render(
        record=record,
        rows=placed(forest_rows(record["claims"])),
        without_difference=[claim for claim in record["claims"] if not claim["contrasts"]],
        others=placed(contrasts(record)),
        sources={source: published["sources"][source] for claim in record["claims"] for source in claim["reported"]},
        notes=published["notes"],
        chains=chains(record["experiments"]),
        details=html,
        titles={name: title for name, title in TITLES.items() if name in html},
        command=answer.command(study, by_dvc),
        left_out=[study.title(name) for name in study.left_out],
        css=_asset("page.css"),
        script=_asset("page.js"),
        bundle=browser_bundle().replace("</script", "<\\/script"),
        data=embedded(record | {"curve": curve(), "heat": heat_map(), "figures": figures}),
    )
    write_text(paths.PAGE, page)


def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element, whatever text it holds."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def contrasts(record: Record) -> list[Record]:
    """Each arm below the leader of its experiment, as a row of the forest."""
    return [
        {
            "statement": experiment["title"],
            "experiment": experiment["name"],
            "between": f"{experiment['leader']} above {arm['arm']}",
            "verdict": "apart" if arm["behind"]["low"] > 0 else "cannot tell",
            **{key: arm["behind"][key] for key in ("value", "low", "high")},
            "published": [],
            "reported": {},
        }
        for experiment in record["experiments"]
        for arm in experiment["arms"]
        if arm["behind"] is not None
    ]


def placed(rows: list[Record]) -> list[Record]:
    """Rows of a forest with their places on one scale, in percent from its left end."""
    ends = [0.0, *(row[key] for row in rows for key in ("low", "high")), *(value for row in rows for value in row["published"])]
    low, high = min(ends), max(ends)
    margin = 0.03 * (high - low) or 1.0

    def at(value: float) -> float:
        return float(round(100 * (value - low + margin) / (high - low + 2 * margin), 2))

    return [
        {
            **row,
            "zero": at(0.0),
            "from": at(row["low"]),
            "width": round(at(row["high"]) - at(row["low"]), 2),
            "at": at(row["value"]),
            "published_at": [(value, at(value)) for value in row["published"]],
        }
        for row in rows
    ]


def chains(experiments: list[Record]) -> list[list[Record]]:
    """The experiments as they build on one another: a chain is a list, and branches hang on the entry where they part.

    Returns:
        a chain for each experiment that builds on none; each entry has ``experiment`` and ``branches``, chains again.
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


def figures_by_path(study: Study) -> dict[str, Spec]:
    """What the page draws beside the experiments' curves, by path below reports/, without the ending."""
    found = {f"{paths.FIGURES.name}/{name}": spec for name, spec in other_figures(study).items()}
    return found | {f"{paths.TIMING_REPORT.name}/{name}": spec for name, spec in timing_figures(study).items()}


def to_html(markdown: str, figures: Collection[str]) -> str:
    """Markdown below one heading of the page, its own first heading left out.

    Args:
        figures: those that the page draws itself. Any other is an experiment's own, whose curves stand above the text.
    """
    html: str = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    html = re.sub(r"^<h1>.*?</h1>\n", "", html).replace("&lt;br&gt;", "<br>")
    html = re.sub(r"<(/?)h2>", r"<\1h4>", html)
    html = re.sub(
        r"<table>.*?</table>", r'<div class="wide" tabindex="0" role="region" aria-label="table">\g<0></div>', html, flags=re.S
    )

    def place(picture: re.Match[str]) -> str:
        path, alt = picture.groups()
        return f'<div class="figure" data-figure="{path}" role="img" aria-label="{alt}"></div>' if path in figures else ""

    return re.sub(r'<p><img src="(?:\.\./)*([^"]+)\.svg" alt="([^"]*)"[^>]*></p>', place, html)
