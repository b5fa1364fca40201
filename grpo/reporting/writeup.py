"""The report in Markdown: the summary reports/writeup.md, and a file for each section."""

from __future__ import annotations

from collections.abc import Mapping

from grpo.common.files import whole_folder, write_text
from grpo.reporting import answer
from grpo.reporting.answer import Found
from grpo.reporting.discussion import Numbers
from grpo.reporting.provenance import stages_in_lock
from grpo.reporting.sections import markdown_sections, verdicts_of
from grpo.reporting.sentences import templates
from grpo.study import paths
from grpo.study.schema import Study


def write_writeup(study: Study, found: Found, numbers: Mapping[str, Numbers], by_dvc: bool = True) -> None:
    """Write reports/writeup.md and reports/sections/*.md.

    Args:
        numbers: experiment -> :func:`grpo.reporting.discussion.numbers_of`.
        by_dvc: whether DVC's stages made the results, so that dvc.lock has their hashes.
    """
    with whole_folder(paths.SECTIONS) as folder:
        for name, text in markdown_sections(study, found, numbers, stages_in_lock() if by_dvc else {}).items():
            write_text(folder / f"{name}.md", text)
    text = (
        templates()
        .get_template("writeup.md.j2")
        .render(
            study=study,
            numbers=numbers,
            answer=answer.sentences(study, found, numbers, verdicts_of(study)),
            best=answer.best(study, numbers),
            cost=answer.cost(study, found),
            command=answer.command(study, by_dvc),
            forest=(paths.FIGURES / "forest.svg").exists(),
            answers=paths.ANSWERS.is_file(),
            left_out={name: study.title(name) for name in study.left_out},
        )
    )
    write_text(paths.WRITEUP, text)
