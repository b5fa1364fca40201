"""The learner: special batches, clipping, restoring, skipped updates; its gradients are in test_gradients.py."""

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
    REWARDS,
    config,
    last_gradients,
    learner_of,
    log_softmax_alone,
    rollout,
    rollouts,
    rollouts_of,
    updated,
)
from model_parts import own_model
from torch import Tensor
from training_parts import same_weights, saved_every, scored

from grpo.common.errors import UserError
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of
from grpo.study.methods import OBJECTIVES
from grpo.study.settings import LearnerSettings
from grpo.training.step import train_on


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def relative(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference between the two, relative to the largest element of the tensor it stands in."""
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in b)


# ------------------------------------------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("objective", ["gspo", "dapo"])
def test_in_half_precision_nothing_is_clipped_before_anything_was_learnt(objective: str, packing: bool) -> None:
    """The weights that sampled: all ratios are 1 and the divergence from the starting weights is 0, exactly, however long the
    responses are that another train batch has."""
    policy = own_model(hidden_size=64, intermediate_size=128, num_hidden_layers=4, initializer_range=0.1).to(torch.bfloat16)
    values = OBJECTIVES[objective] | {"rollout_batch_size": 32, "train_batch_size": 16, "kl_coefficient": 0.1}
    settings = LearnerSettings(max_tokens_per_microbatch=300, packing=packing, dtype="bfloat16")
    learner = Learner(policy, config(**values, sampling_max_tokens=64, learning_rate=1e-6), 0, settings)
    lengths = [[1 + (7 * g + 13 * k) % 60 for k in range(4)] for g in range(8)]
    batch = rollouts_of(lengths, [5 + 3 * g for g in range(8)], 512)
    batch = scored(batch, REWARDS.repeat(4), ADVANTAGES.repeat(4))
    first, _ = train_on(learner.config, learner, batch, version=0)  # type: ignore[arg-type]
    assert (first["ratio_min"], first["ratio_max"], first["clip_fraction"], first["kl_loss"]) == (1.0, 1.0, 0.0, 0.0)
    assert [rollout.group for rollout in batch] == [i // learner.config.group_size for i in range(32)]  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------------- special cases


@pytest.mark.parametrize("objective", ["grpo", "dapo", "gspo", "cispo"])
def test_an_update_with_a_ratio_beyond_float32_is_taken(model: Any, objective: str) -> None:
    """The tokens of good responses have become far likelier than they were: they are clipped, and the others are trained on."""
    learner = learner_of(model, **OBJECTIVES[objective], kl_coefficient=0.1, importance_cap=2.0)
    batch, far = rollouts(), torch.tensor([0.0, 0, 0, 300, 0, 300, 0, 0])  # their advantages are 1 and .75
    now = learner.log_probs(batch)
    batch = scored(batch, REWARDS, ADVANTAGES, [lp - each for lp, each in zip(now, far, strict=True)])
    for one, reference in zip(batch, now, strict=True):
        one.reference_log_probs = reference
    metrics = learner.update(batch)
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["skipped_update"] == 0.0
    assert metrics["clip_fraction"] == pytest.approx((LENGTHS[3] + LENGTHS[5]) / sum(LENGTHS))


@pytest.mark.parametrize("pad", [512, -1, None])
def test_any_token_may_pad(model: Any, pad: int | None) -> None:
    """Also one that the model lacks; the responses are padded together."""
    learners = [
        Learner(copy.deepcopy(model), config(), token, LearnerSettings(max_tokens_per_microbatch=99, packing=False))
        for token in (pad, 3)
    ]
    found, expected = ({"gradients": last_gradients(learner)} for learner in learners)
    for learner in learners:
        learner.update(scored(rollouts(), REWARDS, ADVANTAGES))
    assert relative(found["gradients"], expected["gradients"]) == 0.0


@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_a_prompt_without_tokens_is_refused(model: Any, budget: int | None, packing: bool) -> None:
    learner, without = learner_of(model, budget, packing), [*rollouts()[:7], rollout(0, 3, seed=7)]
    before = weights(learner.model)
    for use in (
        learner.update,
        learner.log_probs,
        learner.token_entropies,
        lambda batch: learner.sft_update(texts_of(batch)),
    ):
        with pytest.raises(UserError, match="prompt 8 of 8 has no tokens"):
            use(scored(without, REWARDS, ADVANTAGES))
    assert relative(weights(learner.model), before) == 0.0


def test_the_gradient_is_clipped_and_its_norm_before_that_reported(model: Any) -> None:
    (free, unclipped), (bound, clipped) = (
        updated(learner_of(model, max_grad_norm=norm), ADVANTAGES * 100) for norm in (1e9, 1.0)
    )
    norm = math.sqrt(sum(g.square().sum().item() for g in unclipped.values()))
    assert norm > 2.0
    assert free["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert bound["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert math.sqrt(sum(g.square().sum().item() for g in clipped.values())) == pytest.approx(1.0, rel=1e-4)
    assert relative(clipped, {name: g / norm for name, g in unclipped.items()}) < 1e-4


def test_the_optimizer_is_the_handouts(model: Any) -> None:
    learner = learner_of(model, learning_rate=2e-3)
    metrics, gradients = updated(learner)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True).step()
    assert same_weights(learner.model, model) and metrics["learning_rate"] == 2e-3


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
    assert same_weights(fresh, model)


# ------------------------------------------------------------------------------------------- gradients that are not finite


def optimizer_state(learner: Learner) -> list[Tensor]:
    return [t.clone() for of_weight in learner.optimizer.adamw.state_dict()["state"].values() for t in of_weight.values()]


@pytest.mark.parametrize(
    ("loss_type", "bad"),
    # A reward that is NaN stands for one that abstains, and counts as 0.
    [("reinforce_with_baseline", math.inf), ("reinforce_with_baseline", math.nan), ("no_baseline", math.inf)],
)
def test_an_update_without_a_finite_gradient_is_skipped(model: Any, loss_type: str, bad: float) -> None:
    """Weights and optimizer do not change, and the next update equals that of a learner without the bad batch."""
    settings = config(loss_type=loss_type, gradient_accumulation_steps=2, max_grad_norm=1.0)
    one = torch.tensor([1.0, 0, 0, bad, 0, 1, 1, 1])
    rewards, advantages = (one, ADVANTAGES) if loss_type == "no_baseline" else (REWARDS, one)
    twin, learner = (Learner(each, settings, 0) for each in (copy.deepcopy(model), model))
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
    assert same_weights(model, twin.model)


# ---------------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("steps", [1, 8])
def test_entropy_is_the_mean_over_response_tokens_only(model: Any, steps: int) -> None:
    by_response = [torch.distributions.Categorical(logits=log_softmax_alone(model, r)).entropy().tolist() for r in rollouts()]
    by_token = list(itertools.chain(*by_response))
    assert len(by_token) == sum(LENGTHS)
    learner = learner_of(model, gradient_accumulation_steps=steps)
    expected = [sum(values) / len(values) for values in by_response]
    assert learner.token_entropies(rollouts()) == pytest.approx(expected, rel=1e-5)
    metrics = learner.update(scored(rollouts(), REWARDS, ADVANTAGES))
    assert metrics["token_entropy"] == pytest.approx(sum(by_token) / len(by_token), rel=1e-5)


def test_settings_of_adamw_reach_it_and_are_recorded_only_where_they_differ(model: Any) -> None:
    for changes, expected in (({}, (0.0, (0.9, 0.95), 1e-8)), (ADAM, (0.3, (0.5, 0.6), 1e-3))):
        group = learner_of(model, **changes).optimizer.adamw.param_groups[0]
        assert (group["weight_decay"], group["betas"], group["eps"]) == expected
        assert ADAM.keys() & config(**changes).model_dump().keys() == changes.keys()


ADAM = {"weight_decay": 0.3, "adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3}
