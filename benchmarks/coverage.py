"""Simulate how often the 95% intervals of ``grpo/results/intervals.py`` contain the true difference of two arms.

``python benchmarks/coverage.py`` prints a table and writes it to benchmarks/results/coverage.json. Each simulated study draws
new problems and runs. All arms answer the same problems, which differ in difficulty (a logistic model with a standard deviation
of 1.5 in logits, of which a tenth each is specific to an arm and to a run). An arm's runs have mean rewards around 0.7 with the
standard deviation in the row; a run's result is the mean of three evaluations. The truth is the difference of the two arms'
expected rewards.

Rows: runs with normal spread; runs that spread in logits, so that bad runs are far out; and runs of the second arm that each
collapse with a probability of 1/4, detected as in the project, with the truth for runs that do not collapse. The table also has
two methods that were not adopted: one variance pooled over four arms, and a two-level bootstrap over runs and problems.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special, stats

from grpo.results.evidence import Evidence
from grpo.results.intervals import change_of, difference_of
from grpo.results.runs import Run

RESULT = Path(__file__).with_name("results") / "coverage.json"
RUNS, PROBLEMS = (2, 3, 5), (256, 1024)
SDS = ((0.02, 0.02), (0.05, 0.05), (0.1, 0.1), (0.2, 0.2), (0.02, 0.05), (0.02, 0.2))
MEAN, DIFFICULTY, OWN = 0.7, 1.5, 0.1
LOWEST, HIGHEST = 0.03, 0.97  # limits of a run's expected reward
COLLAPSE = 0.25
EVALUATIONS = 3
RESAMPLES, BOOTSTRAPPED = 400, 300  # resamples, and the number of studies with a bootstrap, which is slow

Scores = NDArray[np.float64]
Draws = np.random.Generator

_SHIFTS = np.linspace(-9, 9, 721)
_QUANTILES = special.ndtri((np.arange(500) + 0.5) / 500)
_REWARDS = special.expit(_SHIFTS[:, None] + DIFFICULTY * _QUANTILES).mean(axis=1)


def shift_of(reward: Scores) -> Scores:
    """The shift in logits that gives an expected reward over problems."""
    return np.interp(reward, _REWARDS, _SHIFTS)


@cache
def skewed(sd: float) -> tuple[float, float]:
    """Mean and standard deviation in logits of runs whose rewards have mean 0.7 and this standard deviation."""

    def moments(at: float, width: float) -> tuple[float, float]:
        rewards = np.interp(at + width * _QUANTILES, _SHIFTS, _REWARDS)
        return float(rewards.mean()), float(rewards.std())

    at, width = float(shift_of(np.array(MEAN))), sd
    for _ in range(60):
        mean, spread = moments(at, width)
        at, width = at + 5 * (MEAN - mean), width * sd / spread
    return at, width


def run_shifts(draws: Draws, runs: int, sd: float, kind: str) -> Scores:
    """Draw the runs of an arm, in logits."""
    if kind == "skewed":
        at, width = skewed(sd)
        return at + width * draws.normal(size=runs)
    return shift_of(truncated(sd).rvs(runs, random_state=draws))


@cache
def truncated(sd: float) -> Any:
    """The distribution of a run's expected reward."""
    return stats.truncnorm((LOWEST - MEAN) / sd, (HIGHEST - MEAN) / sd, MEAN, sd)


def scores(draws: Draws, shifts: Scores, difficulty: Scores) -> Scores:
    """Draw an arm's rewards (runs, problems) as means of a few evaluations."""
    own = DIFFICULTY * math.sqrt(OWN)
    problems = difficulty + own * draws.normal(size=len(difficulty))
    logits = shifts[:, None] + problems + own * draws.normal(size=(len(shifts), len(difficulty)))
    return draws.binomial(EVALUATIONS, special.expit(logits)) / EVALUATIONS


def study(draws: Draws, runs: int, problems: int, sds: tuple[float, ...], kind: str = "normal") -> list[Scores]:
    """Draw the scores of a study's arms."""
    difficulty = DIFFICULTY * math.sqrt(1 - 2 * OWN) * draws.normal(size=problems)
    return [scores(draws, run_shifts(draws, runs, sd, kind), difficulty) for sd in sds]


def truth(sds: tuple[float, ...], kind: str) -> float:
    """The true difference, second arm minus first."""
    if kind == "skewed":
        return 0.0
    return float(truncated(sds[1]).mean() - truncated(sds[0]).mean())


# ---------------------------------------------------------------------------------------------------------- intervals


def ours(arms: list[Scores]) -> tuple[float, float]:
    """The project's interval."""
    found = difference_of(arms[0], arms[1])
    return found.low, found.high


def pooled(arms: list[Scores]) -> tuple[float, float]:
    """An interval with one run variance pooled over all arms, and problems as in the project's interval."""
    runs, problems = arms[0].shape
    variance = float(np.mean([arm.mean(axis=1).var(ddof=1) for arm in arms])) * 2 / runs
    by_problem = arms[1].mean(axis=0) - arms[0].mean(axis=0)
    rest = change_of(np.zeros_like(arms[0]), arms[1] - arms[0])  # over problems and runs of the difference
    of_problems = max(0.0, by_problem.var(ddof=1) / problems - rest.se**2 / 2)
    half = stats.t.ppf(0.975, len(arms) * (runs - 1)) * math.sqrt(variance + of_problems)
    return by_problem.mean() - half, by_problem.mean() + half


