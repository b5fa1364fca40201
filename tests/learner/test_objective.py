"""The objective's pure functions, the handouts' and published ones, against numbers worked out by hand and torch."""

import copy
import math
import sys
from collections.abc import Sequence
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
    flat,
    last_gradients,
    learner_of,
    log_probs_alone,
    rollouts,
)
from pydantic import ValidationError
from torch import Tensor
from torch.testing import assert_close
from training_parts import scored

from grpo.common.errors import UserError
from grpo.handouts import (
    compute_entropy,
    compute_group_normalized_rewards,
    compute_policy_gradient_loss,
    grpo_microbatch_train_step,
    masked_mean,
)
from grpo.learner.advantages import normalize_within_groups, reward_statistics
from grpo.learner.learner import Learner
from grpo.learner.losses import (
    LOSSES,
    LossInputs,
    estimate_kl,
    kl_term,
    masked_normalize,
    response_weights,
)
from grpo.learner.microbatches import pad_and_shift
from grpo.models.lora import add_adapters
from grpo.study.compose import compose
from grpo.study.config import OBJECTIVES, GrpoConfig, LearnerSettings, Lora, apply_overrides, resolved


def normalized(rewards: Sequence[float], *how: Any) -> tuple[Tensor, dict[str, float]]:
    """Advantages of these rewards, in groups of ``how``'s first, and the statistics."""
    advantages = normalize_within_groups(torch.tensor(rewards, dtype=torch.float64), *how)
    scores = [{"reward": reward, "format_reward": 1.0, "answer_reward": 0.0} for reward in rewards]
    return advantages, reward_statistics(scores, advantages, how[0])


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize("function", [masked_normalize, masked_mean])
def test_masked_out_elements_leak_neither_value_nor_gradient(function: Any) -> None:
    values = tensor([1.0, float("nan"), 3.0, float("inf")]).requires_grad_()
    result = function(values, tensor([1, 0, 1, 0]))
    result.backward()
    assert_close(result.detach(), torch.tensor(4.0 if function is masked_normalize else 2.0))
    kept = 1.0 if function is masked_normalize else 0.5
    assert_close(values.grad, tensor([kept, 0.0, kept, 0.0]))


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_entropy_of_huge_logits_and_an_end_of_text_that_is_also_the_padding(offset: float) -> None:
    assert_close(compute_entropy(tensor([0.0, 0.0]) + offset), tensor(math.log(2)), atol=2e-3, rtol=0)
    one_apart = 0.0 if offset > 0 else math.log(3)
    assert_close(compute_entropy(tensor([offset, 0.0, 0.0, 0.0])), tensor(one_apart), atol=2e-3, rtol=0)
    result = pad_and_shift([[5], [5, 6]], [[7, 0], [7, 8, 9]], pad_token_id=0)  # it was sampled, so it counts
    assert result["labels"].tolist() == [[7, 0, 0, 0], [6, 7, 8, 9]]
    assert result["response_mask"].int().tolist() == [[1, 1, 0, 0], [0, 1, 1, 1]]


def test_length_normalization_example_of_the_handout() -> None:
    """CS336 assignment 5, "Thinking about length normalization": two responses of 4 and 7 tokens, both of advantage 2."""
    mask = tensor([1] * 4 + [0] * 3, [1] * 7)
    advantages = tensor([2.0], [2.0])

    ratio = torch.ones(2, 7, requires_grad=True)
    per_response = masked_mean(ratio * advantages, mask, dim=1)
    assert_close(per_response.detach(), tensor(2.0, 2.0))
    per_response.mean().backward()
    assert_close(ratio.grad, tensor([0.25] * 4 + [0.0] * 3, [0.1429] * 7), atol=5e-5, rtol=0)

    ratio = torch.ones(2, 7, requires_grad=True)
    per_response = masked_normalize(ratio * advantages, mask, dim=1, constant_normalizer=7)
    assert_close(per_response.detach(), tensor(1.1429, 2.0), atol=5e-5, rtol=0)
    per_response.mean().backward()
    assert_close(ratio.grad, tensor([0.1429] * 4 + [0.0] * 3, [0.1429] * 7), atol=5e-5, rtol=0)


