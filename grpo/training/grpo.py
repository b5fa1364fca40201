"""The GRPO loop: DeepSeekMath (arXiv 2402.03300), Algorithm 1, with verified rewards in place of a reward model."""

from __future__ import annotations

from grpo.common.records import response_tokens
from grpo.learner.learner import Learner
from grpo.study.config import GrpoConfig
from grpo.training.step import RunContext, replace_groups_without_signal, rewards_and_advantages, sample, update_policy


def train_grpo(ctx: RunContext[GrpoConfig, Learner]) -> None:
    """Train ``ctx.learner.model`` for ``n_grpo_steps`` steps, or until ``ctx.validation`` ends the run."""
    config, log, learner, engine = ctx.setup.config, ctx.log, ctx.learner, ctx.sampler.engine
    for step in ctx.steps():
        with log.phase("rollout"):
            rollouts = sample(ctx.setup, ctx.sampler, step, config.n_prompts_per_rollout_batch)

        with log.phase("scoring"):
            rollouts, metrics = rewards_and_advantages(ctx.setup, rollouts, ctx.sampler.world)

        if config.dynamic_sampling_rounds:
            rollouts, metrics = replace_groups_without_signal(ctx, step, rollouts)

        with log.phase("training"):
            updates = update_policy(config, learner, rollouts, version=step - 1)

        with log.phase("synchronization"):
            engine.synchronize(learner.model, policy_version=step)

        with log.phase("evaluation"):
            over = ctx.validation(step, updates)

        log.step(step, updates, metrics, response_tokens(rollouts))
        if over:
            break
