"""Stored samples for the page's browser and the write-up, and the problems that each arm gained and lost."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

from grpo.common.files import read_jsonl
from grpo.results.runs import Run
from grpo.study import paths
from grpo.study.runs_table import stage_of_run

SUM = re.compile(r"(-?(?<!\d)\d{1,18}) ([+-]) (\d{1,18}) = (-?\d{1,18})(?!\d)")
MOST_SAMPLES = 700_000  # characters in the page; other samples stay in the runs' folders
SAMPLES_SHOWN = 2  # before and after training
NUMBERS = ("format_reward", "answer_reward", "reward", "token_entropy")
COLUMNS = ("step", "problem", "prompt", "response", "ground_truth", *NUMBERS)

Sample = dict[str, Any]


def number(value: Any) -> float | int | None:
    """Round to six digits, for the page; None if not finite."""
    if value is None or not math.isfinite(value):
        return None
    shorter = float(f"{value:.6g}")
    return int(shorter) if shorter.is_integer() and abs(shorter) < 1e15 else shorter


def read_samples(run: str) -> list[Sample]:
    """Read the samples of the run ``EXPERIMENT/ARM/SEED``, from its first, middle and last evaluation.

    A missing or damaged file is a UserError.
    """
    path = paths.RUNS / run / "rollouts.jsonl"
    return read_jsonl(path, stage_of_run(run), lambda record: {column: record[column] for column in COLUMNS})


def before_and_after(run: str) -> list[Sample]:
    """A run's samples of the same problems before and after training.

    Problems whose last answer is right and whose written sums are correct come first: a right answer may follow a wrong sum.
    """
    samples = read_samples(run)
    first, last = min(sample["step"] for sample in samples), max(sample["step"] for sample in samples)
    at_end = [sample for sample in samples if sample["step"] == last]
    best_first = sorted(at_end, key=lambda sample: not (sample["answer_reward"] == 1 and sums_hold(sample["response"])))
    chosen = [sample["problem"] for sample in best_first[:SAMPLES_SHOWN]]
    return [sample for step in (first, last) for sample in samples if sample["step"] == step and sample["problem"] in chosen]


def sums_hold(response: str) -> bool:
    """Whether every sum and difference of numbers of up to 18 digits in a response is correct; ``4 - 5 = 1`` is not."""
    return all(int(a) + int(sign + b) == int(c) for a, sign, b, c in SUM.findall(response))


def browsable(runs: list[str]) -> dict[str, Any]:
    """Collect samples, with each prompt and problem stored once.

    Args:
        runs: by priority, as the page has room for :data:`MOST_SAMPLES` characters.

    Returns:
        ``prompts``; ``problems`` with their truths; ``columns``; ``runs``: name -> a row per sample, with indices of prompt and
        problem; ``left_out``: runs for which there was no room.
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
        found[run] = []
        for s in samples:
            prompt = prompts.setdefault(s["prompt"], len(prompts))
            problem = problems.setdefault((s["problem"], s["ground_truth"]), len(problems))
            found[run].append([problem, prompt, s["step"], s["response"], *(number(s[reward]) for reward in NUMBERS)])
    columns = ["problem", "prompt", "step", "response", *NUMBERS]
    return {"prompts": list(prompts), "problems": list(problems), "columns": columns, "runs": found, "left_out": left_out}


def gained_and_lost(runs: list[Run]) -> list[float]:
    """Number of problems right before training, right at the end, gained and lost: means over an arm's runs.

    Each run's last evaluation is compared with its first.
    """
    ends = [(run.outcomes[0] == 1, run.outcomes[-1] == 1) for run in runs]
    counts = [(first.sum(), last.sum(), (last & ~first).sum(), (first & ~last).sum()) for first, last in ends]
    means: list[float] = np.mean(counts, axis=0).tolist()
    return means
