"""The stored samples and the outcomes of all evaluations, in the form that the page browses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from grpo.common.files import read_jsonl
from grpo.reporting.curves import number
from grpo.results.runs import Run, by_arm
from grpo.study import paths
from grpo.study.runs_table import stage_of_run

MOST_SAMPLES = 3_000_000  # characters in the page; the rest stays in the runs' folders
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"  # of rewards in a heat map, a character each
NUMBERS = ("format_reward", "answer_reward", "reward", "token_entropy")
COLUMNS = ("step", "problem", "prompt", "response", "ground_truth", *NUMBERS)


def read_samples(run: str) -> list[dict[str, Any]]:
    """The samples of the run ``EXPERIMENT/ARM/SEED``, at its first, middle and last evaluation.

    Raises:
        UserError: they are missing or damaged.
    """

    def sample(record: dict[str, Any]) -> dict[str, Any]:
        return {column: record[column] for column in COLUMNS}

    return read_jsonl(paths.RUNS / run / "rollouts.jsonl", stage_of_run(run), sample)


def browsable(runs: list[str]) -> dict[str, Any]:
    """Samples of runs, each prompt and each problem once.

    Args:
        runs: in the order in which they are given room.

    Returns:
        ``prompts``; ``problems`` with their truths; ``columns``; ``runs``: name -> a row for each sample, prompt and problem by
        their places; ``left_out``: those for which there was no room.
    """
    prompts: dict[str, int] = {}
    problems: dict[tuple[str, str], int] = {}
    found: dict[str, list[list[Any]]] = {}
    left_out, size = [], 0
    for run in runs:
        samples = read_samples(run)
        more = sum(len(json.dumps(s["response"])) + len(s["prompt"]) * (s["prompt"] not in prompts) for s in samples)
        if size + more > MOST_SAMPLES:
            left_out.append(run)
            continue
        size += more
        rows = []
        for s in samples:
            prompt = prompts.setdefault(s["prompt"], len(prompts))
            problem = problems.setdefault((s["problem"], s["ground_truth"]), len(problems))
            rows.append([problem, prompt, s["step"], s["response"], *(number(s[reward]) for reward in NUMBERS)])
        found[run] = rows
    columns = ["problem", "prompt", "step", "response", *NUMBERS]
    return {"prompts": list(prompts), "problems": list(problems), "columns": columns, "runs": found, "left_out": left_out}


def outcomes_of(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Answer reward of each problem at each evaluation, mean over an arm's seeds, as one string of characters an evaluation.

    Returns:
        arm -> ``steps``, ``levels`` (the reward that each character of ``LEVELS`` stands for) and ``rows``. Evaluations that
        not all seeds have, as one diverged, are left out.
    """
    found = {}
    for arm, of_arm in by_arm(runs).items():
        n = min(len(run.outcomes) for run in of_arm)
        means = np.mean([run.outcomes[:n] for run in of_arm], axis=0)
        levels = np.unique(means)
        if len(levels) > len(LEVELS):  # partial rewards
            levels = np.linspace(0, 1, len(LEVELS))
        places = np.abs(means[:, :, None] - levels).argmin(axis=2)
        found[arm] = {
            "steps": [int(step) for step in of_arm[0].validation["step"][:n]],
            "levels": [number(level) for level in levels],
            "rows": ["".join(LEVELS[place] for place in row) for row in places],
        }
    return found
