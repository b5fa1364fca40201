"""GSPO, CISPO, clip-higher, RLOO, token_mean, KL and entropy in the loss, overlong shaping: by hand."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import (
    ADVANTAGES,
    LENGTHS,
    REWARDS,
    config,
    learner_of,
    rollouts,
)
from torch import Tensor
from torch.testing import assert_close
from training_parts import scored

from grpo.common.errors import UserError
from grpo.handouts import grpo_microbatch_train_step
from grpo.learner.kl import kl_term
from grpo.learner.learner import Learner
from grpo.learner.losses import LOSSES, LossInputs
from grpo.learner.masking import response_weights
from grpo.models.lora import add_adapters
from grpo.study.methods import OBJECTIVES, GrpoConfig, Lora, apply_overrides, resolved
from grpo.study.settings import LearnerSettings
from grpo.tasks.rewards import soft_overlong_punishment

# ------------------------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("above", [89.0, 200.0, 3e4])
@pytest.mark.parametrize("name", ["grpo_clip", "gspo", "cispo", "grpo_no_clip"])
def test_a_ratio_beyond_float32_is_clipped_like_any_other(name: str, above: float) -> None:
    """exp(89) is beyond float32. By hand: -min(rho A, 1.2 A) for CISPO times log pi; without an advantage nothing, and nothing
    is learnt from tokens that are clipped; where nothing clips, the gradient points the right way."""
    old = torch.tensor([[-above - 1.0], [-above - 1.0], [-above - 1.0], [-1.0]])
    log_probs, advantages = torch.full((4, 1), -1.0).requires_grad_(), torch.tensor([[2.0], [0.0], [-2.0], [-2.0]])
    inputs = LossInputs(log_probs, old, advantages, advantages, torch.ones(4, 1, dtype=torch.bool), cliprange=0.2)
    loss, metrics = LOSSES[name](inputs)
    loss.sum().backward()
    assert log_probs.grad is not None and loss.isfinite().all() and log_probs.grad.isfinite().all()
    clipped = name != "grpo_no_clip"
    assert loss[0].item() == pytest.approx(-2.4 * (-1.0 if name == "cispo" else 1.0)) if clipped else loss[0] < -1e30
    assert loss[1].item() == log_probs.grad[1].item() == 0.0
    expected = {"cispo": [-2.4, 2.4, 2.0], "grpo_no_clip": [-math.inf, math.inf, 2.0]}.get(name, [0.0, math.inf, 2.0])
    found = [g.item() if abs(g) < 1e30 else math.copysign(math.inf, g) for g in log_probs.grad[[0, 2, 3], 0]]
    assert found == pytest.approx(expected)
    assert [each.tolist() for each in metrics.values()] == (
        [[[True], [name == "cispo"], [name == "cispo"], [False]]] if clipped else []
    )
    assert inputs.ratio.isfinite().all()


# Of each loss ratios, advantages and clip ranges, and what follows: each token's loss, and the gradient of their sum at the
# log-probabilities, which is -ratio A where nothing is clipped. Old log-probabilities are -1; a ratio of 0 is no token.
HALVES, CLIP = [[2.0, 1.0, 0.5]] * 2, {"cliprange": 0.25}
BY_HAND: dict[str, tuple[str, Any, list[float], dict[str, float], Any, Any]] = {
    "policy gradient": ("reinforce_with_baseline", [[1, 1]], [3], CLIP, [[3, 3]], [[-3, -3]]),
    "clipped": ("grpo_clip", HALVES, [3, -1], CLIP, [[-3.75, -3, -1.5], [2, 1, 0.75]], [[0, -3, -1.5], [2, 1, 0]]),
    "unclipped": ("grpo_no_clip", HALVES, [3, -1], CLIP, [[-6, -3, -1.5], [2, 1, 0.5]], [[-6, -3, -1.5], [2, 1, 0.5]]),
    # 1.25 lies within 1.3 and above 1.2; below 1 the lower range counts.
    "clip-higher": ("grpo_clip", [[1.25, 1.5, 0.7], [1.25, 0.9, 0.7]], [2, -1], {"cliprange": 0.2, "cliprange_high": 0.3},
        [[-2.5, -2.6, -1.4], [1.25, 0.9, 0.8]], [[-2.5, 0, -1.4], [1.25, 0.9, 0]]),
    # Ratios 4 and 1 of two tokens have the geometric mean 2. Each of the two has the loss -A s, and ds / dlog pi = s / 2.
    "GSPO": ("gspo", [[4, 1, 0]], [-3], {"cliprange": 0.5}, [[6, 6, 0]], [[6, 6, 0]]),
    "GSPO, clipped": ("gspo", [[4, 1, 0]], [3], {"cliprange": 0.5, "cliprange_high": 0.75}, [[-5.25, -5.25, 0]], [[0, 0, 0]]),
    "GSPO without tokens": ("gspo", [[2], [0]], [1, 1], {"cliprange": 2.0}, [[-2], [0]], [[-2], [0]]),
    # The weight is capped, the gradient stays; without a lower bound. Log-probabilities are log rho - 1.
    "CISPO": ("cispo", [[0.1, 2, 9]], [2], {"cliprange": 0.2, "cliprange_high": 4.0},
        [[-0.2 * (math.log(0.1) - 1), -4 * (math.log(2) - 1), -10 * (math.log(9) - 1)]], [[-0.2, -4, -10]]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "ratios", "advantages", "clip", "loss", "gradient"), BY_HAND.values(), ids=BY_HAND)
def test_a_loss_and_its_gradient_by_hand(
    name: str, ratios: list[list[float]], advantages: list[float], clip: dict[str, float], loss: Any, gradient: Any
) -> None:
    ratio, column = torch.tensor(ratios, dtype=torch.float32), torch.tensor(advantages, dtype=torch.float32)[:, None]
    old, mask = torch.full_like(ratio, -1.0), ratio > 0
    log_probs = (old + ratio.clamp(min=1e-9).log()).requires_grad_()
    found = torch.where(mask, LOSSES[name](LossInputs(log_probs, old, column, column, mask, **clip))[0], 0.0)
    found.sum().backward()
    assert_close((found.detach(), log_probs.grad), (torch.tensor(loss).float(), torch.tensor(gradient).float()))


def test_every_token_of_the_batch_weighs_alike() -> None:
    lengths = torch.tensor([4, 0, 1])
    assert_close(response_weights(lengths, "token_mean", 3, 1), torch.full((3,), 0.2))
    assert response_weights(torch.zeros(2), "token_mean", 2, 1).isfinite().all()
    policy, mask, advantages = torch.full((2, 2), -1.0, requires_grad=True), torch.ones(2, 2), torch.ones(2, 1)
    with pytest.raises(ValueError, match="token_mean needs all 4 lengths"):  # a microbatch does not know the others'
        grpo_microbatch_train_step(
            policy, mask, 2, "reinforce_with_baseline", advantages=advantages, length_normalization="token_mean"
        )


@pytest.mark.parametrize(("length", "punishment"), [(0, 0.0), (12, 0.0), (13, -0.25), (15, -0.75), (16, -1.0), (20, -1.0)])
def test_overlong_punishment_by_hand(length: int, punishment: float) -> None:
    assert soft_overlong_punishment(length, max_tokens=16, buffer=4) == punishment


def test_the_kl_terms_gradient_is_that_of_the_reverse_divergence() -> None:
    """Averaged over a whole vocabulary; its values average to KL(policy || reference)."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    divergence = (policy.exp() * (policy - reference)).sum()
    reverse = (reference.exp() * (reference - policy)).sum()
    expected = (policy.exp().detach() * kl_term(policy, reference)).sum()
    assert expected.item() == pytest.approx(divergence.item(), rel=1e-12)
    found, *exact = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (expected, divergence, reverse))
    assert_close(found, exact[1])
    assert (exact[0] - exact[1]).norm() > 0.1 * exact[0].norm()


