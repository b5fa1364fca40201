"""Comparison of two evaluations on the same problems."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from grpo.common.errors import UserError
from grpo.common.files import read_jsonl
from grpo.results.intervals import difference_of, p_value
from grpo.study import paths


def compare_files(first: Path, second: Path) -> str:
    """Compare the answer rewards of two evaluations' PROMPT.jsonl problem by problem, and describe the difference.

    Raises:
        UserError: a file is missing or is no PROMPT.jsonl, or the problems differ.
    """
    scores = read_scores(first), read_scores(second)
    if scores[0].keys() != scores[1].keys():
        different = len(scores[0].keys() ^ scores[1].keys())
        raise UserError(
            f"{first} and {second}: {different} problems are in only one of them. Evaluate both on the same problems."
        )
    pairs = [(scores[0][problem], scores[1][problem]) for problem in scores[0]]
    before, after = np.array(pairs).T
    difference = difference_of(before, after, fixed=True)
    only_first = sum(a == 1.0 and b < 1.0 for a, b in pairs)
    only_second = sum(a < 1.0 and b == 1.0 for a, b in pairs)
    differ = difference.low > 0 or difference.high < 0
    verdict = "the interval does not hold 0" if differ else "the interval holds 0: no difference can be told"
    return (
        f"{second} minus {first}: {difference} on {len(pairs)} problems, p = {p_value(difference):.4f}; {verdict}.\n"
        f"Right in the second only: {only_second}; in the first only: {only_first}."
    )


def read_scores(path: Path) -> dict[str, float]:
    """Read the answer reward of each problem from an evaluation's PROMPT.jsonl.

    Raises:
        UserError: the file is missing or empty, or a line is damaged.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file. `grpo evaluate CHECKPOINT --out FOLDER` makes one.")
    made_by = "math_baseline" if path.absolute().parent == paths.BASELINE.absolute() else ""
    return dict(read_jsonl(path, made_by, lambda record: (record["problem"], float(record["answer_reward"]))))
