"""Dynamic sampling (DAPO, arXiv 2503.14476, Section 3.2): replace groups whose rewards are all equal.

Such a group has zero advantages and no gradient. Where long responses are punished (``overlong_buffer``), rewards are compared
without the punishment, so a group whose advantages come from it alone is replaced too.
"""

from __future__ import annotations

import torch

from grpo.common.records import Rollout
from grpo.learner.advantages import are_equal
from grpo.learner.learner import Learner
from grpo.rollout.engine import derive_seed
from grpo.study.methods import GrpoConfig
from grpo.training.context import RunContext
from grpo.training.order import other_problems
from grpo.training.step import reward, sample_groups, set_advantages


def replace_groups_without_signal(
    ctx: RunContext[GrpoConfig, Learner], step: int, rollouts: list[Rollout]
) -> tuple[list[Rollout], dict[str, float]]:
    """Replace groups without signal by groups of other questions, in at most ``dynamic_sampling_rounds`` rounds.

    The batch keeps its size: groups without signal after the last round stay. (DAPO samples until none is left.) The new
    questions depend on the run's seed, the step, the questions so far and the rewards, so a resume needs no saved state.

    Args:
        rollouts: the scored rollouts of all processes.

    Returns:
        the batch to train on, and its metrics, with the number of rounds and of dropped groups.
    """
    setup, config, log, world = ctx.setup, ctx.setup.config, ctx.log, ctx.sampler.world
    size = config.group_size
    groups = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
    asked, rounds = [group[0].problem for group in groups], 0
    for _ in range(config.dynamic_sampling_rounds):
        places = [i for i, group in enumerate(groups) if not has_signal(group)]
        questions = other_problems(setup.data, asked, setup.seed, step, len(places))
        if not questions:
            break
        rounds += 1
        with log.phase("rollout"):
            found = sample_groups(setup, ctx.sampler, questions, derive_seed(setup.seed, "rollout", step, rounds))

        with log.phase("scoring"):
            found = reward(setup, found, world)

        for i, place in enumerate(places[: len(questions)]):
            groups[place] = found[i * size : (i + 1) * size]
        asked += questions
    rollouts = [rollout for group in groups for rollout in group]
    counts = {"dynamic_sampling/rounds": rounds, "dynamic_sampling/dropped_groups": len(asked) - len(groups)}
    return rollouts, set_advantages(setup, rollouts) | counts


def has_signal(group: list[Rollout]) -> bool:
    """Whether two rewards of the group differ, without the punishment of long responses (DAPO's Eq. 11 filters by accuracy)."""
    rewards = torch.tensor([rollout.rewards["reward"] - rollout.punishment for rollout in group], dtype=torch.float64)
    counted = rewards[~rewards.isnan()]
    return len(counted) > 0 and not are_equal(counted[None]).item()
