"""reports/pairs.csv: a row for each claim and seed, with the differences of two arms by which the claim is judged.

Verdicts can be computed from it without the runs. Replicates of the study leave theirs in reports/replicates/.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from grpo.common.errors import reason
from grpo.common.files import damaged, read_text, write_text
from grpo.results.intervals import Scores


@dataclass(frozen=True)
class Pairs:
    """One study's runs of two arms, paired by seed, as a claim compares them."""

    arm: str
    other: str
    seeds: list[int]
    differences: Scores  # (runs, problems), arm minus other; of a claim about a ratio (runs, 1): the logarithm of the ratio
    moved: Scores  # (runs, problems): how the difference changed between the last two evaluations; 0 problems: not asked
    problems: str = ""  # digest of the problems' settings; studies in which it is equal have the same problems


def by_problems(studies: Iterable[Pairs]) -> list[Pairs]:
    """Put the runs of studies with the same problems together."""
    found: dict[str, Pairs] = {}
    for one in studies:
        if before := found.get(one.problems):
            differences = np.concatenate([before.differences, one.differences])
            moved = np.concatenate([before.moved, one.moved])
            found[one.problems] = replace(before, seeds=[*before.seeds, *one.seeds], differences=differences, moved=moved)
        else:
            found[one.problems] = one
    return [*found.values()]


def write_pairs(path: Path, pairs: Mapping[str, Pairs]) -> None:
    """Write the pairs of a study by its claims' ids."""
    rows = [
        {"claim": claim, "arm": one.arm, "other": one.other, "problems": one.problems, "seed": seed}
        | {key: " ".join(f"{value:.17g}" for value in getattr(one, key)[row]) for key in ("differences", "moved")}
        for claim, one in pairs.items()
        for row, seed in enumerate(one.seeds)
    ]
    columns = ["claim", "arm", "other", "problems", "seed", "differences", "moved"]
    write_text(path, pd.DataFrame(rows, columns=columns).to_csv(index=False, lineterminator="\n"))


def read_pairs(path: Path, made_by: str = "tables") -> dict[str, Pairs]:
    """Read what :func:`write_pairs` wrote; UserError if the file is missing or damaged."""
    try:
        table = pd.read_csv(io.StringIO(read_text(path, made_by)), dtype=str, keep_default_na=False)
        return {str(claim): _pairs(rows) for claim, rows in table.groupby("claim", sort=False)}
    except (ValueError, KeyError) as error:
        raise damaged(path, reason(error), made_by) from error


def _pairs(rows: pd.DataFrame) -> Pairs:
    (arm, other, problems), *_ = rows[["arm", "other", "problems"]].itertuples(index=False)
    differences, moved = (np.array([text.split() for text in rows[key]], dtype=float) for key in ("differences", "moved"))
    if not np.isfinite(np.concatenate([differences, moved], axis=1)).all() or not differences.shape[1]:
        raise ValueError("a difference is not a number")
    return Pairs(arm, other, [int(seed) for seed in rows["seed"]], differences, moved, problems)
