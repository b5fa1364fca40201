"""A run's context, and the parts of one training step: sampling, rewards, advantages, updates, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from grpo.common.records import Problem, Rollout
from grpo.common.world import ALONE, World
from grpo.evaluation.evaluate import summarize
from grpo.learner.advantages import are_equal, normalize_within_groups, own_advantages, reward_statistics
from grpo.learner.learner import Learner
from grpo.rollout.engine import SamplingParams, derive_seed
from grpo.rollout.sampling import Sampler, episode_measures, sample_rollouts, score_rollouts
from grpo.study.config import GrpoConfig, SamplingConfig, TrainingConfig
from grpo.tasks.rewards import ScoreFunction, soft_overlong_punishment
from grpo.tasks.task import Format, Task
from grpo.tracking.run_log import RunLog
from grpo.training.data import items_of_step, other_problems
from grpo.training.state import SavedState

Config = TypeVar("Config", bound=TrainingConfig)
AnyLearner = TypeVar("AnyLearner")  # a Learner; a RemoteLearner in an asynchronous run
Sampling = TypeVar("Sampling", bound=SamplingConfig)
Updates = list[dict[str, float]]  # the metrics of each optimizer step within one step of the loop


@dataclass(frozen=True)
class RunSetup(Generic[Config]):
    """Config, seed, data, format, score function and task of a run, known before a model is loaded. Ray actors receive it too.

    ``data``: the training problems; the training examples in supervised fine-tuning. ``score``: rewards rollouts, in training
    and in validation.
    """

    config: Config
    seed: int
    data: Sequence[Any]
    format: Format
    score: ScoreFunction
    task: Task


@dataclass(frozen=True)
class RunContext(Generic[Config, AnyLearner]):
    """One run, ready to be trained.

    ``validation``: called with step 0 and no updates, then with each step and its updates. It evaluates the policy if an
    evaluation is due, and returns True if the run ends here.
    """

    setup: RunSetup[Config]
    sampler: Sampler
    learner: AnyLearner
    log: RunLog
    saved: SavedState
    validation: Callable[[int, Updates], bool]

    def steps(self, loop_state: Callable[[], dict[str, Any]] = dict) -> Iterator[int]:
        """Yield the steps to train, from 1 or from where the run was resumed, and save the state between them.

        A new run first evaluates its starting policy (step 0). A loop that breaks saves no state for its last step.
        ``loop_state`` gives what the loop itself needs to resume. Raises ToBeResumed as :meth:`SavedState.save`.
        """
        if self.saved.step == 0:
            with self.log.phase("evaluation"):
                self.validation(0, [])
        for step in range(self.saved.step + 1, self.setup.config.n_steps + 1):
            yield step
            if self.saved.due(step):
                self.saved.save(step, loop_state())


def sample(setup: RunSetup[Sampling], sampler: Sampler, step: int, n_questions: int) -> list[Rollout]:
    """Sample a group of rollouts for each of the step's questions, of which this process takes its share.

    The same seed, step and weights give the same rollouts.
    """
    questions = items_of_step(setup.data, setup.seed, step, n_questions)
    return sample_groups(setup, sampler, questions, derive_seed(setup.seed, "rollout", step))


def sample_groups(setup: RunSetup[Sampling], sampler: Sampler, questions: Sequence[Problem], seed: int) -> list[Rollout]:
    """Sample ``group_size`` rollouts for each question of this process's share."""
    config = setup.config
    params = SamplingParams(
        temperature=config.sampling_temperature,
        top_p=config.sampling_top_p,
        min_tokens=config.sampling_min_tokens,
        max_tokens=config.sampling_max_tokens,
        stop=setup.format.stop,
    )
    return sample_rollouts(sampler, questions, params, config.group_size, seed)


def compute_rewards(setup: RunSetup[Sampling], rollouts: list[Rollout], world: World) -> list[Rollout]:
    """Set the rewards of this process's rollouts; return the rollouts of all processes, in the order of the questions.

    Rollouts that have rewards keep them. With ``overlong_buffer`` the training reward includes the length penalty; the
    validation reward does not.
    """
    if any(not rollout.rewards for rollout in rollouts):
        score_rollouts(setup.score, rollouts)
    if isinstance(setup.config, GrpoConfig) and (buffer := setup.config.overlong_buffer) is not None:
        for rollout in rollouts:
            rollout.length_penalty = soft_overlong_punishment(rollout.length, setup.config.sampling_max_tokens, buffer)
            rollout.rewards = rollout.rewards | {"reward": rollout.rewards["reward"] + rollout.length_penalty}
    return world.join(rollouts, each=setup.config.group_size)


def rewards_and_advantages(
    setup: RunSetup[GrpoConfig], rollouts: list[Rollout], world: World = ALONE
) -> tuple[list[Rollout], dict[str, float]]:
    """Compute the reward and the advantage of each rollout; return the rollouts of all processes, and their metrics."""
    rollouts = compute_rewards(setup, rollouts, world)
    return rollouts, set_advantages(setup, rollouts)


