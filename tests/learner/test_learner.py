"""The learner: one optimizer step against gradients computed without it."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import (
    ADVANTAGES,
    LENGTHS,
    LOSS_TYPES,
    REWARDS,
    config,
    last_gradients,
    off_policy,
    rollout,
    rollouts,
)
from torch import Tensor
from torch.testing import assert_close
from training_parts import saved_every, scored

from grpo.common.records import Rollout
from grpo.learner.learner import Learner
from grpo.study.methods import GrpoConfig


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def one_update(
    model: Any, settings: GrpoConfig, advantages: Tensor = ADVANTAGES
) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    """Metrics, gradients and weights of one off-policy update of a copy of ``model``."""
    learner = Learner(copy.deepcopy(model), settings, pad_token_id=0)
    batch, found = rollouts(), last_gradients(learner)
    metrics = learner.update(scored(batch, REWARDS, advantages, off_policy(learner, batch)))
    return metrics, found, weights(learner.model)


def relative(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference between the two, relative to the largest element of the tensor it stands in."""
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in b)


# ----------------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("normalization", ["masked_mean", "masked_normalize"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_update_does_not_depend_on_the_microbatch_size(model: Any, loss_type: str, normalization: str) -> None:
    settings = {"loss_type": loss_type, "length_normalization": normalization}
    whole, whole_gradients, whole_weights = one_update(model, config(**settings))
    assert whole["gradient_norm"] > 1e-3
    for steps in (2, 4, 8):
        metrics, parts, after = one_update(model, config(**settings, gradient_accumulation_steps=steps))
        assert metrics == pytest.approx(whole, rel=1e-5, abs=1e-6)
        assert relative(parts, whole_gradients) < 1e-5
        # Adam's first step is rate * g / (|g| + 1e-8): where a gradient is almost zero, its rounding errors are magnified.
        for name, values in after.items():
            clear = whole_gradients[name].abs() > 1e-3 * whole_gradients[name].abs().max()
            assert clear.any()
            assert_close(values[clear], whole_weights[name][clear], rtol=1e-5, atol=1e-6)


def test_the_longest_of_the_microbatch_does_depend_on_it(model: Any) -> None:
    settings = {"loss_type": "grpo_no_clip", "length_normalization": "microbatch_longest"}
    _, whole, _ = one_update(model, config(**settings))
    for steps in (2, 4, 8):
        _, parts, _ = one_update(model, config(**settings, gradient_accumulation_steps=steps))
        assert relative(parts, whole) > 0.01
    # A microbatch of one response divides by that response's own length.
    _, own_length, _ = one_update(model, config(loss_type="grpo_no_clip", length_normalization="masked_mean"))
    assert relative(parts, own_length) < 1e-5


@pytest.mark.parametrize(
    ("normalization", "divisors", "responses"),
    [
        ("masked_mean", LENGTHS, 8),
        ("masked_normalize", (16,) * 8, 8),
        ("microbatch_longest", (12,) * 8, 8),
        ("masked_normalize", (16,) * 4, 4),  # a train batch that is smaller than its rollout batch
    ],
)
def test_gradient_against_a_loss_written_out(model: Any, normalization: str, divisors: tuple[int, ...], responses: int) -> None:
    """One response at a time, without padding."""
    settings = config(length_normalization=normalization, sampling_temperature=0.8, train_batch_size=responses)
    learner = Learner(copy.deepcopy(model), settings, pad_token_id=0)
    found, batch = last_gradients(learner), rollouts()[:responses]
    learner.update(scored(batch, REWARDS[:responses], ADVANTAGES[:responses], off_policy(learner, batch)))
    loss = torch.zeros(())
    for r, advantage, divisor in zip(batch, ADVANTAGES, divisors, strict=False):
        ids = torch.tensor([r.prompt_ids + r.completion.token_ids])
        log_probs = torch.log_softmax(model(ids).logits[0] / 0.8, dim=-1)
        for position, token in enumerate(r.completion.token_ids, start=len(r.prompt_ids) - 1):
            loss = loss - advantage * log_probs[position, token] / divisor / responses
    loss.backward()
    assert relative(found, gradients(model)) < 1e-4


# ------------------------------------------------------------------------------------------------------ log-probabilities


