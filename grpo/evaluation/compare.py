"""Comparing two evaluations on the same problems."""

from __future__ import annotations

import json
from pathlib import Path

from grpo.errors import UserError
from grpo.evaluation.statistics import format_interval, paired_bootstrap


def compare_files(first: Path, second: Path) -> str:
    """What can be said of the difference in answer reward between two evaluations' PROMPT.jsonl.

    Raises:
        UserError: a file is missing or holds something else, or they are not about the same problems.
    """
    scores = read_scores(first), read_scores(second)
    if scores[0].keys() != scores[1].keys():
        different = len(scores[0].keys() ^ scores[1].keys())
        raise UserError(
            f"{first} and {second}: {different} problems are in only one of them. Evaluate both on the same problems."
        )
    pairs = [(scores[0][problem], scores[1][problem]) for problem in scores[0]]
    result = paired_bootstrap([a for a, _ in pairs], [b for _, b in pairs])
    only_first, only_second = (sum(pair == kind for pair in pairs) for kind in ((1.0, 0.0), (0.0, 1.0)))
    apart = result["low"] > 0 or result["high"] < 0
    verdict = "the interval does not hold 0" if apart else "the interval holds 0: no difference can be told"
    return (
        f"{second} minus {first}: {format_interval(result)} on {result['problems']} problems, "
        f"p = {result['p']:.4f}; {verdict}.\n"
        f"Right in the second only: {only_second}; in the first only: {only_first}."
    )


def read_scores(path: Path) -> dict[str, float]:
    """The answer reward of each problem in an evaluation's PROMPT.jsonl.

    Raises:
        UserError: no such file, or a line of something else.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file. `grpo evaluate CHECKPOINT --out FOLDER` makes one.")
    scores: dict[str, float] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            scores[record["problem"]] = float(record["answer_reward"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number}: not a record of an evaluation ({error!r}).") from error
    if not scores:
        raise UserError(f"{path}: holds no records.")
    return scores
