"""Dynamic sampling: which groups are replaced, by which questions, how often, and reproducibly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from training_parts import NoMlflow, context, problems, setup_of

from grpo.common.records import Completion, Rollout
from grpo.rollout.engine import SamplingParams
from grpo.study.methods import GrpoConfig
from grpo.tasks.task import ScoredBatch
from grpo.tracking.run_log import RunLog
from grpo.training.data import items_of_step, other_problems
from grpo.training.step import has_signal, replace_groups_without_signal, sample, score

CONFIG = GrpoConfig(
    rollout_batch_size=12, train_batch_size=12, group_size=2, gradient_accumulation_steps=1, prompt="question_only",
    dynamic_sampling_rounds=2,
)  # fmt: skip
DATA = problems(24)
FIRST = [problem.id for problem in items_of_step(DATA, 0, 1, 6)]  # what is asked in the first step


class Scripted:
    """An engine that gives two answers to every question, and records the number of questions and the seed."""

    policy_version, context = 0, None

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def generate(self, prompts: Sequence[Any], params: SamplingParams, n: int, seed: int) -> list[list[Completion]]:
        self.calls.append((len(prompts), seed))
        return [[Completion((1,), text, (0.0,), "stop", 0) for text in ("yes", "no")] for _ in prompts]


class Step(NamedTuple):
    before: list[Rollout]
    after: list[Rollout]
    metrics: dict[str, float]
    calls: list[tuple[int, int]]


def step_of(tokenizer: Any, folder: Path, easy: set[str], n: int = 24, rounds: int = 2) -> Step:
    """A first step on ``n`` problems. All answers to an easy one have reward 1; of other groups only the first has."""

    def scored(rollouts: Sequence[Rollout]) -> ScoredBatch:
        right = [float(r.problem.id in easy or r.completion.text == "yes") for r in rollouts]
        rewards = [dict.fromkeys(("reward", "format_reward", "answer_reward"), each) for each in right]
        return ScoredBatch(rewards, [False] * len(right))

    config, engine, log = CONFIG.model_copy(update={"dynamic_sampling_rounds": rounds}), Scripted(), RunLog(folder, NoMlflow())  # type: ignore[arg-type]
    ctx = context(config, log, None, data=DATA[:n], engine=engine, learner=None, tokenizer=tokenizer)
    ctx = replace(ctx, setup=replace(ctx.setup, score=scored))
    before, _ = score(ctx.setup, sample(ctx.setup, ctx.sampler, 1, 6))
    after, metrics = replace_groups_without_signal(ctx, 1, list(before))
    return Step(before, after, metrics, engine.calls)


def questions(rollouts: list[Rollout]) -> list[str]:
    """The questions of a batch's groups of two."""
    assert all(one.problem == two.problem for one, two in zip(rollouts[::2], rollouts[1::2], strict=True))
    return [rollout.problem.id for rollout in rollouts[::2]]


def test_groups_without_signal_give_way_to_other_questions_and_all_others_stay(tokenizer: Any, tmp_path: Path) -> None:
    step = step_of(tokenizer, tmp_path, easy={FIRST[1], FIRST[4]})
    assert questions(step.before) == FIRST
    asked = questions(step.after)
    assert [asked[i] for i in (0, 2, 3, 5)] == [FIRST[i] for i in (0, 2, 3, 5)]
    assert not {asked[1], asked[4]} & set(FIRST) and asked[1] != asked[4]
    assert [count for count, _ in step.calls] == [6, 2] and step.calls[0][1] != step.calls[1][1]
    assert step.metrics["dynamic_sampling/rounds"] == 1 and step.metrics["dynamic_sampling/dropped_groups"] == 2
    assert step.metrics["train/zero_signal_fraction"] == 0 and step.metrics["train/reward"] == 0.5
    # By the definition: rewards of 1 and 0 are half a reward from their mean, and their standard deviation is the root of .5.
    assert [rollout.advantage for rollout in step.after] == pytest.approx([0.5**0.5, -(0.5**0.5)] * 6, rel=1e-5)


def test_a_step_in_which_every_group_has_signal_samples_once(tokenizer: Any, tmp_path: Path) -> None:
    step = step_of(tokenizer, tmp_path, easy=set())
    assert step.after == step.before and [count for count, _ in step.calls] == [6]
    assert step.metrics["dynamic_sampling/rounds"] == step.metrics["dynamic_sampling/dropped_groups"] == 0


def test_it_ends_after_so_many_rounds_or_when_every_question_was_asked(tokenizer: Any, tmp_path: Path) -> None:
    everything = {problem.id for problem in DATA}
    step = step_of(tokenizer, tmp_path, everything, rounds=2)
    assert [count for count, _ in step.calls] == [6, 6, 6] and len({seed for _, seed in step.calls}) == 3
    assert step.metrics["dynamic_sampling/dropped_groups"] == 12 and step.metrics["train/zero_signal_fraction"] == 1
    assert len(step.after) == 12 and not set(questions(step.after)) & set(questions(step.before))
    # Of eight questions two are left after the first six.
    few = step_of(tokenizer, tmp_path, everything, n=8, rounds=5)
    assert [count for count, _ in few.calls] == [6, 2] and len(few.after) == 12
    assert set(questions(few.after)) | set(questions(few.before)) == {problem.id for problem in DATA[:8]}


@pytest.mark.parametrize(("rewards", "signal"), [((0.5, 0.5), False), ((0.1 + 0.2, 0.3), False), ((1.0, 0.0), True)])
def test_the_punishment_of_long_responses_is_no_signal(rewards: tuple[float, float], signal: bool) -> None:
    """DAPO's Eq. 11 asks for right and wrong answers, whatever their lengths; the rewards are those that are trained on."""
    config = CONFIG.model_copy(update={"sampling_max_tokens": 8, "overlong_buffer": 4})
    lengths = (8, 4)
    group = [Rollout(DATA[0], (1,), Completion((1,) * n, "", (0.0,) * n, "stop")) for n in lengths]
    scores = [{"reward": each, "format_reward": 1.0, "answer_reward": 1.0} for each in rewards]
    setup = setup_of(config, DATA, score=lambda rollouts: ScoredBatch(scores, [False, False]))
    scored, metrics = score(setup, group)
    assert [one.rewards["reward"] for one in scored] == [rewards[0] - 1.0, rewards[1]]
    assert has_signal(scored) is signal and metrics["train/zero_signal_fraction"] == (rewards == (1.0, 0.0))


def test_what_is_asked_anew_depends_on_seed_step_and_round_alone() -> None:
    first = [other_problems(DATA, DATA[:6], seed, step, 4) for seed, step in ((0, 1), (0, 1), (1, 1), (0, 2))]
    assert first[0] == first[1] and first[0] != first[2] != first[3] != first[0]
    assert not set(first[0]) & set(DATA[:6])
