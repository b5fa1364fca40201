"""The functions of the course handouts (CS336 assignment 5, CSE599-O assignment 3), by their names and with their arguments.

What a study runs is elsewhere, and most of these only call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.common.files import write_json, write_jsonl
from grpo.evaluation.evaluate import category, count_categories
from grpo.evaluation.evaluate import log_generations as log_generations
from grpo.learner.advantages import normalize_within_groups, reward_statistics
from grpo.learner.losses import LossInputs, find_loss, masked_normalize, negative_log_likelihood, response_weights
from grpo.learner.microbatches import pad_and_shift
from grpo.study.config import LOSSES_OF_THE_HANDOUTS
from grpo.tasks.keyword_inclusion import keyword_inclusion_reward_fn as keyword_inclusion_reward_fn
from grpo.tasks.rewards import question_only_reward_fn as question_only_reward_fn
from grpo.tasks.rewards import r1_zero_reward_fn as r1_zero_reward_fn

# What each loss is computed from, besides the policy's log-probabilities.
_NEEDS = {
    "no_baseline": ("raw_rewards",),
    "reinforce_with_baseline": ("advantages",),
    "grpo_no_clip": ("advantages", "old_log_probs"),
    "grpo_clip": ("advantages", "old_log_probs", "cliprange"),
}


def tokenize_prompt_and_output(prompt_strs: list[str], output_strs: list[str], tokenizer: Any) -> dict[str, Tensor]:
    """Tokenise prompts and outputs apart, join them, and mark the output's tokens.

    Returns:
        As :func:`grpo.learner.microbatches.pad_and_shift`.
    """
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompt_strs]
    outputs = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in output_strs]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return pad_and_shift(prompts, outputs, pad)


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the distribution over the last dimension: H = logsumexp(z) - sum softmax(z) z, in float32.

    Args:
        logits: (..., vocabulary).

    Returns:
        (...)
    """
    logits = logits.float()
    normalizer = torch.logsumexp(logits, dim=-1)
    return normalizer - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