# ------------------------------------------------------------------------------------------------------------ the learner


def test_kl_in_the_loss_is_to_the_base_below_the_adapters(model: Any) -> None:
    lora = Lora(rank=2, alpha=4, targets=["q_proj", "v_proj"])
    start = copy.deepcopy(model)
    add_adapters(model, lora, seed=0)
    with torch.no_grad():  # what a run has once it has been trained
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    learner = Learner(model, config(lora=lora, kl_coefficient=1.0), 0, LearnerSettings(max_tokens_per_microbatch=64))
    assert learner.reference is None
    expected = learner_of(start).log_probs(rollouts())
    assert_close(learner.reference_log_probs(rollouts()), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(torch.cat(learner.log_probs(rollouts())), torch.cat(expected), atol=1e-3)


SEEN: list[tuple[Any, ...]] = []


def looks_around(inputs: LossInputs, which: dict[str, list[str]]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that records its inputs."""
    assert which == {"any": ["yaml", "value"]}
    if inputs.batch_tokens == sum(LENGTHS):  # not the trial's
        assert inputs.groups is not None and inputs.engine_log_probs is not None
        rows = zip(inputs.groups, inputs.lengths, inputs.engine_log_probs, inputs.mask, strict=True)
        SEEN.extend(
            (group.item(), length.item(), engine[mask].tolist(), inputs.batch_responses) for group, length, engine, mask in rows
        )
    return -inputs.log_probs * inputs.advantages, {}


@pytest.mark.parametrize("budget", [None, 24])
def test_a_loss_of_ones_own_sees_the_whole_batch_however_it_is_cut(model: Any, budget: int | None) -> None:
    options = {"which": {"any": ["yaml", "value"]}}
    loss = {"loss_type": f"{__name__}:looks_around", "loss_options": options}
    learner = learner_of(model, budget, **loss, gradient_accumulation_steps=4)
    batch = scored(rollouts(), REWARDS, ADVANTAGES)
    for i, rollout in enumerate(batch):
        rollout.group = i // 4
        rollout.completion = replace(rollout.completion, log_probs=tuple(float(-i) for _ in rollout.completion.token_ids))
    seen = sys.modules[__name__].SEEN
    seen.clear()
    learner.update(batch)
    assert sorted(seen) == sorted((i // 4, n, [float(-i)] * n, 8) for i, n in enumerate(LENGTHS))


# ------------------------------------------------------------------------------------------------------------- settings


def test_an_objective_in_an_arm_stands_for_its_settings_and_leaves_none_of_anothers() -> None:
    assert {tuple(sorted(values)) for values in OBJECTIVES.values()} == {tuple(sorted(OBJECTIVES["grpo"]))}
    base = GrpoConfig()
    own = resolved(base, {"objective": "dapo", "cliprange_high": 0.4}, "arm")
    dapo = apply_overrides(base, own, "arm")
    assert (dapo.loss_type, dapo.cliprange_high, dapo.length_normalization) == ("grpo_clip", 0.4, "token_mean")
    after = apply_overrides(dapo, resolved(dapo, {"objective": "dr_grpo"}, "arm"), "arm")
    assert (after.cliprange_high, after.length_normalization, after.use_std_normalization) == (None, "masked_normalize", False)
    with pytest.raises(UserError, match=r"arm.objective: no objective 'ppo' \(known: grpo, dr_grpo, dapo, gspo"):
        resolved(base, {"objective": "ppo"}, "arm")


def test_what_is_off_leaves_no_trace_in_a_record() -> None:
    on = {
        "overlong_buffer": 8,
        "baseline": "leave_one_out",
        "cliprange_high": 0.3,
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "dynamic_sampling_rounds": 2,
        "lora": {"rank": 1, "alpha": 32, "targets": None},
    }
    off = GrpoConfig().model_dump()
    assert not on.keys() & off
    assert GrpoConfig(**on).model_dump() == off | on


def test_a_studys_file_may_name_an_objective(tmp_path: Path) -> None:
    from grpo.study.compose import compose

    file = tmp_path / "mine.yaml"
    file.write_text("extends: mini\ngrpo:\n  # as published\n  objective: gspo\n  cliprange: 1e-3\n")
    composed = compose(file)["grpo"]
    assert "objective" not in composed
    assert (composed["loss_type"], composed["cliprange"], composed["cliprange_high"]) == ("gspo", 1e-3, 4e-4)
