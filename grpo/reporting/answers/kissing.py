"""The handout's deliverables on the kissing number: program.py, conversation_log.json, report.md and prompts."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from grpo.common.files import whole_folder, write_json, write_text
from grpo.discovery.log import BEST_PROGRAM, LOG, Attempt, read_log, to_json
from grpo.discovery.strategies import BASELINE
from grpo.reporting.kissing_number import STAGE, read_report, section
from grpo.reporting.sentences import render
from grpo.study import paths
from grpo.study.schema import Study

PROGRAMS = "For an attempt with a recipe, grpo.discovery.mutation.program_of(recipe) returns its exact program."
EXAMPLES = 2  # conversations with a language model that the report shows


def write_delivery(study: Study) -> None:
    """Write reports/kissing_number/; an empty folder if the study has no search, as DVC requires a stage's outputs.

    The log leaves out the programs of recipes, each of which contains the whole text of the constructions;
    :func:`grpo.discovery.mutation.program_of` restores them exactly.

    Raises:
        UserError: a result file is missing or damaged.
    """
    with whole_folder(paths.KISSING_NUMBER_DELIVERY) as folder:
        if study.kissing_number is None:
            return
        report = read_report()
        settings, attempts = read_log(paths.CONVERSATION_LOG, STAGE)
        shutil.copy(paths.KISSING_SEARCH / BEST_PROGRAM, folder / BEST_PROGRAM)
        log = to_json(settings, attempts)
        log["programs"] = PROGRAMS if any(attempt.proposal.recipe is not None for attempt in attempts) else ""
        log["attempts"] = [_without_program(attempt) for attempt in attempts]
        write_json(folder / LOG, log)
        for name, text in prompts_of(attempts).items():
            write_text(folder / "prompts" / f"{name}.md", text)
        values = {"section": section(report), "prompts": prompts_of(attempts), "turns": turns(attempts)}
        write_text(folder / "report.md", render("kissing_report.md.j2", report=report, **values))


def _without_program(attempt: Attempt) -> dict[str, Any]:
    entry = asdict(attempt)
    if attempt.proposal.recipe is not None:
        entry["proposal"]["program"] = None
    return entry


def prompts_of(attempts: list[Attempt]) -> dict[str, str]:
    """The baseline prompt and, for a search with a model, the last conversations that improved the best score (or any)."""
    later = [one for one in attempts if one.proposal.messages and one.proposal.parents]
    best = list(accumulate((one.score for one in attempts), max, initial=0.0))
    further = [one for one in later if one.score > best[one.index]] or later
    shown = enumerate(further[-EXAMPLES:], start=1)
    return {"problem": BASELINE + "\n"} | {f"sent_{number}": _as_text(one.proposal.messages or []) for number, one in shown}


def _as_text(messages: list[dict[str, str]]) -> str:
    return "\n\n".join(f"[{message['role']}]\n{message['content'].strip()}" for message in messages) + "\n"


def turns(attempts: list[Attempt]) -> dict[str, int]:
    """Count the answers that followed a failure or a valid set in their conversation, and those that improved on it."""
    pairs = [(attempts[a.proposal.parents[-1]].score, a.score) for a in attempts if a.proposal.messages and a.proposal.parents]
    return {
        "after_failure": sum(before == 0 for before, _ in pairs),
        "mended": sum(before == 0 < now for before, now in pairs),
        "after_valid": sum(before > 0 for before, _ in pairs),
        "enlarged": sum(0 < before < now for before, now in pairs),
    }
