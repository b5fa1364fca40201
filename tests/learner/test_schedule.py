"""Learning rates: by hand, against transformers' schedulers, and as the optimizer uses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from grpo.learner.learner import Learner
from grpo.learner.microbatches import whole_texts
from grpo.learner.optimizer import learning_rate
from grpo.study.methods import GrpoConfig, SftConfig

TRANSFORMERS_NAMES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def sft(kind: str, warmup: int, steps: int) -> SftConfig:
    return SftConfig(learning_rate=0.8, lr_scheduler_type=kind, warmup_steps=warmup, n_sft_steps=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", TRANSFORMERS_NAMES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 12), (1, 12), (5, 12)])
def test_rates_are_those_of_transformers(kind: str, warmup: int, steps: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)
    scheduler = get_scheduler(TRANSFORMERS_NAMES[kind], optimizer, warmup, steps)
    for update in range(steps):
        assert learning_rate(sft(kind, warmup, steps), update) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-14)
        optimizer.step()
        scheduler.step()


def test_a_grpo_run_counts_updates_and_not_steps() -> None:
    """Four steps of two epochs of two train batches: 16 updates."""
    config = GrpoConfig(
        learning_rate=1.6, lr_scheduler_type="linear", n_grpo_steps=4, rollout_batch_size=16, train_batch_size=8,
        gradient_accumulation_steps=1, epochs_per_rollout_batch=2,
    )  # fmt: skip
    assert [learning_rate(config, update) for update in (0, 1, 15)] == pytest.approx([1.6, 1.5, 0.1])
    ragged = GrpoConfig(rollout_batch_size=24, train_batch_size=12, group_size=8, gradient_accumulation_steps=1)
    assert ragged.updates_per_rollout_batch == 2  # a train batch of a group and a half


def test_an_update_is_taken_with_the_rate_that_it_logs_and_a_restored_learner_goes_on(model: Any) -> None:
    """AdamW's first step is as long as the rate in each weight that has a gradient."""
    learner = Learner(model, sft("linear", 1, 5).model_copy(update={"max_grad_norm": 1e9, "learning_rate": 1e-3}), 0)
    head = model.lm_head.weight
    rates, moved = [], []
    for _ in range(2):
        before = head.detach().clone()
        rates.append(learner.sft_update(whole_texts([(5, 9)], [(2, 7)]))["learning_rate"])
        moved.append((head - before).abs().max().item())
    assert rates == [0.0, 1e-3]
    assert moved == [0.0, pytest.approx(1e-3, rel=0.6)]
    again = Learner(model, learner.config, 0)
    again.restore(learner.state())
    assert again.sft_update(whole_texts([(5, 9)], [(2, 7)]))["learning_rate"] == pytest.approx(7.5e-4)
