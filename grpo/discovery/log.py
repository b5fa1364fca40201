"""The conversation log of a search, a JSON file of all proposals with their scores, which is also its state; its summary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo.common.files import damaged, read_json, write_json
from grpo.discovery.verifier import Verification

LOG = "conversation_log.json"
BEST_PROGRAM = "program.py"
NO_LANGUAGE_MODEL = "No language model was used: the programs are mutations of parameterised constructions."


@dataclass(frozen=True)
class Proposal:
    """A proposed program and its origin.

    Attributes:
        program: Python source; None if there is none, for the reason in ``problem``.
        parents: indices of the attempts on which it builds; with a language model, those whose answers the prompt contains.
        recipe: the parameters of a construction; None with a language model.
        messages: the prompt (the whole conversation); None without a language model.
        answer: the language model's whole answer.
        tokens: number by the endpoint's count, or an estimate if it gives none.
        calls: number of requests, including failed ones.
    """

    program: str | None
    problem: str = ""
    parents: tuple[int, ...] = ()
    recipe: dict[str, Any] | None = None
    messages: list[dict[str, str]] | None = None
    answer: str | None = None
    tokens: int = 0
    calls: int = 1

    @property
    def failed_calls(self) -> int:
        """Number of requests to a language model without an answer."""
        return 0 if self.messages is None else self.calls - (self.answer is not None)


@dataclass(frozen=True)
class Attempt:
    """An entry of the log: a proposal and the verifier's verdict. Times are in seconds."""

    index: int
    seed: int
    started_at: str
    propose_s: float
    verify_s: float
    proposal: Proposal
    verdict: Verification

    @property
    def score(self) -> float:
        """Points of a valid set, else 0."""
        return self.verdict.combined_score


@dataclass(frozen=True)
class Settings:
    """The settings of a search, except its budget. The address may change; with other values it is another search."""

    proposer: str  # "mutation" or "language model"
    strategy: str
    seed: int
    model: str | None = None
    base_url: str | None = None

    @property
    def note(self) -> str:
        """What a report says of a search without a language model; empty for others."""
        return "" if self.proposer == "language model" else NO_LANGUAGE_MODEL


_SETTINGS, _ATTEMPTS = TypeAdapter(Settings), TypeAdapter(list[Attempt])


@dataclass
class Log:
    """A search's settings and attempts so far."""

    path: Path
    settings: Settings
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def best(self) -> Attempt | None:
        """See :func:`best_of`."""
        return best_of(self.attempts)

    def add(self, attempt: Attempt) -> None:
        """Append an attempt and write the log."""
        self.attempts.append(attempt)
        write_json(self.path, to_json(self.settings, self.attempts))


def best_of(attempts: Sequence[Attempt]) -> Attempt | None:
    """The first valid attempt with the most points; None if no set was valid."""
    return max((attempt for attempt in attempts if attempt.score > 0), key=lambda attempt: attempt.score, default=None)


def to_json(settings: Settings, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """The contents of the log file."""
    return {
        "problem": "kissing number in dimension 11",
        "language_model": settings.model,
        "note": settings.note,
        "settings": asdict(settings),
        "attempts": [asdict(attempt) for attempt in attempts],
    }


def open_log(path: Path, settings: Settings) -> Log:
    """Open the log at ``path`` to continue it, or a new one if there is none.

    Raises:
        UserError: the file is damaged.
    """
    return Log(path, settings, read_log(path)[1] if path.exists() else [])


def read_log(path: Path, made_by: str = "") -> tuple[Settings, list[Attempt]]:
    """Read a log file.

    Args:
        made_by: the stage that makes it, for the error message; empty if none does.

    Raises:
        UserError: the file is missing or damaged.
    """
    values = read_json(path, made_by, keys=("settings", "attempts"))
    try:
        return _SETTINGS.validate_python(values["settings"]), _ATTEMPTS.validate_python(values["attempts"])
    except ValidationError as error:
        raise damaged(path, error, made_by) from error


# -------------------------------------------------------------------------------------------------------------- summary


def summarise(log: Log, ended_by: str, committed: Verification) -> dict[str, Any]:
    """Summarise a search, without times, so that equal settings on one machine give equal summaries."""
    attempts, best = log.attempts, log.best
    searched = int(best.score) if best else 0
    return {
        **asdict(log.settings),
        "note": log.settings.note,
        "ended_by": ended_by,
        "best": max(searched, int(committed.combined_score)),
        "best_from": "search" if searched >= committed.combined_score else "committed program",
        "best_of_search": searched,
        "found_at": best.index if best else None,
        "recipe": best.proposal.recipe if best else None,
        "committed_program": asdict(committed),
        "attempts": len(attempts),
        "valid": sum(attempt.score > 0 for attempt in attempts),
        "calls": sum(attempt.proposal.calls for attempt in attempts),
        "failed_calls": sum(attempt.proposal.failed_calls for attempt in attempts),
        "tokens": sum(attempt.proposal.tokens for attempt in attempts),
        "by_kind": _by_kind(attempts),
        "failures": dict(Counter(_reason(a) for a in attempts if a.score == 0).most_common()),
        "course": _course(attempts),
    }


def score_rows(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """A row per attempt: its kind, number of points, score, and the best score so far."""
    best = accumulate((int(attempt.score) for attempt in attempts), max)
    return [
        {
            "attempt": attempt.index,
            "kind": _kind(attempt),
            "num_points": attempt.verdict.num_points,
            "score": int(attempt.score),
            "best": so_far,
            "message": attempt.verdict.message,
        }
        for attempt, so_far in zip(attempts, best, strict=True)
    ]


def _course(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """The attempts that improved on all earlier ones."""
    course: list[dict[str, Any]] = []
    for attempt in attempts:
        if attempt.score > (course[-1]["score"] if course else 0):
            parents = list(attempt.proposal.parents)
            course.append({"attempt": attempt.index, "score": int(attempt.score), "kind": _kind(attempt), "parents": parents})
    return course


def _by_kind(attempts: Sequence[Attempt]) -> dict[str, dict[str, int]]:
    kinds = sorted({_kind(attempt) for attempt in attempts})
    scores = {kind: [int(attempt.score) for attempt in attempts if _kind(attempt) == kind] for kind in kinds}
    return {kind: {"attempts": len(s), "valid": sum(x > 0 for x in s), "best": max(s)} for kind, s in scores.items()}


def _kind(attempt: Attempt) -> str:
    """A recipe's construction; for a language model's program, whether it builds on others."""
    if attempt.proposal.recipe:
        return str(attempt.proposal.recipe["core"])
    return "refined" if attempt.proposal.parents else "from scratch"


def _reason(attempt: Attempt) -> str:
    """The reason for a score of zero, with numbers removed, so that equal reasons count together."""
    return re.sub(r"\d+", "N", attempt.verdict.message.split(":")[0])
