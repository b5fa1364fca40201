"""The GRPO loop (DeepSeekMath, arXiv 2402.03300, Algorithm 1, without the reward model and the KL term)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo.config import GrpoConfig, SamplingConfig
from grpo.evaluation.evaluate import encode_prompts
from grpo.objective.advantages import compute_group_normalized_rewards
from grpo.records import Problem, Rollout
from grpo.rewards import RewardFn
from grpo.rollout.engine import STOP_STRINGS, Engine, SamplingParams, derive_seed
from grpo.tracking import RunLog
from grpo.training.learner import Batch, Learner
from grpo.training.order import items_of_step


def train_grpo(
    config: GrpoConfig,
    seed: int,
    problems: Sequence[Problem],
    tokenizer: Any,
    engine: Engine,
    learner: Learner,
    reward_fn: RewardFn,
    validate: Callable[[int, list[dict[str, float]]], bool],
    log: RunLog,
) -> None:
    """Train ``learner.model`` for ``config.n_grpo_steps`` steps, or until ``validate`` says that the run is over.

    Args:
        problems: the training set.
        engine: samples with the policy's weights.
        validate: called with the step and its updates' metrics, before the first step and after each; decides itself when to
            evaluate, and returns True if the run is to end here.
        log: receives one row for each optimizer step and the time of each phase.
    """
    sampling = rollout_sampling(config)
    with log.phase("evaluation"):
        validate(0, [])
    for step in range(1, config.n_grpo_steps + 1):
        with log.phase("rollout"):
            questions = items_of_step(problems, seed, step, config.n_prompts_per_rollout_batch)
            prompts = encode_prompts(tokenizer, questions, config.prompt)
            groups = engine.generate(prompts, sampling, n=config.group_size, seed=derive_seed(seed, "rollout", step))

        with log.phase("scoring"):
            sampled = [(q, p, c) for q, p, group in zip(questions, prompts, groups, strict=True) for c in group]
            advantages, raw_rewards, rewards = compute_group_normalized_rewards(
                reward_fn,
                [completion.text for _, _, completion in sampled],
                [question.ground_truth for question, _, _ in sampled],
                config.group_size,
                config.advantage_eps,
                config.use_std_normalization,
            )
            rollouts = [Rollout(q, p, c, s) for (q, p, c), s in zip(sampled, rewards["scores"], strict=True)]

        with log.phase("training"):
            # With one update on a batch the sampling policy is the one being trained, and its ratios are exactly 1.
            old = learner.log_probs(rollouts) if config.updates_per_rollout_batch > 1 else None
            drift = learner.drift(rollouts, old)
            batch = Batch(rollouts, raw_rewards, advantages, old)
            updates = [
                learner.update(batch.slice(start, start + config.train_batch_size))
                for _ in range(config.epochs_per_rollout_batch)
                for start in range(0, config.rollout_batch_size, config.train_batch_size)
            ]

        with log.phase("synchronization"):
            engine.synchronize(learner.model, policy_version=step)

        with log.phase("evaluation"):
            over = validate(step, updates)

        metrics = rollout_metrics(rewards, rollouts) | drift
        log.step(step, updates, metrics, tokens=sum(len(r.completion.token_ids) for r in rollouts))
        if over:
            break


def rollout_sampling(config: SamplingConfig) -> SamplingParams:
    """The sampling settings of training rollouts."""
    return SamplingParams(
        temperature=config.sampling_temperature,
        top_p=config.sampling_top_p,
        min_tokens=config.sampling_min_tokens,
        max_tokens=config.sampling_max_tokens,
        stop=STOP_STRINGS[config.prompt],
    )


def rollout_metrics(rewards: dict[str, Any], rollouts: list[Rollout]) -> dict[str, float]:
    """What is logged of a rollout batch: train rewards, groups without signal, response lengths (tokens)."""
    lengths = [len(r.completion.token_ids) for r in rollouts]
    return {
        "train/reward": rewards["reward"],
        "train/format_reward": rewards["format_reward"],
        "train/answer_reward": rewards["answer_reward"],
        "train/zero_signal_fraction": rewards["zero_signal_fraction"],
        "train/response_length": sum(lengths) / len(lengths),
        "train/response_length_max": max(lengths),
        "train/cut_off": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
    }
