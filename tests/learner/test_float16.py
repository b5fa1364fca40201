"""float16: the gradient, the loss scale, and the agreement of sampling and learner."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from learner_parts import ADVANTAGES, REWARDS, config, learner_of, rollouts
from model_parts import own_model
from torch import Tensor
from training_parts import scored

from grpo.learner import optimizer as optimizer_module
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of
from grpo.learner.optimizer import LossScale, Optimizer


def gradient(
    model: Any, dtype: torch.dtype, budget: int | None = 40, factor: float = 1.0, scale: float = 1024.0, **changes: Any
) -> tuple[Tensor, dict[str, float]]:
    """The gradient of an update that AdamW gets, and the update's metrics."""
    learner = learner_of(copy.deepcopy(model).to(dtype), budget, **changes)
    if learner.optimizer.scale is not None:
        learner.optimizer.scale.value = scale
    seen: list[Tensor] = []
    learner.optimizer.adamw.step = lambda: seen.extend(g.flatten().clone() for g in learner.optimizer.gradients())
    metrics = learner.update(scored(rollouts(), REWARDS, factor * ADVANTAGES))
    return torch.cat(seen), metrics


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("budget", [None, 40], ids=["padded", "packed"])
@pytest.mark.parametrize("own", [False, True], ids=["transformers", "own"])
def test_gradients_are_nearer_to_float32s_than_bfloat16s_are(fresh_model: Any, own: bool, budget: int | None) -> None:
    """Within 2% of their norm; bfloat16, with three binary digits less, is more than four times as far away."""
    model = own_model(initializer_range=0.02) if own else fresh_model
    exact, half, brain = (gradient(model, dtype, budget)[0] for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert 0 < apart(half, exact) < 2e-2
    assert apart(brain, exact) > 4 * apart(half, exact)


def test_gradients_below_float16s_smallest_number_are_there_by_the_scale(fresh_model: Any) -> None:
    exact = gradient(fresh_model, torch.float32, factor=1e-7)[0]
    assert apart(gradient(fresh_model, torch.float16, factor=1e-7, scale=2.0**24)[0], exact) < 2e-2
    assert apart(gradient(fresh_model, torch.float16, factor=1e-7, scale=1.0)[0], exact) > 0.5


def test_gradients_are_clipped_to_their_own_norm_and_not_to_the_scaled_one(fresh_model: Any) -> None:
    clipped, metrics = gradient(fresh_model, torch.float16, max_grad_norm=0.5)
    assert clipped.norm() == pytest.approx(0.5, rel=1e-4)
    assert metrics["gradient_norm"] == pytest.approx(gradient(fresh_model, torch.float32)[1]["gradient_norm"], rel=1e-2)
    assert metrics["loss_scale"] == 1024.0


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**14])
def test_the_scale_drops_out_of_a_sum_over_microbatches_to_the_last_bit(scale: float) -> None:
    layer = torch.nn.Linear(3, 1, bias=False, dtype=torch.float16)
    optimizer = Optimizer(layer, 1e-3)
    assert optimizer.scale is not None
    optimizer.scale.value = scale
    inputs = [torch.tensor([[0.1, -2.3, 1.7]], dtype=torch.float16) * k for k in (1, 0.3, 0.7)]
    for x in inputs:
        optimizer.backward(layer(x).sum())
    optimizer.clip(max_norm=1e9)
    assert torch.equal(optimizer.gradients()[0], sum(x.float() for x in inputs))


def test_a_gradient_too_large_for_float16_skips_the_step_and_halves_the_scale(model: Any) -> None:
    learner = Learner(model.half(), config(), 0)
    optimizer, scale = learner.optimizer, learner.optimizer.scale
    assert scale is not None and scale.value == 2.0**16
    scale.value = 2.0**20
    before = [weight.detach().clone() for weight in (*optimizer.weights, *model.parameters())]
    batch = scored(rollouts(), REWARDS, ADVANTAGES)
    found = [learner.update(batch)]
    assert all(torch.equal(a, b) for a, b in zip((*optimizer.weights, *model.parameters()), before, strict=True))
    assert not optimizer.adamw.state_dict()["state"]
    while found[-1]["skipped_update"]:
        found.append(learner.update(batch))
    assert len(found) > 2 and [row["loss_scale"] for row in found] == [2.0 ** (20 - k) for k in range(len(found))]
    assert all(math.isfinite(row["loss"]) for row in found) and math.isfinite(found[-1]["gradient_norm"])
    assert not any(torch.equal(weight, old) for weight, old in zip(optimizer.weights, before, strict=False))


def test_a_loss_that_is_not_finite_says_nothing_of_the_scale(model: Any) -> None:
    learner = Learner(model.half(), config(), 0)
    learner.update(scored(rollouts(), REWARDS, ADVANTAGES * math.nan))
    assert learner.loss_scale() == {"loss_scale": 2.0**16}


def test_the_scale_doubles_after_enough_finite_gradients_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "STEPS_TO_GROW", 3)
    scale, found = LossScale(), []
    for finite in (True, True, False, True, True, True, True):
        scale.follow(finite)
        found.append(scale.value / 2.0**16)
    assert found == [1, 1, 0.5, 0.5, 0.5, 1, 1]
    saved, resumed = (Optimizer(torch.nn.Linear(3, 1, dtype=torch.float16), 1e-3) for _ in range(2))
    assert saved.scale is not None and resumed.scale is not None
    for finite in (False, True, True):
        saved.scale.follow(finite)
    resumed.restore(saved.state())
    resumed.scale.follow(True)  # the third in a row
    assert resumed.scale.value == 2.0**16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_know_nothing_of_a_scale(fresh_model: Any, dtype: torch.dtype) -> None:
    learner = learner_of(copy.deepcopy(fresh_model).to(dtype), 40)
    assert set(learner.optimizer.state()) == {"adamw", "weights"}
    assert "loss_scale" not in learner.update(scored(rollouts(), REWARDS, ADVANTAGES))
    assert "loss_scale" not in learner.sft_update(texts_of(rollouts()))
