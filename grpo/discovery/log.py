"""The conversation log of a search, a JSON file of all proposals with their scores, which is also its state; its summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo.common.files import damaged, read_json, write_json
from grpo.discovery.verifier import Verification

LOG = "conversation_log.json"
BEST_PROGRAM = "program.py"


@dataclass(frozen=True)
class Proposal:
    """A proposed program and its origin."""

    program: str | None  # Python source; None if there is none, for the reason in ``problem``
    problem: str = ""
    parents: tuple[int, ...] = ()  # indices of the attempts whose answers the prompt contains
    messages: list[dict[str, str]] = field(default_factory=list)  # the prompt (the whole conversation)
    answer: str | None = None  # the language model's whole answer; None if a request got none
    tokens: int = 0  # number by the endpoint's count, or an estimate if it gives none
    calls: int = 1  # number of requests, including failed ones

    @property
    def failed_calls(self) -> int:
        """Number of requests without an answer."""
        return self.calls - (self.answer is not None)


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
class SearchSettings:
    """The settings of a search, except its budget. The address may change; with other values it is another search."""

    strategy: str | None  # None: no search ran
    seed: int
    model: str | None = None
    base_url: str | None = None


_SETTINGS, _ATTEMPTS = TypeAdapter(SearchSettings), TypeAdapter(list[Attempt])


@dataclass
class Log:
    """A search's settings and attempts so far."""

    path: Path
    settings: SearchSettings
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def best(self) -> Attempt | None:
        return best_of(self.attempts)

    def add(self, attempt: Attempt) -> None:
        """Append an attempt and write the log."""
        self.attempts.append(attempt)
        write_json(self.path, to_json(self.settings, self.attempts))


def best_of(attempts: Sequence[Attempt]) -> Attempt | None:
    """The first valid attempt with the most points; None if no set was valid."""
    return max((attempt for attempt in attempts if attempt.score > 0), key=lambda attempt: attempt.score, default=None)


def to_json(settings: SearchSettings, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """The contents of the log file."""
    return {
        "problem": "kissing number in dimension 11",
        "language_model": settings.model,
        "settings": asdict(settings),
        "attempts": [asdict(attempt) for attempt in attempts],
    }


def open_log(path: Path, settings: SearchSettings) -> Log:
    """Open the log at ``path`` to continue it, or a new one if there is none. Raises UserError if the file is damaged."""
    return Log(path, settings, read_log(path)[1] if path.exists() else [])


def read_log(path: Path, made_by: str = "") -> tuple[SearchSettings, list[Attempt]]:
    """Read a log file.

    ``made_by``: the stage that makes it, for the error message; empty if none does. Raises UserError if the file is missing or
    damaged.
    """
    values = read_json(path, made_by, keys=("settings", "attempts"))
    try:
        return _SETTINGS.validate_python(values["settings"]), _ATTEMPTS.validate_python(values["attempts"])
    except ValidationError as error:
        raise damaged(path, error, made_by) from error


def summarise(log: Log, ended_by: str, committed: Verification) -> dict[str, Any]:
    """Summarise a search, without times, so that equal settings on one machine give equal summaries."""
    attempts, best = log.attempts, log.best
    searched = int(best.score) if best else 0
    return {
        **asdict(log.settings),
        "ended_by": ended_by,
        "best": max(searched, int(committed.combined_score)),
        "best_from": "search" if best and searched >= committed.combined_score else "committed program",
        "best_of_search": searched,
        "found_at": best.index if best else None,
        "committed_program": asdict(committed),
        "attempts": len(attempts),
        "valid": sum(attempt.score > 0 for attempt in attempts),
        "calls": sum(attempt.proposal.calls for attempt in attempts),
        "failed_calls": sum(attempt.proposal.failed_calls for attempt in attempts),
        "tokens": sum(attempt.proposal.tokens for attempt in attempts),
    }
