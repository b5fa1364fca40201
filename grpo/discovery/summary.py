"""Summary of a search: its numbers, a row per attempt, and its improvements."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from grpo.discovery.log import Attempt, Log
from grpo.discovery.verifier import Verification


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