# Sums of equal numbers in another order; and 1e6, whose neighbours are 1e-10 apart.
ROUNDED = [[0.1 + 0.2, 0.3, 0.3], [0.7 + 0.1, 0.8, 0.1 + 0.7], [sum([0.1] * 10), 1.0, 1.0], [0.1 + 0.2 - 0.3, 0.0, 0.0]]
ROUNDED += [[1e6 * x for x in ROUNDED[0]], [-x for x in ROUNDED[1]]]


@pytest.mark.parametrize(
    "rewards", [*ROUNDED, *([reward] * size for reward in (0.0, 1.0, 0.1, 0.3, 0.7) for size in (2, 6, 7, 8))]
)
@pytest.mark.parametrize("how", [(0.0, True, "leave_one_out"), (0.0, False, "leave_one_out"), (1e-6, True)], ids=str)
def test_a_group_of_equal_rewards_has_no_advantage(rewards: list[float], how: tuple[Any, ...]) -> None:
    """Exactly zero: AdamW turns any gradient, however small, into a step of full size. So where they differ by rounding."""
    advantages, metadata = normalized(rewards, len(rewards), *how)
    assert advantages.tolist() == [0.0] * len(rewards) and metadata["zero_signal_fraction"] == 1.0


@pytest.mark.parametrize("apart", [1e-3, 1e-6, 1e-8])
def test_rewards_that_differ_by_little_are_not_equal(apart: float) -> None:
    advantages = normalize_within_groups(torch.tensor([0.3, 0.3 + apart], dtype=torch.float64), 2, 0.0, True)
    assert advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


@pytest.mark.parametrize("offset", [0.0, 0.1, 2.0**24, 1e9, -1e12])
def test_advantages_do_not_depend_on_what_all_rewards_have_in_common(offset: float) -> None:
    """By hand: 0, 1, 2 and 3 are -1.5, -.5, .5 and 1.5 from their mean, and their standard deviation is sqrt(5 / 3)."""
    advantages, metadata = normalized([offset + k for k in range(4)], 4, 0.0, True)
    assert_close(advantages, tensor(-1.5, -0.5, 0.5, 1.5) / math.sqrt(5 / 3), atol=1e-4, rtol=0)
    assert advantages.dtype == torch.float32
    assert metadata["reward"] == pytest.approx(offset + 1.5, rel=1e-15) and metadata["zero_signal_fraction"] == 0.0
    assert metadata["reward_std"] == pytest.approx(math.sqrt(5 / 4), rel=1e-4)


@pytest.mark.parametrize("wrong", [1e39, -1e39, math.inf])
@pytest.mark.parametrize("others", [[0.0, 0.0, 1.0], "equal"])
def test_rewards_that_float32_does_not_represent_are_refused(wrong: float, others: Any) -> None:
    values = [wrong] * 4 if others == "equal" else [wrong, *others]
    with pytest.raises(UserError, match=r"reward: rewards from .* do not fit float32, in which losses are computed"):
        normalized(values, 4, 1e-6, True)


NAN = math.nan