def test_log_probs_do_not_depend_on_what_a_rollout_is_batched_with(model: Any) -> None:
    batch = rollouts()
    together = Learner(model, config(), 0).log_probs(batch)
    alone = Learner(model, config(gradient_accumulation_steps=8), 0).log_probs(batch)
    assert [len(lp) for lp in together] == list(LENGTHS)
    for r, a, b in zip(batch, together, alone, strict=True):
        assert_close(a, b, atol=1e-5, rtol=1e-5)
        ids = torch.tensor([r.prompt_ids + r.completion.token_ids])
        exact = torch.log_softmax(model(ids).logits[0], dim=-1)[len(r.prompt_ids) - 1 : -1]
        assert_close(a, exact.gather(-1, torch.tensor(r.completion.token_ids)[:, None])[:, 0].detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("steps", [1, 4])
def test_before_any_update_every_ratio_is_exactly_one(model: Any, loss_type: str, steps: int) -> None:
    learner = Learner(model, config(loss_type=loss_type, gradient_accumulation_steps=steps), 0)
    batch = rollouts()
    for old in (learner.log_probs(batch), None):
        fresh = Learner(copy.deepcopy(model), learner.config, 0)
        metrics = fresh.update(scored(batch, REWARDS, ADVANTAGES, old))
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-12)
        assert metrics["clip_fraction"] == 0.0


# ---------------------------------------------------------------------------------------------------------- special cases


@pytest.mark.parametrize("loss_type", ["reinforce_with_baseline", "grpo_no_clip", "grpo_clip"])
def test_a_batch_without_signal_leaves_the_weights_as_they_are(model: Any, loss_type: str) -> None:
    before = weights(model)
    learner = Learner(model, config(loss_type=loss_type), 0)
    metrics = learner.update(scored(rollouts(), torch.ones(8), torch.zeros(8)))
    assert metrics["gradient_norm"] == metrics["skipped_update"] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in weights(model).items())
    learner.update(scored(rollouts(), REWARDS, ADVANTAGES))
    assert not any(torch.equal(p, before[name]) for name, p in weights(model).items())