def get_response_log_probs(
    model: Any, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Log-probability of each label, and optionally the entropy of the distribution it is drawn from.

    Padding stands on the right, where causal attention hides it from every real token, so no attention mask is needed.

    Args:
        model: a causal language model whose output has ``logits``.
        input_ids, labels: (batch, length).
        temperature: the logits are divided by it; must be the sampling temperature for ratios to start at 1.

    Returns:
        ``log_probs`` (batch, length) in float32, prompt and padding not masked out; ``token_entropy`` of the same shape,
        without gradient, if asked for.
    """
    logits = model(input_ids).logits.float() / temperature
    log_probs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    if not return_token_entropy:
        return {"log_probs": log_probs}
    with torch.no_grad():
        return {"log_probs": log_probs, "token_entropy": compute_entropy(logits)}


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the elements with mask 1 along ``dim`` (all of them if None); NaN where a slice has none, as ``tensor.mean``."""
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_normalize(tensor, mask, dim) / count.to(tensor.dtype)


def compute_group_normalized_rewards(
    reward_fn: Callable[..., dict[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[Any],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Score every response, then normalise the rewards within each group.

    Args:
        reward_fn: (response, ground truth) -> ``reward``, ``format_reward``, ``answer_reward``.
        rollout_responses: n_groups * group_size responses, those of a group side by side.
        repeated_ground_truths: for each response, its question's ground truth.

    Returns:
        advantages and raw rewards, each (n_groups * group_size,), and metadata:
        :func:`grpo.learner.advantages.reward_statistics`.
    """
    scores = [reward_fn(r, t) for r, t in zip(rollout_responses, repeated_ground_truths, strict=True)]
    raw_rewards = torch.tensor([score["reward"] for score in scores], dtype=torch.float64)
    advantages = normalize_within_groups(raw_rewards, group_size, advantage_eps, normalize_by_std)
    return advantages, raw_rewards.float(), reward_statistics(scores, advantages, group_size)


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """:func:`grpo.learner.losses.reinforce_with_baseline`; rewards are (batch, 1), log-probabilities (batch, length)."""
    return compute_policy_gradient_loss(policy_log_probs, "reinforce_with_baseline", advantages=raw_rewards_or_advantages)[0]


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """:func:`grpo.learner.losses.grpo_clip`; advantages are (batch, 1), log-probabilities (batch, length)."""
    return compute_policy_gradient_loss(policy_log_probs, "grpo_clip", None, advantages, old_log_probs, cliprange)


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One of :data:`grpo.learner.losses.LOSSES`.

    Args:
        policy_log_probs, old_log_probs: (batch, length).
        loss_type: a name there, or ``GRPO-Clip`` or ``GRPO-No-Clip``, as the handouts write two of them.
        raw_rewards, advantages: (batch, 1).

    Returns:
        per-token loss (batch, length); ``ratio`` and ``clipped`` (bool), where old log-probabilities were given.

    Raises:
        ValueError: an argument that the type needs is None.
        UserError: an unknown type.
    """
    loss_type = LOSSES_OF_THE_HANDOUTS.get(loss_type, loss_type)
    loss = find_loss(loss_type)
    given = {"raw_rewards": raw_rewards, "advantages": advantages, "old_log_probs": old_log_probs, "cliprange": cliprange}
    for name in _NEEDS.get(loss_type, tuple(given)):
        if given[name] is None:
            raise ValueError(f"loss_type {loss_type} needs {name}")
    unread = torch.full_like(policy_log_probs[:, :1], torch.nan)
    inputs = LossInputs(
        policy_log_probs,
        policy_log_probs.detach() if old_log_probs is None else old_log_probs,
        unread if advantages is None else advantages,
        unread if raw_rewards is None else raw_rewards,
        torch.ones_like(policy_log_probs, dtype=torch.bool),
        torch.nan if cliprange is None else cliprange,
    )
    per_token, metrics = loss(inputs)
    if old_log_probs is None:
        return per_token, metrics
    ratio = inputs.ratio.detach()
    return per_token, {"ratio": ratio, "clipped": torch.zeros_like(ratio, dtype=torch.bool)} | metrics


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    length_normalization: str = "masked_mean",
    constant_normalizer: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one microbatch, already divided for accumulation, with its gradients added to the leaves.

    Each response's token losses are reduced by ``length_normalization`` (:func:`grpo.learner.losses.response_weights`), then
    averaged over the ``gradient_accumulation_steps`` equal microbatches of an optimizer step. A response without tokens adds
    nothing.

    Args:
        policy_log_probs, response_mask, old_log_probs: (microbatch, length).
        raw_rewards, advantages: (microbatch, 1).

    Returns:
        the scalar loss (detached) and the metadata of :func:`compute_policy_gradient_loss`.
    """
    per_token, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    size = len(policy_log_probs)
    lengths, n_sequences = response_mask.float().sum(dim=1), size * gradient_accumulation_steps
    weights = response_weights(lengths, length_normalization, n_sequences, size, constant_normalizer)
    loss = masked_normalize(per_token * weights[:, None], response_mask)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), metadata


def sft_microbatch_train_step(
    policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int, normalize_constant: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of one microbatch, summed over each response's tokens and averaged over responses.

    Args:
        policy_log_probs, response_mask: (microbatch, length).
        gradient_accumulation_steps: equal microbatches of an optimizer step.
        normalize_constant: divides each response's sum.

    Returns:
        the scalar loss (detached) and ``mean_nll``, the mean over response tokens.
    """
    n = len(policy_log_probs)
    weights = policy_log_probs.new_full((n,), 1.0 / (n * gradient_accumulation_steps))
    loss = negative_log_likelihood(policy_log_probs, response_mask, weights, normalize_constant)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {"mean_nll": masked_mean(-policy_log_probs.detach(), response_mask)}


def evaluate_vllm(
    vllm_model: Any,
    reward_fn: Callable[[str, str], dict[str, float]],
    prompts: list[str],
    eval_sampling_params: Any,
    ground_truths: list[str] | None = None,
    output_path: Path = Path("data/evaluate_vllm.jsonl"),
) -> list[dict[str, Any]]:
    """Generate with a ``vllm.LLM``, score, compute metrics, and write all of it to disk (handout, ``math_baseline``).

    Args:
        reward_fn: (response, ground truth) -> rewards; where no ground truths are given, (response, prompt) -> rewards.
        eval_sampling_params: a ``vllm.SamplingParams``.
        ground_truths: one for each prompt.
        output_path: JSONL file of the records. The mean of each reward, and the counts of the three outcomes where there are a
            format and an answer reward, go beside it, into a file that ends in ``_metrics.json``.

    Returns:
        for each prompt its response, ground truth (if given) and rewards.
    """
    outputs = vllm_model.generate(prompts, eval_sampling_params)
    records: list[dict[str, Any]] = []
    scores = []
    for prompt, output, truth in zip(prompts, outputs, ground_truths or prompts, strict=True):
        response = output.outputs[0].text
        scores.append(reward_fn(response, truth))
        records.append(
            {"prompt": prompt, "response": response} | ({"ground_truth": truth} if ground_truths else {}) | scores[-1]
        )
    metrics: dict[str, Any] = {key: sum(score[key] for score in scores) / len(scores) for key in (scores or [{}])[0]}
    if {"format_reward", "answer_reward"} <= metrics.keys():
        metrics["categories"] = count_categories([category(score) for score in scores])
    write_jsonl(output_path, records)
    write_json(output_path.with_name(f"{output_path.stem}_metrics.json"), metrics)
    return records
