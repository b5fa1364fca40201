"""The kissing number as the handout wants it delivered: program.py, conversation_log.json, report.md and the prompts."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import Any

from grpo.common.files import whole_folder, write_json, write_text
from grpo.discovery.log import BEST_PROGRAM, LOG, Attempt, read_log, to_json
from grpo.discovery.strategies import STRATEGIES, WITHOUT_BOUNDS
from grpo.reporting.kissing_number import STAGE, read_report, section
from grpo.reporting.sentences import templates
from grpo.study import paths
from grpo.study.schema import Study

PROGRAMS = "Where an attempt has a recipe, grpo.discovery.mutation.program_of(recipe) is its program, to the letter."
EXAMPLES = 2  # prompts of a search with a language model that are shown


def write_delivery(study: Study) -> None:
    """Write reports/kissing_number/; empty where the study has no search, as DVC wants a stage's outputs to be there.

    The log leaves out the programs of recipes, each of which holds the whole text of the constructions;
    :func:`grpo.discovery.mutation.program_of` makes them of the recipes to the letter.

    Raises:
        UserError: a result file is missing or damaged.
    """
    with whole_folder(paths.KISSING_NUMBER_DELIVERY) as folder:
        if study.kissing_number is None:
            return
        report = read_report()
        settings, attempts = read_log(paths.CONVERSATION_LOG, STAGE)
        shutil.copy(paths.KISSING_NUMBER / BEST_PROGRAM, folder / BEST_PROGRAM)
        log = to_json(settings, attempts)
        log["programs"] = PROGRAMS if any(attempt.proposal.recipe is not None for attempt in attempts) else ""
        log["attempts"] = [_without_program(attempt) for attempt in attempts]
        write_json(folder / LOG, log)
        shown = prompts_of(attempts)
        for name, text in shown.items():
            write_text(folder / "prompts" / f"{name}.md", text)
        write_text(folder / "report.md", report_page(report, shown))


def _without_program(attempt: Attempt) -> dict[str, Any]:
    entry = asdict(attempt)
    if attempt.proposal.recipe is not None:
        entry["proposal"]["program"] = None
    return entry


def prompts_of(attempts: list[Attempt]) -> dict[str, str]:
    """The first prompt of both arms, with and without the known bounds; and of a search that asked a model, others it sent."""
    first = {"problem": STRATEGIES["simple"], "problem_without_bounds": STRATEGIES[f"simple{WITHOUT_BOUNDS}"]}
    found = {name: strategy([], 0)[1][-1]["content"] for name, strategy in first.items()}
    sent = dict.fromkeys(one.proposal.messages[-1]["content"] for one in attempts if one.proposal.messages)
    later = [text for text in sent if text not in found.values()][-EXAMPLES:]
    return found | {f"sent_{number}": text for number, text in enumerate(later, start=1)}


def report_page(report: dict[str, Any], prompts: dict[str, str]) -> str:
    """report.md: method, course, result, prompts and reflection."""
    return (
        templates()
        .get_template("kissing_report.md.j2")
        .render(
            report=report,
            section=section(report),
            prompts=prompts,
            without_bounds=report["strategy"].endswith(WITHOUT_BOUNDS),
        )
    )
