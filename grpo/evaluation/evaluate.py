"""Sampling, scoring and summary of a policy's answers to fixed problems."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from grpo.common.records import Problem, Rollout, whole
from grpo.rollout.engine import SamplingParams, derive_seed
from grpo.rollout.sampling import Sampler, sample_rollouts, score_rollouts
from grpo.study.config import Evaluation
from grpo.tasks.task import Format

SEQUENCES_PER_CHUNK = 1024  # of one call of the engine; results depend on it, because each chunk has its own seed

CATEGORIES = {"format 1, answer 1": (1.0, 1.0), "format 1, answer 0": (1.0, 0.0), "format 0, answer 0": (0.0, 0.0)}
OTHER = "other rewards"  # partial rewards, of a task or reward function that gives them


def evaluation_sampling(evaluation: Evaluation, format: Format) -> SamplingParams:
    """Sampling parameters of validation and zero-shot evaluation in a format."""
    return SamplingParams(evaluation.temperature, evaluation.top_p, max_tokens=evaluation.max_tokens, stop=format.stop)


def evaluate(
    sampler: Sampler, problems: Sequence[Problem], params: SamplingParams, seed: int, n: int = 1, progress: bool = False
) -> list[list[Rollout]]:
    """Sample and score ``n`` completions of each problem, chunk by chunk.

    ``progress``: show a progress bar if there are several chunks. Returns a list of ``n`` rollouts for each problem, in the
    order of ``problems``, in all processes.
    """
    size = max(1, SEQUENCES_PER_CHUNK // n)
    starts = range(0, len(problems), size)
    groups: list[list[Rollout]] = []
    for start in tqdm(starts, desc="evaluation", unit="chunk", disable=len(starts) < 2 or not progress):
        chunk = problems[start : start + size]
        rollouts = sample_rollouts(sampler, chunk, params, n, derive_seed(seed, "chunk", start))
        score_rollouts(sampler.score, rollouts)
        rollouts = sampler.world.join(rollouts, each=n)
        if (late := sum(rollout.timed_out for rollout in rollouts)) and sampler.world.rank == 0:
            print(f"warning: {late} answers took the grader too long and count as wrong", file=sys.stderr)
        groups += [rollouts[i : i + n] for i in range(0, len(rollouts), n)]
    return groups


def category(rewards: dict[str, float]) -> str:
    """Outcome category of a completion's rewards: one of the three of the handout (``math_baseline``), or OTHER."""
    pair = (whole(rewards["format_reward"]), whole(rewards["answer_reward"]))
    return next((name for name, values in CATEGORIES.items() if values == pair), OTHER)


def count_categories(categories: Sequence[str]) -> dict[str, int]:
    """Count the outcomes; OTHER is left out if it does not occur."""
    counts = Counter(categories)
    return {name: counts[name] for name in (*CATEGORIES, *([OTHER] if counts[OTHER] else []))}


def summarize(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Summarize rollouts: means of the three rewards (of those that are not NaN), mean response length (tokens), share cut off
    by the token limit, and number of grader timeouts.
    """
    n = len(rollouts)
    means = {
        key: _mean([r.rewards[key] for r in rollouts if not math.isnan(r.rewards[key])])
        for key in ("reward", "format_reward", "answer_reward")
    }
    lengths = [r.length for r in rollouts]
    return means | {
        "response_length": sum(lengths) / n,
        "cut_off": sum(r.completion.finish_reason == "length" for r in rollouts) / n,
        "grader_timeouts": sum(r.timed_out for r in rollouts),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def lengths_by_outcome(rewards: Sequence[dict[str, float]], lengths: Sequence[int]) -> dict[str, float]:
    """Mean length (tokens) of correct and of incorrect responses; NaN if there are none."""
    outcomes = [(whole(each["answer_reward"]) == 1.0, length) for each, length in zip(rewards, lengths, strict=True)]
    return {
        "response_length_correct": _mean([length for correct, length in outcomes if correct]),
        "response_length_incorrect": _mean([length for correct, length in outcomes if not correct]),
    }


def log_generations(
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[str],
    rewards: Sequence[dict[str, float]],
    token_entropies: Sequence[float],
    response_lengths: Sequence[int],
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Log generations as the handout asks.

    ``token_entropies``: mean token entropy (nats) of each response. ``response_lengths``: in tokens. Returns a record for each
    response (prompt, response, ground truth, rewards, mean token entropy, length), and a summary: mean entropy, and mean length
    of all, of the correct, and of the incorrect responses (NaN if there are none).
    """
    records = [
        {"prompt": p, "response": r, "ground_truth": t, **s, "token_entropy": e, "response_length": n}
        for p, r, t, s, e, n in zip(prompts, responses, ground_truths, rewards, token_entropies, response_lengths, strict=True)
    ]
    return records, {
        "token_entropy": _mean(token_entropies),
        "response_length": _mean(response_lengths),
        **lengths_by_outcome(rewards, response_lengths),
    }
