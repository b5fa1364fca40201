"""Scoring a policy on fixed problems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.files import write_text
from grpo.records import Problem, Rollout
from grpo.rewards import RewardFn
from grpo.rollout.engine import STOP_STRINGS, Engine, SamplingParams
from grpo.study import Evaluation
from grpo.tasks.prompts import format_prompt, load_prompt

CATEGORIES = {
    "format 1, answer 1": (1.0, 1.0),
    "format 1, answer 0": (1.0, 0.0),
    "format 0, answer 0": (0.0, 0.0),
}


def evaluation_sampling(evaluation: Evaluation, prompt: str) -> SamplingParams:
    """The sampling settings of validation and zero-shot evaluation under one prompt."""
    return SamplingParams(evaluation.temperature, evaluation.top_p, max_tokens=evaluation.max_tokens, stop=STOP_STRINGS[prompt])


def encode_prompts(tokenizer: Any, problems: Sequence[Problem], prompt: str) -> list[tuple[int, ...]]:
    """The token ids of each problem's prompt."""
    template = load_prompt(prompt)
    texts = [format_prompt(template, problem.question) for problem in problems]
    return [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def evaluate(
    engine: Engine,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompt: str,
    params: SamplingParams,
    reward_fn: RewardFn,
    seed: int,
) -> list[Rollout]:
    """One scored completion of each problem."""
    prompt_ids = encode_prompts(tokenizer, problems, prompt)
    groups = engine.generate(prompt_ids, params, n=1, seed=seed)
    return [
        Rollout(problem, ids, completion, reward_fn(completion.text, problem.ground_truth))
        for problem, ids, (completion,) in zip(problems, prompt_ids, groups, strict=True)
    ]


def category(rewards: dict[str, float]) -> str:
    """Which of the three outcomes (handout, ``math_baseline``) a completion's rewards are."""
    pair = (rewards["format_reward"], rewards["answer_reward"])
    return next(name for name, values in CATEGORIES.items() if values == pair)


def summarize(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over ``rollouts``: the three rewards, response length (tokens), and the share cut off by the token limit."""
    n = len(rollouts)
    means = {key: sum(r.rewards[key] for r in rollouts) / n for key in ("reward", "format_reward", "answer_reward")}
    lengths = [len(r.completion.token_ids) for r in rollouts]
    return means | {
        "response_length": sum(lengths) / n,
        "cut_off": sum(r.completion.finish_reason == "length" for r in rollouts) / n,
    }


def log_generations(
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[str],
    rewards: Sequence[dict[str, float]],
    token_entropies: Sequence[float],
    response_lengths: Sequence[int],
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """What the handout asks to be logged of generations.

    Args:
        token_entropies: for each response, the mean entropy (nats) of its tokens.
        response_lengths: in tokens.

    Returns:
        a record for each response (prompt, response, ground truth, rewards, mean token entropy, length), and a summary:
        mean entropy, and mean length of all, of the correct and of the incorrect ones (NaN where there is none).
    """
    records = [
        {"prompt": p, "response": r, "ground_truth": t, **s, "token_entropy": e, "response_length": n}
        for p, r, t, s, e, n in zip(prompts, responses, ground_truths, rewards, token_entropies, response_lengths, strict=True)
    ]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else float("nan")

    return records, {
        "token_entropy": mean(list(token_entropies)),
        "response_length": mean(list(response_lengths)),
        "response_length_correct": mean([r["response_length"] for r in records if r["answer_reward"] == 1.0]),
        "response_length_incorrect": mean([r["response_length"] for r in records if r["answer_reward"] != 1.0]),
    }


def evaluate_vllm(
    vllm_model: Any,
    reward_fn: RewardFn,
    prompts: list[str],
    eval_sampling_params: Any,
    ground_truths: list[str],
    output_path: Path | None = None,
) -> list[dict[str, Any]]:
    """Generate with a ``vllm.LLM``, score, and write the results to disk (handout, ``math_baseline``).

    Args:
        eval_sampling_params: a ``vllm.SamplingParams``.
        ground_truths: one for each prompt.
        output_path: JSONL file for the records, if given.

    Returns:
        for each prompt its response, ground truth and rewards.
    """
    outputs = vllm_model.generate(prompts, eval_sampling_params)
    records = []
    for prompt, output, ground_truth in zip(prompts, outputs, ground_truths, strict=True):
        response = output.outputs[0].text
        records.append(
            {"prompt": prompt, "response": response, "ground_truth": ground_truth, **reward_fn(response, ground_truth)}
        )
    if output_path is not None:
        write_text(output_path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return records
