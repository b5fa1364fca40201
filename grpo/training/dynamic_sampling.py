"""Dynamic sampling (DAPO, arXiv 2503.14476, Section 3.2): a group whose rewards are all equal trains nothing, so another
question's takes its place.
"""

from __future__ import annotations

from grpo.common.records import Rollout
from grpo.learner.learner import Learner
from grpo.rollout.engine import derive_seed
from grpo.study.methods import GrpoConfig
from grpo.training.context import RunContext
from grpo.training.order import other_problems
from grpo.training.step import ask, of_the_task, reward, set_advantages


def replace_groups_without_signal(
    ctx: RunContext[GrpoConfig, Learner], step: int, rollouts: list[Rollout]
) -> tuple[list[Rollout], dict[str, float]]:
    """Ask other questions in the place of those whose groups have no signal, for at most ``dynamic_sampling_rounds`` rounds.

    A batch keeps its size: groups that have no signal after the last round stay. (DAPO samples until there are none.) What is
    asked depends on the run's seed, the step, the round and the rewards, so that nothing has to be saved for a resume.

    Args:
        rollouts: scored, of all processes.

    Returns:
        the batch to train on; what is logged of it, with how many rounds it took and how many groups were dropped.
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
            found = ask(setup, ctx.sampler, questions, derive_seed(setup.seed, "rollout", step, rounds))

        with log.phase("scoring"):
            found = reward(setup, found, world)

        for i, place in enumerate(places[: len(questions)]):
            groups[place] = found[i * size : (i + 1) * size]
        asked += questions
    rollouts = [rollout for group in groups for rollout in group]
    counts = {"dynamic_sampling/rounds": rounds, "dynamic_sampling/dropped_groups": len(asked) - len(groups)}
    return rollouts, set_advantages(config, rollouts) | of_the_task(setup, rollouts) | counts


def has_signal(group: list[Rollout]) -> bool:
    """Whether two of its rewards differ."""
    return len({rollout.rewards["reward"] for rollout in group}) > 1