@pytest.mark.parametrize("normalization", ["masked_mean", "masked_normalize"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_rollout_without_tokens_counts_as_a_response_and_nothing_else(model: Any, normalization: str, steps: int) -> None:
    """A batch of two responses and two empty ones has half the gradient of the batch of the two alone."""
    full = rollouts((5, 3))
    empty = [rollout(4, 0, seed=8), rollout(6, 0, seed=9)]
    settings = {"length_normalization": normalization, "group_size": 2}

    alone = Learner(copy.deepcopy(model), config(rollout_batch_size=2, train_batch_size=2, **settings), 0)
    of_alone = last_gradients(alone)
    expected = alone.update(scored(full, torch.ones(2), torch.tensor([1.0, -2.0])))
    learner = Learner(model, config(rollout_batch_size=4, train_batch_size=4, gradient_accumulation_steps=steps, **settings), 0)
    found = last_gradients(learner)
    # With 4 steps each empty response is a microbatch by itself, with 2 they share one, with 1 they stand among the others.
    metrics = learner.update(scored(full + empty, torch.ones(4), torch.tensor([1.0, -2.0, 3.0, 4.0])))

    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["loss"] == pytest.approx(expected["loss"] / 2, rel=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(expected["gradient_norm"] / 2, rel=1e-5)
    assert metrics["token_entropy"] == pytest.approx(expected["token_entropy"], rel=1e-5)
    assert relative(found, {name: g / 2 for name, g in of_alone.items()}) < 1e-5
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_gradient_is_clipped_and_its_norm_before_that_reported(model: Any) -> None:
    (free, unclipped, _), (bound, clipped, _) = (
        one_update(model, config(max_grad_norm=norm), ADVANTAGES * 100) for norm in (1e9, 1.0)
    )
    norm = math.sqrt(sum(g.square().sum().item() for g in unclipped.values()))
    assert norm > 2.0
    assert free["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert bound["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert math.sqrt(sum(g.square().sum().item() for g in clipped.values())) == pytest.approx(1.0, rel=1e-4)
    assert relative(clipped, {name: g / norm for name, g in unclipped.items()}) < 1e-4


def test_the_optimizer_is_the_handouts(model: Any) -> None:
    before = weights(model)
    learner = Learner(model, config(learning_rate=2e-3), 0)
    found = last_gradients(learner)
    metrics = learner.update(scored(rollouts(), REWARDS, ADVANTAGES))
    assert metrics["learning_rate"] == 2e-3
    expected = {name: value.clone().requires_grad_() for name, value in before.items()}
    for name, gradient in found.items():
        expected[name].grad = gradient
    torch.optim.AdamW(expected.values(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True).step()
    for name, value in weights(model).items():
        assert torch.equal(value, expected[name].detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_learner_that_is_restored_goes_on_bit_for_bit(model: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two updates, saved as a run saves them, and a third one. The state must include the moments, float32 copies of rounded
    weights, and float16's scale, which the second update halves.
    """

    def update(learner: Learner, seed: int) -> dict[str, float]:
        generator = torch.Generator().manual_seed(seed)
        return learner.update(scored(rollouts(), REWARDS, torch.randn(8, generator=generator)))

    fresh = copy.deepcopy(model.to(dtype))
    undisturbed = Learner(model, config(), 0)
    update(undisturbed, 1), update(undisturbed, 2)
    with saved_every(1, tmp_path, {"learner": undisturbed}) as saved:
        saved.save(2)
    expected = update(undisturbed, 3)
    assert expected["gradient_norm"] > 0 and expected.get("loss_scale", 2.0**15) == 2.0**15
    restored = Learner(fresh, config(), 0)
    saved_every(1, tmp_path, {"learner": restored}).restore()
    assert update(restored, 3) == expected
    for ours, theirs in zip(restored.optimizer.weights, undisturbed.optimizer.weights, strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(fresh).items())


# ------------------------------------------------------------------------------------------- gradients that are not finite


def optimizer_state(learner: Learner) -> list[Tensor]:
    return [t.clone() for of_weight in learner.optimizer.adamw.state_dict()["state"].values() for t in of_weight.values()]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("loss_type", ["reinforce_with_baseline", "no_baseline"])
def test_an_update_without_a_finite_gradient_is_skipped(model: Any, loss_type: str, bad: float) -> None:
    """Weights and optimizer do not change, and the next update equals that of a learner without the bad batch."""
    settings = config(loss_type=loss_type, gradient_accumulation_steps=2, max_grad_norm=1.0)
    one = torch.tensor([1.0, 0, 0, bad, 0, 1, 1, 1])
    rewards, advantages = (one, ADVANTAGES) if loss_type == "no_baseline" else (REWARDS, one)
    twin = Learner(copy.deepcopy(model), settings, 0)
    learner = Learner(model, settings, 0)
    for each in (learner, twin):
        assert each.update(scored(rollouts(), REWARDS, ADVANTAGES))["skipped_update"] == 0.0
    before, state = weights(model), optimizer_state(learner)
    assert len(state) == 3 * len(before)  # step, mean and mean square of each tensor

    metrics = learner.update(scored(rollouts(), rewards, advantages))
    assert metrics["skipped_update"] == 1.0
    assert not math.isfinite(metrics["gradient_norm"])
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert all(torch.equal(a, b) for a, b in zip(optimizer_state(learner), state, strict=True))

    after, expected = (each.update(scored(rollouts(), REWARDS, ADVANTAGES)) for each in (learner, twin))
    assert after == expected
    assert after["skipped_update"] == 0.0
    assert all(torch.equal(value, weights(twin.model)[name]) for name, value in weights(model).items())
    assert not any(torch.equal(value, before[name]) for name, value in weights(model).items())


# ---------------------------------------------------------------------------------------------------------------- metrics


def response_entropies(model: Any, batch: list[Rollout]) -> list[list[float]]:
    result = []
    for r in batch:
        logits = model(torch.tensor([r.prompt_ids + r.completion.token_ids])).logits[0, len(r.prompt_ids) - 1 : -1]
        result.append(torch.distributions.Categorical(logits=logits).entropy().tolist())
    return result


@pytest.mark.parametrize("steps", [1, 8])
def test_entropy_is_the_mean_over_response_tokens_only(model: Any, steps: int) -> None:
    by_response = response_entropies(model, rollouts())
    by_token = list(itertools.chain(*by_response))
    assert len(by_token) == sum(LENGTHS)
    learner = Learner(model, config(gradient_accumulation_steps=steps), 0)
    expected = [sum(values) / len(values) for values in by_response]
    assert learner.token_entropies(rollouts()) == pytest.approx(expected, rel=1e-5)
    metrics = learner.update(scored(rollouts(), REWARDS, ADVANTAGES))
    assert metrics["token_entropy"] == pytest.approx(sum(by_token) / len(by_token), rel=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_clip_fraction_counts_response_tokens_only(model: Any, steps: int) -> None:
    """All 5 tokens of the first response (good, ratio e^1) and the 1 of the second (bad, ratio e^-1) are clipped, of 43."""
    learner = Learner(model, config(loss_type="grpo_clip", gradient_accumulation_steps=steps), 0)
    shifts = [-1.0, 1.0, -1.0, 1.0, 0, 0, 0, 0]  # the third is bad with a risen ratio, the fourth good with a fallen one
    old = [lp + shift for lp, shift in zip(learner.log_probs(rollouts()), shifts, strict=True)]
    metrics = learner.update(scored(rollouts(), REWARDS, ADVANTAGES, old))
    assert metrics["clip_fraction"] == pytest.approx(6 / 43)
    assert metrics["ratio_max"] == pytest.approx(math.e, rel=1e-5)
    assert metrics["ratio_min"] == pytest.approx(1 / math.e, rel=1e-5)
    assert metrics["ratio_mean"] == pytest.approx((14 * math.e + 4 / math.e + 25) / 43, rel=1e-5)
