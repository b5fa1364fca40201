"""The report: the page reports/index.html, which embeds its figures, data and script, and its summary in Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from grpo.common.files import read_text, whole_folder, write_text
from grpo.reporting import answer
from grpo.reporting.charts import INK, WIDTH, readable
from grpo.reporting.provenance import provenance_of
from grpo.reporting.record import Record, Values
from grpo.reporting.rollouts import browsable, gained_and_lost, number
from grpo.reporting.sections import markdown_sections, paragraphs_of
from grpo.reporting.sentences import render, templates
from grpo.results.runs import Run
from grpo.study import paths

TEMPLATES = Path(__file__).with_name("templates")
POINTS = 72  # of an inch
TITLES = {
    "answers": "The handouts' questions, answered",
    "base_model": "The base model",
    "kissing_number": "Kissing numbers in dimension 11",
    "claims": "What others reported, with a verdict for each claim",
    "method": "Method, data, software, hardware; every run",
}
FILES = ("config.yaml", "metrics.json", "history.csv", "validation.csv", "outcomes.jsonl", "rollouts.jsonl")  # of each run


def write_writeup(record: Record) -> None:
    """Write reports/writeup.md and reports/sections/*.md."""
    with whole_folder(paths.SECTIONS) as folder:
        for name, text in markdown_sections(record).items():
            write_text(folder / f"{name}.md", text)
    write_text(paths.WRITEUP, render("writeup.md.j2", **_summary(record)))


def write_page(record: Record) -> None:
    """Write reports/index.html, which needs no network."""
    page = templates(autoescape=True).get_template("page.html")
    write_text(paths.PAGE, page.render(_summary(record) | _of_page(record)))


def _summary(record: Record) -> Values:
    return {
        "study": record.study,
        "numbers": record.numbers,
        "answer": answer.sentences(record),
        "best": answer.best(record),
        "cost": answer.cost(record),
        "command": answer.command(record.study, bool(record.lock)),
        "forest": (paths.FIGURES / "forest.svg").exists(),
    }


def _of_page(record: Record) -> Values:
    """The values of the page beside those of the summary."""
    figures = {
        f"{path.parent.name}/{path.stem}": inlined(path)
        for folder in (paths.FIGURES, paths.TIMING_REPORT)
        for path in sorted(folder.glob("*.svg"))
    }
    # An experiment's figure, and that over wall-clock time if there is one, stand above what is folded.
    own = {name: [f"{folder}/{name}" for folder in ("figures", "timing")] for name in record.runs}
    shown = {name: [path for path in of if path in figures] for name, of in own.items()}
    above = {name for of in shown.values() for name in of}
    below = {name: figure for name, figure in figures.items() if name not in above}
    texts = {"answers": read_text(paths.ANSWERS, made_by="report")} | markdown_sections(record, folded=True)
    details = {name: to_html(text, below) for name, text in texts.items()}
    compared = [n for n in record.numbers.values() if len(n["arms"]) > 1]
    best_first = sorted(record.all_runs, key=lambda run: run.arm != record.results[run.experiment].winner)
    samples = browsable([run.name for run in best_first])
    data = {
        "runs": {run.name: _run(run, record.lock) for run in record.all_runs},
        "files": [(paths.RUNS / "RUN" / name).as_posix() for name in FILES],
        "samples": samples,
        "experiments": [
            {"name": n["experiment"], "title": n["title"], "winner": n["winner"]["arm"]}
            | {"arms": [{"arm": arm["arm"], "title": readable(arm["arm"]), "runs": arm["runs"]} for arm in n["arms"]]}
            for n in record.numbers.values()
        ],
        "best": answer.best(record)["numbers"]["experiment"],
    }
    return {
        "results": record.results,
        "followers": {
            before: [name for name in record.runs if record.study.experiments[name].builds_on == before]
            for before in (None, *record.runs)
        },
        "counted": sorted({arm["arm"] for n in record.numbers.values() for arm in n["arms"] if re.search(r"_\d", arm["arm"])}),
        "compared": len(compared),
        "decided": sum(not n["tied"] and not n["leader"]["collapses"] for n in compared),
        "verdicts": record.counted,
        "leads": {name: paragraphs_of(record, name)[0] for name in record.runs},
        "gained_and_lost": gained_and_lost,
        "figures": figures,
        "shown": shown,
        "details": details,
        "titles": {name: title for name, title in TITLES.items() if name in details},
        "left_out_samples": samples["left_out"],
        "css": (TEMPLATES / "page.css").read_text(encoding="utf-8"),
        "script": (TEMPLATES / "page.js").read_text(encoding="utf-8"),
        "data": embedded(data),
    }


def _run(run: Run, lock: Values) -> Values:
    """The data of a run's page: its provenance, its configuration with sources, and its final numbers."""
    origin = provenance_of(run, lock)
    return {
        **origin,
        "same_as": run.config["same_as"] or "",
        "seconds": number(origin["seconds"]),
        "phases": {name: number(seconds) for name, seconds in origin["phases"].items()},
        "config": [[key, each["value"], each["from"]] for key, each in run.config["config"].items()],
        "metrics": {key: number(v) if isinstance(v, int | float) else v for key, v in run.metrics.items()},
    }


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


def to_html(markdown: str, figures: Mapping[str, str]) -> str:
    """Convert Markdown to HTML for a section of the page, without its first heading and without pictures but figures.

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

    html = re.sub(r'<p><img src="(?:\.\./)*([^"]+)\.svg" alt="([^"]*)"[^>]*></p>', place, html)
    return re.sub(r"<img [^>]*>", "", html)
