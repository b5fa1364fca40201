"""Simulate how often the report's 95% intervals contain the true value, as they are used: over all runs, paired by seed.

``python benchmarks/coverage.py`` prints a table and writes it to benchmarks/results/coverage.json. Each simulated study draws
new problems, seeds and runs. All arms answer the same problems, which differ in difficulty (a logistic model with a standard
deviation of 1.5 in logits, of which a tenth each is specific to an arm and to a run). An arm's runs have rewards with mean 0.7
and the standard deviation in the row; a share of its variance is that of the seed, as where each seed has its own base model. A
run's result is one evaluation. ``difference``: of two arms, paired; ``mean``: of the second arm.

Rows: runs with normal spread; runs that spread in logits, so that bad runs are far out; and runs of which, in the second arm,
each collapses with the probability in the row and then earns 0.02. There the truth is the mean over all runs, collapsed ones
too. "Seen": coverage in the studies in which at least one run collapsed; the others cannot know of a collapse.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from grpo.results.intervals import difference_of, mean_of

RESULT = Path(__file__).with_name("results") / "coverage.json"
RUNS, PROBLEMS = (3, 5), 384
SDS = ((0.02, 0.02), (0.05, 0.05), (0.1, 0.1), (0.2, 0.2), (0.02, 0.05), (0.02, 0.2))
SEED_SHARES = (0.0, 0.5)  # of the variance between runs, what the arms' runs of one seed have in common
COLLAPSES = (0.05, 0.2, 0.5, 0.8)
MEAN, COLLAPSED = 0.7, 0.02
DIFFICULTY, OWN = 1.5, 0.1

Numbers = NDArray[np.float64]
Draws = np.random.Generator

_SHIFTS = np.linspace(-9, 9, 721)
_QUANTILES = special.ndtri((np.arange(500) + 0.5) / 500)
_REWARDS = special.expit(_SHIFTS[:, None] + DIFFICULTY * _QUANTILES).mean(axis=1)


def shift_of(reward: Numbers | float) -> Numbers:
    """The shift in logits that gives an expected reward over problems."""
    return np.interp(reward, _REWARDS, _SHIFTS)


@cache
def spread(sd: float, kind: str) -> tuple[float, float]:
    """Centre and deviation of the normal draws from which :func:`rewards` makes rewards with mean 0.7 and this deviation."""
    at, width = (float(shift_of(MEAN)), 6 * sd) if kind == "skewed" else (MEAN, sd)
    for _ in range(80):
        made = rewards(at + width * _QUANTILES, kind)
        at, width = at + (5 if kind == "skewed" else 1) * (MEAN - float(made.mean())), width * sd / float(made.std())
    return at, width


def rewards(draws: Numbers, kind: str) -> Numbers:
    """The runs' expected rewards: of draws in logits, or of rewards kept within 0.03 and 0.97."""
    return np.interp(draws, _SHIFTS, _REWARDS) if kind == "skewed" else np.clip(draws, 0.03, 0.97)


def study(draws: Draws, runs: int, row: dict[str, Any]) -> tuple[Numbers, Numbers, bool]:
    """Draw the answer rewards of two arms, (runs, problems) each, and whether a run of the second collapsed."""
    difficulty = DIFFICULTY * math.sqrt(1 - 2 * OWN) * draws.normal(size=PROBLEMS)
    own, of_seed, arms = DIFFICULTY * math.sqrt(OWN), draws.normal(size=runs), []
    lost = draws.random(runs) < row["collapse"]
    for number, sd in enumerate(row["sds"]):
        at, width = spread(sd, row["kind"])
        share = row["seed_share"]
        means = rewards(at + width * (math.sqrt(share) * of_seed + math.sqrt(1 - share) * draws.normal(size=runs)), row["kind"])
        means = np.where(lost, COLLAPSED, means) if number else means
        logits = shift_of(means)[:, None] + difficulty + own * draws.normal(size=PROBLEMS)
        logits += own * draws.normal(size=(runs, PROBLEMS))
        arms.append((draws.random(logits.shape) < special.expit(logits)).astype(float))
    return arms[0], arms[1], bool(lost.any())


def coverage(draws: Draws, runs: int, row: dict[str, Any], studies: int) -> dict[str, Any]:
    """Simulate one setting."""
    mean = MEAN + row["collapse"] * (COLLAPSED - MEAN)
    hits, of_mean, seen, widths = [], [], [], []
    for _ in range(studies):
        first, second, lost = study(draws, runs, row)
        found, alone = difference_of(first, second), mean_of(second)
        hits.append(found.low <= mean - MEAN <= found.high)
        of_mean.append(alone.low <= mean <= alone.high)
        seen.append(lost)
        widths.append((found.high - found.low) / 2)
    shares = {"difference": np.mean(hits), "mean": np.mean(of_mean), "half": np.median(widths)}
    if row["collapse"]:
        shares |= {"seen": np.mean(np.array(hits)[np.array(seen)]), "studies_seen": np.mean(seen)}
    return {"runs": runs, **row, **{name: round(float(share), 4) for name, share in shares.items()}}


def settings() -> list[dict[str, Any]]:
    """The rows of the table."""
    rows = [
        {"sds": sds, "kind": kind, "seed_share": share, "collapse": 0.0}
        for kind in ("normal", "skewed")
        for share in SEED_SHARES
        for sds in SDS
    ]
    return rows + [{"sds": (0.05, 0.05), "kind": "normal", "seed_share": 0.5, "collapse": share} for share in COLLAPSES]


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as Markdown; shares in percent."""
    heads = ("runs", "run SDs", "spread", "of the seed", "collapse", "difference, %", "half width", "seen, %", "mean, %")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for one in rows:
        seen = f"{100 * one['seen']:.1f} of {100 * one['studies_seen']:.0f}" if "seen" in one else ""
        sds = ", ".join(f"{sd:g}" for sd in one["sds"])
        cells = [one["runs"], sds, one["kind"], one["seed_share"], one["collapse"], f"{100 * one['difference']:.1f}"]
        cells += [f"{one['half']:.3f}", seen, f"{100 * one['mean']:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Simulate all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000, help="number of simulated studies per row")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draws = np.random.default_rng(options.seed)
    rows = [coverage(draws, runs, row, options.studies) for runs in RUNS for row in settings()]
    RESULT.write_text(json.dumps({"studies": options.studies, "seed": options.seed, "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