def set_advantages(setup: RunSetup[GrpoConfig], rollouts: list[Rollout]) -> dict[str, float]:
    """Compute the advantages of a scored batch in place; return its metrics."""
    config, scores = setup.config, [rollout.rewards for rollout in rollouts]
    size, rewards = config.group_size, torch.tensor([score["reward"] for score in scores], dtype=torch.float64)
    if config.advantage is None:
        std = config.use_std_normalization
        advantages = normalize_within_groups(rewards, size, config.advantage_eps, std, config.baseline)
    else:
        lengths = torch.tensor([rollout.length for rollout in rollouts], dtype=torch.float64)
        groups, lengths = rewards.view(-1, size), lengths.view(-1, size)
        advantages = own_advantages(config.advantage, config.advantage_options, groups, lengths)
    means = reward_statistics(scores, advantages, size)
    for rollout, advantage in zip(rollouts, advantages.tolist(), strict=True):
        rollout.advantage = advantage
    found = summarize(rollouts) | means | {"response_length_max": max(rollout.length for rollout in rollouts)}
    columns = (
        *("reward", "format_reward", "answer_reward", "zero_signal_fraction"),
        *("response_length", "response_length_max", "cut_off", "grader_timeouts"),
    )
    return {f"train/{name}": found[name] for name in columns} | task_metrics(setup, rollouts)


def task_metrics(setup: RunSetup[Sampling], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of a rollout batch that the run's task defines, and those of episodes."""
    found = setup.task.training_measures(rollouts) | episode_measures(rollouts)
    return {f"train/{name}": value for name, value in found.items()}


def replace_groups_without_signal(
    ctx: RunContext[GrpoConfig, Learner], step: int, rollouts: list[Rollout]
) -> tuple[list[Rollout], dict[str, float]]:
    """Replace groups without signal by groups of other questions, in at most ``dynamic_sampling_rounds`` rounds.

    Dynamic sampling (DAPO, arXiv 2503.14476, Section 3.2): a group whose rewards are all equal has zero advantages and no
    gradient. Where long responses are punished (``overlong_buffer``), rewards are compared without the punishment, so a group
    whose advantages come from it alone is replaced too.

    The batch keeps its size: groups without signal after the last round stay. (DAPO samples until none is left.) The new
    questions depend on the run's seed, the step, the questions so far and the rewards, so a resume needs no saved state.
    Returns the batch to train on, and its metrics, with the number of rounds and of dropped groups.
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
            found = compute_rewards(setup, found, world)

        for i, place in enumerate(places[: len(questions)]):
            groups[place] = found[i * size : (i + 1) * size]
        asked += questions
    rollouts = [rollout for group in groups for rollout in group]
    counts = {"dynamic_sampling/rounds": rounds, "dynamic_sampling/dropped_groups": len(asked) - len(groups)}
    return rollouts, set_advantages(setup, rollouts) | counts


def has_signal(group: list[Rollout]) -> bool:
    """Whether two rewards of the group differ, without the length penalty (DAPO's Eq. 11 filters by accuracy)."""
    rewards = torch.tensor([rollout.rewards["reward"] - rollout.length_penalty for rollout in group], dtype=torch.float64)
    counted = rewards[~rewards.isnan()]
    return len(counted) > 0 and not are_equal(counted[None]).item()


def update_policy(config: GrpoConfig, learner: Learner, rollouts: list[Rollout], version: int) -> Updates:
    """Take all optimizer steps on one rollout batch: each epoch cuts it into train batches. Return the metrics of each update.

    The denominator of the ratio pi / pi_old is the policy that sampled the tokens:

    - The learner's current weights sampled them: the learner computes the old log-probs before the first update, in the
      microbatches of the updates. With a single update they equal the current ones. So the first update's ratios are exactly 1.
    - Older weights sampled a rollout of the batch: the old log-probs are those that the engine reported.
    - ``importance_cap`` is set: the old log-probs are the learner's current ones in both cases, and importance weights correct
      from the engine's log-probs to these (the decoupled objective of Hilton et al. 2021, "Batch size-invariance for policy
      optimization", arXiv 2110.00641).

    With ``mask_truncated_completions`` a response that was cut off counts with its reward in the advantages, and as a response
    in the loss's mean, but its tokens are left out. ``version`` is the learner's policy, in GRPO steps.
    """
    if config.mask_truncated_completions:
        completions = [r.completion for r in rollouts]
        empty = [replace(one, token_ids=(), log_probs=(), observations=()) for one in completions]  # without loss or metrics
        cut_off = [one.finish_reason == "length" for one in completions]
        rollouts = [replace(r, completion=e) if cut else r for r, e, cut in zip(rollouts, empty, cut_off, strict=True)]
    old_log_probs: Sequence[torch.Tensor | None] = [None] * len(rollouts)
    stale = any(rollout.completion.policy_version != version for rollout in rollouts)
    if stale and config.importance_cap is None:
        old_log_probs = [torch.tensor(rollout.completion.log_probs) for rollout in rollouts]
    elif config.updates_per_rollout_batch > 1:
        old_log_probs = learner.log_probs(rollouts)
    reference: Sequence[torch.Tensor | None] = [None] * len(rollouts)
    if config.kl_coefficient:
        reference = learner.reference_log_probs(rollouts)
    for i, rollout in enumerate(rollouts):
        rollout.old_log_probs, rollout.reference_log_probs = old_log_probs[i], reference[i]
        rollout.group = i // config.group_size
    return [
        learner.update(rollouts[start : start + config.train_batch_size])
        for _ in range(config.epochs_per_rollout_batch)
        for start in range(0, config.rollout_batch_size, config.train_batch_size)
    ]


def lag_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Mean, smallest and largest lag of the response tokens: the learner's ``version`` minus that of the sampler."""
    lags = [(version - r.completion.policy_version, r.length) for r in rollouts]
    tokens = sum(n for _, n in lags)
    return {
        "lag_mean": sum(lag * n for lag, n in lags) / max(1, tokens),
        "lag_min": min(lag for lag, _ in lags),
        "lag_max": max(lag for lag, _ in lags),
    }
