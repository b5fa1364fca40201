"""The report: the page for a browser, and its summary in Markdown with a file for each section."""

from __future__ import annotations

from typing import Any

from grpo.common.files import whole_folder, write_text
from grpo.reporting import answer
from grpo.reporting.answer import Found
from grpo.reporting.forest import forest_rows
from grpo.reporting.provenance import stages_in_lock
from grpo.reporting.record import read_all
from grpo.reporting.sections import markdown_sections, read_claims, said_of, templates
from grpo.results.statistics import format_interval
from grpo.study import paths
from grpo.study.schema import Study


def write_writeup(study: Study, by_dvc: bool = True) -> None:
    """Write reports/writeup.md, the summary, and reports/sections/*.md.

    Args:
        by_dvc: whether the results are those of DVC's stages, so that dvc.lock has their hashes.
    """
    found = read_all(study)
    said = {name: said_of(study, name, *of) for name, of in found.items()}
    texts = markdown_sections(study, found, stages_in_lock() if by_dvc else {}, by_dvc, said)
    with whole_folder(paths.SECTIONS) as folder:
        for name, text in texts.items():
            write_text(folder / f"{name}.md", text)
    environment = templates()
    environment.filters["interval"] = lambda value, ends: format_interval({**ends, "value": value})
    write_text(paths.WRITEUP, environment.get_template("writeup.md.j2").render(**_summary(study, found, by_dvc)))


def _summary(study: Study, found: Found, by_dvc: bool) -> dict[str, Any]:
    claims = read_claims(study)["claims"]
    return {
        "study": study,
        "answer": answer.sentences(study, found, claims),
        "best": answer.best(study, found),
        "cost": answer.cost(study, found),
        "command": answer.command(study, by_dvc),
        "forest": bool(forest_rows(claims)),
        "sections": [
            {"name": name, "title": study.title(name), "selection": selection} for name, (_, selection) in found.items()
        ],
        "best_of_n": bool(study.evaluation.best_of_n.prompts),
        "kissing_number": study.kissing_number is not None,
        "answers": paths.ANSWERS.is_file(),
        "left_out": {name: study.title(name) for name in study.left_out},
    }