@pytest.mark.parametrize(
    ("std", "baseline", "expected"),
    [
        (False, "group_mean", [0.5, 0.0, -1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (False, "leave_one_out", [0.75, 0.0, -1.5, 0.75, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        # The unbiased variance of 1.5, 0 and 1.5 is 3/4.
        (True, "group_mean", [0.5 / 0.75**0.5, 0.0, -1 / 0.75**0.5, 0.5 / 0.75**0.5, *[0.0] * 8]),
    ],
)
def test_a_response_without_a_reward_counts_in_no_mean(std: bool, baseline: str, expected: list[float]) -> None:
    """In groups with three, one, two equal and no rewards."""
    rewards = [1.5, NAN, 0.0, 1.5, NAN, NAN, NAN, 2.0, *[NAN] * 4]
    rewards[8:10] = [0.5, 0.5]
    advantages, metadata = normalized(rewards, 4, 0.0, std, baseline)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6)
    assert metadata["reward"] == 1.0 and (metadata["reward_min"], metadata["reward_max"]) == (0.0, 2.0)
    assert metadata["zero_signal_fraction"] == pytest.approx(2 / 3) and metadata["reward_std"] == pytest.approx(0.5**0.5)


def test_without_any_reward_there_is_no_advantage_and_no_group_may_be_ragged() -> None:
    advantages, metadata = normalized([NAN] * 4, 2, 1e-6, True)
    assert advantages.tolist() == [0.0] * 4 and math.isnan(metadata["reward"]) and metadata["zero_signal_fraction"] == 1.0
    with pytest.raises(UserError, match=r"7 rewards.*groups of 4"):
        normalize_within_groups(torch.zeros(7), 4, 1e-6, True)


def test_group_normalized_rewards_and_their_metadata() -> None:
    def score(response: str, truth: str) -> dict[str, float]:
        return dict.fromkeys(("reward", "answer_reward"), float(response == truth)) | {"format_reward": float(response != "?")}

    responses, truths = ["3", "3", "?", "4", "7", "8"], ["3", "4", "3", "3", "7", "8"]
    advantages, raw, metadata = compute_group_normalized_rewards(score, responses, truths, 2, 1e-6, False)
    assert (raw.tolist(), advantages.tolist()) == ([1, 0, 0, 0, 1, 1], [0.5, -0.5, 0, 0, 0, 0])
    rewards = {"reward": 0.5, "reward_std": 0.5, "reward_min": 0.0, "reward_max": 1.0}
    assert metadata == pytest.approx(rewards | {"format_reward": 5 / 6, "answer_reward": 0.5, "zero_signal_fraction": 2 / 3})


def test_a_missing_argument_is_named() -> None:
    column, policy = torch.ones(2, 1), torch.full((2, 3), -1.0)
    arguments: dict[str, Any] = {"raw_rewards": column, "advantages": column, "old_log_probs": policy, "cliprange": 0.2}
    needed = {"no_baseline": {"raw_rewards"}, "reinforce_with_baseline": {"advantages"}}
    needed |= {"grpo_no_clip": {"advantages", "old_log_probs"}, "GRPO-Clip": {"advantages", "old_log_probs", "cliprange"}}
    for loss_type, names in (needed | {"grpo_clip": needed["GRPO-Clip"]}).items():
        compute_policy_gradient_loss(policy, loss_type, **arguments)
        for missing in names:
            with pytest.raises(ValueError, match=missing):
                compute_policy_gradient_loss(policy, loss_type, **{**arguments, missing: None})


@pytest.mark.parametrize(
    ("normalization", "loss", "gradient"),
    [
        # Responses: 2 * (1 + 2) / 2 = 3, -(4 + 6 + 8) / 3 = -6 and one without tokens, their mean -1, over 2 steps -.5
        ("masked_mean", -0.5, [[-1 / 6, -1 / 6, 0.0], [1 / 18] * 3, [0.0] * 3]),
        # 6 / 6 = 1 and -18 / 6 = -3, mean -2/3, over 2 steps -1/3
        ("masked_normalize", -1 / 3, [[-1 / 18, -1 / 18, 0.0], [1 / 36] * 3, [0.0] * 3]),
        # 6 / 3 = 2 and -18 / 3 = -6, mean -4/3, over 2 steps -2/3
        ("microbatch_longest", -2 / 3, [[-1 / 9, -1 / 9, 0.0], [1 / 18] * 3, [0.0] * 3]),
    ],
)
def test_grpo_microbatch_step_by_hand(normalization: str, loss: float, gradient: Sequence[Sequence[float]]) -> None:
    """A response without tokens adds nothing, but counts as a response."""
    policy = tensor([-1.0, -2.0, -9.0], [-4.0, -6.0, -8.0], [-3.0, -5.0, -7.0]).requires_grad_()
    advantages, mask = tensor([2.0], [-1.0], [9.0]), tensor([1, 1, 0], [1, 1, 1], [0, 0, 0])
    how: dict[str, Any] = {"length_normalization": normalization, "constant_normalizer": 6.0, "advantages": advantages}
    for times in (1, 2):  # gradients add up
        got, metadata = grpo_microbatch_train_step(policy, mask, 2, "reinforce_with_baseline", **how)
        assert_close(got, torch.tensor(loss))
        assert not got.requires_grad and metadata == {}
        assert_close(policy.grad, times * tensor(*gradient))
    assert grpo_microbatch_train_step(policy, torch.zeros(3, 3), 2, "reinforce_with_baseline", **how)[0] == 0.0
    assert_close(policy.grad, 2 * tensor(*gradient))


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


def test_every_token_of_the_batch_weighs_alike_and_what_cannot_be_computed_is_refused() -> None:
    assert_close(response_weights(torch.tensor([4, 0, 1]), "token_mean", 3, 1), torch.full((3,), 0.2))
    assert response_weights(torch.zeros(2), "token_mean", 2, 1).isfinite().all()
    assert response_weights(torch.tensor([4, 0, 1]), "masked_mean", 3, 1).tolist() == pytest.approx([1 / 12, 1 / 3, 1 / 3])
    policy, mask, advantages = torch.full((2, 2), -1.0, requires_grad=True), torch.ones(2, 2), torch.ones(2, 1)
    how = {"advantages": advantages, "length_normalization": "token_mean"}
    with pytest.raises(ValueError, match="token_mean needs all 4 lengths"):  # a microbatch does not know the others'
        grpo_microbatch_train_step(policy, mask, 2, "reinforce_with_baseline", **how)
    for name, told in (("masked_normalize", "constant_normalizer"), ("median", "median")):
        with pytest.raises(ValueError, match=told):
            response_weights(torch.ones(3), name, 3, 3)


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
    assert which == {"any": ["yaml", "value"]} and inputs.entropies is not None and not inputs.entropies.requires_grad
    if inputs.batch_tokens == sum(LENGTHS):  # not the trial's
        assert inputs.groups is not None and inputs.engine_log_probs is not None
        rows = zip(inputs.groups, inputs.lengths, inputs.engine_log_probs, inputs.mask, strict=True)
        SEEN.extend(
            (group.item(), length.item(), engine[mask].tolist(), inputs.batch_responses) for group, length, engine, mask in rows
        )
    return -inputs.log_probs * inputs.entropies, {"seen": inputs.entropies}


@pytest.mark.parametrize("budget", [None, 24])
def test_a_loss_of_ones_own_sees_the_whole_batch_however_it_is_cut(model: Any, budget: int | None) -> None:
    """Weighed by entropies, log-probabilities have another loss; the mean of these is what the learner measures."""
    loss = {"loss_type": f"{__name__}:looks_around", "loss_options": {"which": {"any": ["yaml", "value"]}}}
    learner = learner_of(model, budget, **loss, gradient_accumulation_steps=4)
    batch = scored(rollouts(), REWARDS, ADVANTAGES)
    entropies = [entropy for _, entropy in learner._compute(batch, 8)]
    for i, rollout in enumerate(batch):
        rollout.group = i // 4
        rollout.completion = replace(rollout.completion, log_probs=tuple(float(-i) for _ in rollout.completion.token_ids))
    seen = sys.modules[__name__].SEEN
    seen.clear()
    gradients = last_gradients(learner)
    metrics = learner.update(batch)
    assert sorted(seen) == sorted((i // 4, n, [float(-i)] * n, 8) for i, n in enumerate(LENGTHS))
    assert metrics["seen"] == pytest.approx(metrics["token_entropy"], rel=1e-6)
    expected = sum((-e * log_probs_alone(model, r)).mean() for e, r in zip(entropies, batch, strict=True)) / 8
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5) and flat(gradients).norm() > 0


def test_an_objective_in_an_arm_or_a_file_stands_for_its_settings_and_leaves_none_of_anothers(tmp_path: Path) -> None:
    assert {tuple(sorted(values)) for values in OBJECTIVES.values()} == {tuple(sorted(OBJECTIVES["grpo"]))}
    base = GrpoConfig()
    own = resolved(base, {"objective": "dapo", "cliprange_high": 0.4}, "arm")
    dapo = apply_overrides(base, own, "arm")
    assert (dapo.loss_type, dapo.cliprange_high, dapo.length_normalization) == ("grpo_clip", 0.4, "token_mean")
    after = apply_overrides(dapo, resolved(dapo, {"objective": "dr_grpo"}, "arm"), "arm")
    assert (after.cliprange_high, after.length_normalization, after.use_std_normalization) == (None, "masked_normalize", False)
    with pytest.raises(UserError, match=r"arm.objective: no objective 'ppo' \(known: grpo, dr_grpo, dapo, gspo"):
        resolved(base, {"objective": "ppo"}, "arm")
    file = tmp_path / "mine.yaml"
    file.write_text("extends: mini\ngrpo:\n  # as published\n  objective: gspo\n  cliprange: 1e-3\n")
    composed = compose(file)["grpo"]
    assert "objective" not in composed
    assert (composed["loss_type"], composed["cliprange"], composed["cliprange_high"]) == ("gspo", 1e-3, 4e-4)


def test_what_is_off_leaves_no_trace_in_a_record() -> None:
    coefficients = {"cliprange_high": 0.3, "kl_coefficient": 0.1, "entropy_coefficient": 0.1, "warmup_steps": 3}
    names = {"baseline": "leave_one_out", "lr_scheduler_type": "cosine", "lora": {"rank": 1, "alpha": 32, "targets": None}}
    on = coefficients | names | {"overlong_buffer": 8, "dynamic_sampling_rounds": 2}
    off = GrpoConfig().model_dump()
    assert not on.keys() & off and GrpoConfig(**on).model_dump() == off | on
    with pytest.raises(ValidationError, match="importance_mode: without importance_cap"):
        GrpoConfig(importance_mode="sequence_truncate")


def test_estimates_of_the_kl() -> None:
    """Responses count by their tokens, and empty ones as responses; a policy that is the reference has no drift, nor -0.0."""
    policy, reference = ([torch.tensor(row) for row in rows] for rows in ([[-1.0] * 3, [-2.0], []], [[-2.0] * 3, [-1.0], []]))
    found = estimate_kl(policy, reference)
    for kind, n in (("per_token", 4), ("per_sequence", 3)):
        assert found[kind] == pytest.approx((3 - 1) / n)
        assert found[f"{kind}_low_variance"] == pytest.approx((3 / math.e + math.e - 2) / n)
    log_probs = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)) * 5 - 10
    for same in (log_probs[:, :0], log_probs):
        assert list(map(repr, estimate_kl([*same], [*same.clone()]).values())) == ["0.0"] * len(found)
    near = torch.tensor([-3.0], dtype=torch.float64)
    for r in (1e-6, -1e-6):  # r^2 / 2 is left, not exp(r) - r - 1
        assert estimate_kl([near], [near + r])["per_token_low_variance"] == pytest.approx(5e-13, rel=1e-3, abs=0)


def test_a_kl_term_beyond_float32_points_the_right_way() -> None:
    """The reference finds a token exp(200) times as likely: its log-probability is to rise."""
    log_probs = torch.tensor([-201.0, -1.0], requires_grad=True)
    term = kl_term(log_probs, torch.tensor([-1.0, -1.0]))
    term.sum().backward()
    assert term.isfinite().all() and log_probs.grad is not None and log_probs.grad.isfinite().all()
    assert log_probs.grad[0] <= -200.0 and log_probs.grad[1] == 0.0
