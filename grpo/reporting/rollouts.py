"""Stored samples for the page's browser."""

from __future__ import annotations

import json
import math
from typing import Any

from grpo.common.files import read_jsonl
from grpo.study import paths
from grpo.study.paths import stage_of_run

MOST_SAMPLES = 700_000  # characters in the page; other samples stay in the runs' folders
NUMBERS = ("format_reward", "answer_reward", "reward", "token_entropy")
COLUMNS = ("step", "problem", "prompt", "response", "ground_truth", *NUMBERS)
MESSAGES = "messages"  # of an episode, each with its role

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
    return read_jsonl(path, stage_of_run(run), lambda record: {column: record[column] for column in columns_of(record)})


def columns_of(record: Sample) -> tuple[str, ...]:
    """The columns of a sample that the page shows."""
    return (*COLUMNS, MESSAGES) if MESSAGES in record else COLUMNS


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
            turns = [s[MESSAGES]] if MESSAGES in s else []
            found[run].append([problem, prompt, s["step"], s["response"], *(number(s[reward]) for reward in NUMBERS), *turns])
    episodes = any(len(row) > 4 + len(NUMBERS) for rows in found.values() for row in rows)
    columns = ["problem", "prompt", "step", "response", *NUMBERS, *([MESSAGES] if episodes else [])]
    return {"prompts": list(prompts), "problems": list(problems), "columns": columns, "runs": found, "left_out": left_out}
