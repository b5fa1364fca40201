"""Comparing two evaluations on the same problems."""

from __future__ import annotations

from pathlib import Path

from grpo.common.errors import UserError
from grpo.common.files import read_jsonl
from grpo.results.statistics import format_interval, paired_bootstrap
from grpo.study import paths


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
    only_first = sum(a == 1.0 and b < 1.0 for a, b in pairs)
    only_second = sum(a < 1.0 and b == 1.0 for a, b in pairs)
    differ = result["low"] > 0 or result["high"] < 0
    verdict = "the interval does not hold 0" if differ else "the interval holds 0: no difference can be told"
    return (
        f"{second} minus {first}: {format_interval(result)} on {result['problems']} problems, "
        f"p = {result['p']:.4f}; {verdict}.\n"
        f"Right in the second only: {only_second}; in the first only: {only_first}."
    )


def read_scores(path: Path) -> dict[str, float]:
    """The answer reward of each problem in an evaluation's PROMPT.jsonl.

    Raises:
        UserError: no such file, an empty one, or a line of something else.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file. `grpo evaluate CHECKPOINT --out FOLDER` makes one.")
    made_by = "math_baseline" if path.absolute().parent == paths.BASELINE.absolute() else ""
    return dict(read_jsonl(path, made_by, lambda record: (record["problem"], float(record["answer_reward"]))))
