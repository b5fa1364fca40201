"""Expert iteration: training data, batches, and learning; on stubs, then on a tiny model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from training_parts import read_csv, train

from grpo.common.records import Completion
from grpo.learner.microbatches import Texts
from grpo.rollout.engine import SamplingParams
from grpo.study.methods import ExpertIterationConfig
from grpo.training.expert_iteration import train_by_expert_iteration

CONFIG = ExpertIterationConfig(
    n_ei_steps=3,
    ei_batch_size=6,
    group_size=4,
    epochs_per_ei_step=2,
    learning_rate=1e-2,
    train_batch_size=5,
    gradient_accumulation_steps=1,
    normalize_constant=7.0,
    sampling_temperature=0.9,
    sampling_top_p=0.8,
    sampling_min_tokens=2,
    sampling_max_tokens=6,
    prompt="question_only",
)

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and response, as ids


def is_right(text: str, _: str) -> dict[str, float]:
    """All of the reward, or half of it for a right answer in the wrong form."""
    right = text == "right"
    return {"reward": 1.0 if right else 0.5, "format_reward": float(right), "answer_reward": 1.0}


class ScriptedEngine:
    """The first few completions of a step are right; their ids are unique and differ from those of their text."""

    policy_version = 0

    def __init__(self, right: Sequence[int]):
        self.right = right
        self.asked: list[tuple[SamplingParams, int, int]] = []
        self.correct: list[list[Pair]] = []
        self.versions: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int) -> list[list[Completion]]:
        step = len(self.asked)
        self.asked.append((params, n, seed))
        groups, correct, number = [], [], 0
        for prompt in prompts:
            group = []
            for _ in range(n):
                ids, right = (step, 100 + number, 300 - number), number < self.right[step]
                group.append(Completion(ids, "right" if right else "wrong", (-0.5,) * 3, "stop" if right else "length", step))
                correct += [(tuple(prompt), ids)] if right else []
                number += 1
            groups.append(group)
        self.correct.append(correct)
        return groups

    def synchronize(self, model: Any, policy_version: int) -> None:
        self.versions.append(policy_version)


class SpyLearner:
    """Records its batches."""

    model = None

    def __init__(self) -> None:
        self.batches: list[list[Pair]] = []
        self.constants: set[float] = set()

    def sft_update(self, texts: Texts, normalize_constant: float) -> dict[str, float]:
        self.batches.append(list(zip(texts.prompts, texts.responses, strict=True)))
        self.constants.add(normalize_constant)
        numbers = dict.fromkeys(("loss", "gradient_norm", "token_entropy", "mean_nll", "learning_rate"), 1.0)
        return numbers | {"skipped_update": 0.0}

    def loss_scale(self) -> dict[str, float]:
        return {}


def iterate(
    engine: Any, learner: Any, tokenizer: Any, folder: Path, config: ExpertIterationConfig = CONFIG, seed: int = 0,
    validate: Any = lambda step, updates: False,
) -> list[dict[str, float]]:  # fmt: skip
    """Run the loop, and return the history."""
    given = {"engine": engine, "learner": learner, "seed": seed, "reward": is_right, "validation": validate}
    train(train_by_expert_iteration, config, None, tokenizer, folder, **given)
    return read_csv(folder / "history.csv")


# --------------------------------------------------------------------------------------------------- what is trained on


def test_only_correct_rollouts_are_trained_on_with_the_ids_that_were_sampled(tokenizer: Any, tmp_path: Path) -> None:
    """Of 24 rollouts a step 12, 5 and 24 are right; two epochs in batches of five. Half of a reward teaches nothing."""
    engine, learner = ScriptedEngine([12, 5, 24]), SpyLearner()
    history = iterate(engine, learner, tokenizer, tmp_path / "run", CONFIG.model_copy(update={"prompt": "r1_zero"}))
    sizes = [[5, 5, 2] * 2, [5] * 2, [5, 5, 5, 5, 4] * 2]
    assert [len(batch) for batch in learner.batches] == [size for step in sizes for size in step]
    assert [row["step"] for row in history] == [step for step, of in enumerate(sizes, start=1) for _ in of]
    batches = iter(learner.batches)
    for correct, of_step in zip(engine.correct, sizes, strict=True):
        epochs = [[pair for _ in range(len(of_step) // 2) for pair in next(batches)] for _ in range(2)]
        assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(correct)
        assert epochs[0] != epochs[1]  # each time in another order
        assert correct not in epochs  # and in none that follows the questions
    assert learner.constants == {7.0}
    params = SamplingParams(temperature=0.9, top_p=0.8, min_tokens=2, max_tokens=6, stop=("</answer>",))
    assert {asked[:2] for asked in engine.asked} == {(params, 4)}
    assert engine.versions == [1, 2, 3]
    for step, right in zip((1, 2, 3), (12, 5, 24), strict=True):
        rows = [row for row in history if row["step"] == step]
        assert {row["train/correct"] for row in rows} == {right}
        assert {row["train/solved"] for row in rows} == {math.ceil(right / 4) / 6}
        assert {row["train/format_reward"] for row in rows} == {right / 24}
        assert {row["train/reward"] for row in rows} == {0.5 + right / 48}
        assert {row["train/cut_off"] for row in rows} == {1 - right / 24}
        assert {(row["train/answer_reward"], row["train/response_length"]) for row in rows} == {(1.0, 3.0)}
        assert {row["train/grader_timeouts"] for row in rows} == {0.0}


def test_every_step_and_every_run_has_an_order_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    orders, sampled = [], []
    for seed in (0, 1):
        engine, learner = ScriptedEngine([24] * 3), SpyLearner()
        config = CONFIG.model_copy(update={"train_batch_size": 24, "epochs_per_ei_step": 1})
        iterate(engine, learner, tokenizer, tmp_path / str(seed), config, seed)
        orders += [tuple(response[1] for _, response in batch) for batch in learner.batches]  # the second id is the place
        sampled += [seed_of_step for _, _, seed_of_step in engine.asked]
    assert len(orders) == len(set(orders)) == len(set(sampled)) == 6


def test_a_step_without_a_correct_rollout_trains_nothing_and_is_logged(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends where validation says so."""
    engine, learner, validated = ScriptedEngine([3, 0, 3]), SpyLearner(), []

    def validate(step: int, updates: list[dict[str, float]]) -> bool:
        validated.append((step, len(updates)))
        return step == 3

    config = CONFIG.model_copy(update={"n_ei_steps": 4})
    history = iterate(engine, learner, tokenizer, tmp_path / "run", config, validate=validate)
    assert [len(batch) for batch in learner.batches] == [3] * 4
    assert validated == [(0, 0), (1, 2), (2, 0), (3, 2)]
    assert [row["step"] for row in history] == [1, 1, 2, 3, 3]
    assert engine.versions == [1, 2, 3]
    nothing = history[2]
    for name in ("loss", "gradient_norm", "token_entropy", "mean_nll"):
        assert math.isnan(nothing[name])
        assert all(row[name] == 1.0 for row in history if row is not nothing)
    assert (nothing["train/correct"], nothing["train/solved"], nothing["skipped_update"]) == (0.0, 0.0, 0.0)
    assert "step 2: none of 24 rollouts has reward 1, so nothing was trained" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- a tiny model


def test_expert_iteration_raises_the_reward(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    sizes = {"n_ei_steps": 8, "ei_batch_size": 16, "train_batch_size": 32, "sampling_min_tokens": 0}
    train(train_by_expert_iteration, CONFIG.model_copy(update=sizes), model, tokenizer, tmp_path)
    rewards = list({row["step"]: row["train/reward"] for row in read_csv(tmp_path / "history.csv")}.values())
    assert len(rewards) == 8
    assert rewards[0] < 0.6
    assert rewards[-1] > 0.85