def bootstrap(arms: list[Scores], draws: Draws) -> tuple[float, float]:
    """A two-level bootstrap over runs and problems, with the runs' variance scaled by n / (n - 1)."""
    runs, problems = arms[0].shape
    counts = draws.multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES)
    means = []
    for arm in arms[:2]:
        by_run = counts @ arm.T / problems
        centre = by_run.mean(axis=1, keepdims=True)
        blown_up = centre + math.sqrt(runs / (runs - 1)) * (by_run - centre)
        drawn = draws.integers(runs, size=by_run.shape)
        means.append(np.take_along_axis(blown_up, drawn, axis=1).mean(axis=1))
    low, high = np.quantile(means[1] - means[0], [0.025, 0.975])
    return float(low), float(high)


# --------------------------------------------------------------------------------------------------------------- rows


def covered(intervals: list[tuple[float, float]], true: float) -> dict[str, float]:
    """Share of intervals that contain the truth, and their median half width."""
    low, high = np.array(intervals).T
    return {
        "coverage": round(float(np.mean((low <= true) & (true <= high))), 4),
        "half": round(float(np.median(high - low)) / 2, 4),
    }


def row(draws: Draws, runs: int, problems: int, sds: tuple[float, float], kind: str, studies: int) -> dict[str, Any]:
    """Simulate one setting. The pooled variance uses two more arms with the spread of the first."""
    four, true = (*sds, sds[0], sds[0]), truth(sds, kind)
    drawn = [study(draws, runs, problems, four, kind) for _ in range(studies)]
    return {
        "runs": runs,
        "problems": problems,
        "sds": list(sds),
        "kind": kind,
        **covered([ours(arms) for arms in drawn], true),
        "pooled": covered([pooled(arms) for arms in drawn], true),
        "bootstrap": covered([bootstrap(arms, draws) for arms in drawn[:BOOTSTRAPPED]], true),
    }


def collapsing_row(draws: Draws, runs: int, problems: int, sd: float, studies: int) -> dict[str, Any]:
    """Simulate one setting in which runs of the second arm collapse."""
    intervals, fallen = [], []
    for _ in range(studies):
        first, second = study(draws, runs, problems, (sd, sd))
        gone = draws.random(runs) < COLLAPSE
        if gone.all():
            continue  # if all runs collapse, the arm's result is that of collapsed runs, with another truth
        made = [made_up(seed, *of) for seed, of in enumerate(zip(second, gone, strict=True))]
        found = Evidence("simulated", {"arm": made}, 1)
        intervals.append(ours([first, found.final("arm")]))
        fallen.append(len(found.held("arm")) == (~gone).sum())
    shares = {"studies": len(intervals), "collapses_found": round(float(np.mean(fallen)), 4)}
    return {"runs": runs, "problems": problems, "sds": [sd, sd], "kind": "collapses", **covered(intervals, 0.0), **shares}


def made_up(seed: int, final: Scores, lost: bool) -> Run:
    """Make a run that reached these scores and, if collapsed, lost them in the end."""
    end = np.where(np.arange(len(final)) < 0.02 * len(final), final, 0.0) if lost else final
    validation = pd.DataFrame({"step": [0, 8, 16]})
    metrics = {"diverged_step": None}
    outcomes = np.stack([np.zeros_like(final), final, end])
    return Run("simulated", "arm", seed, {"config": {}}, metrics, pd.DataFrame({"step": [1]}), validation, outcomes)


def hardest(draws: Draws, studies: int) -> list[dict[str, Any]]:
    """Coverage in the hardest case: one arm spreads ten times as much as the other, with bad runs far out."""
    return [row(draws, runs, problems, (0.02, 0.2), "skewed", studies) for problems in PROBLEMS for runs in RUNS]


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as Markdown."""
    lines = [
        "| runs an arm | problems | run SDs | runs | coverage, % | half width | pooled, % | bootstrap, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        others = [f"{100 * one[name]['coverage']:.1f}" if name in one else "" for name in ("pooled", "bootstrap")]
        sds = ", ".join(f"{sd:g}" for sd in one["sds"])
        cells = [one["runs"], one["problems"], sds, one["kind"], f"{100 * one['coverage']:.1f}", f"{one['half']:.3f}", *others]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Simulate all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000, help="number of simulated studies per row")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draws, rows = np.random.default_rng(options.seed), []
    for runs in RUNS:
        for problems in PROBLEMS:
            rows += [row(draws, runs, problems, sds, "normal", options.studies) for sds in SDS]
        rows += [row(draws, runs, PROBLEMS[0], (sd, sd), "skewed", options.studies) for sd in (0.1, 0.2)]
        rows += [collapsing_row(draws, runs, PROBLEMS[0], sd, options.studies) for sd in (0.02, 0.1)]
    rows += hardest(np.random.default_rng([options.seed, 1]), options.studies)
    RESULT.write_text(json.dumps({"studies": options.studies, "seed": options.seed, "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
