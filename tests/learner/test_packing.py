"""Packed rows give the gradients of the padded reference, for any loss, lengths and budget."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_parts import flat, last_gradients, learner_of, log_probs_alone, rollouts_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_parts import scored

from grpo.common.records import Rollout, response_tokens
from grpo.learner import chunked
from grpo.learner.chunked import chunked_log_probs, log_probs_of
from grpo.learner.microbatches import texts_of
from grpo.models.packing import fill_rows, pack

LOSSES = ("no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip")
NORMALIZATIONS = ("masked_mean", "masked_normalize", "microbatch_longest")
BUDGETS = (1, 25, 60, 10_000)


def gradient(
    model: Any, rollouts: list[Rollout], budget: int | None, packing: bool = True, **changes: Any
) -> tuple[Tensor, dict[str, float]]:
    """All gradients of one off-policy update in one vector, and the update's metrics."""
    sizes = {"rollout_batch_size": len(rollouts), "train_batch_size": len(rollouts), "group_size": 2, "sampling_max_tokens": 32}
    learner = learner_of(model, budget, packing, **sizes | changes)
    generator = torch.Generator().manual_seed(1)
    rewards, advantages = torch.rand(len(rollouts), generator=generator), torch.randn(len(rollouts), generator=generator)
    current = learner_of(model, **sizes).log_probs(rollouts)
    old = [row + 0.4 * torch.randn(len(row), generator=generator) for row in current]
    found = last_gradients(learner)
    metrics = learner.update(scored(rollouts, rewards, advantages, old))
    return flat(found), metrics


def assert_equal_gradients(found: tuple[Tensor, dict[str, float]], expected: tuple[Tensor, dict[str, float]]) -> None:
    assert expected[0].norm() > 0
    assert (found[0] - expected[0]).norm() / expected[0].norm() < 1e-5
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6)


LENGTHS = [[5, 1, 9, 3], [2, 2, 1, 1], [12, 7, 1, 4], [3, 8, 6, 2]]
PROMPTS = [7, 1, 4, 12]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(("loss", "normalization"), list(itertools.product(LOSSES, NORMALIZATIONS)))
def test_gradients_equal_those_of_padded_microbatches_of_a_fixed_size(
    fresh_model: Any, loss: str, normalization: str, packing: bool
) -> None:
    """With budgets of one response at a time, of some, and of all, and with an empty response."""
    rollouts = rollouts_of([*LENGTHS[:3], [3, 0, 6, 2]], PROMPTS, fresh_model.config.vocab_size)
    settings = {"loss_type": loss, "length_normalization": normalization, "gradient_accumulation_steps": 4}
    settings |= {"sampling_temperature": 0.6}
    expected = gradient(fresh_model, rollouts, None, **settings)
    for budget in BUDGETS:
        assert_equal_gradients(gradient(fresh_model, rollouts, budget, packing=packing, **settings), expected)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=1, max_size=5).filter(
        lambda groups: sum(map(sum, groups)) > 0
    ),
    prompt=st.lists(st.integers(1, 6), min_size=5, max_size=5),
    budget=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_gradients_equal_for_any_lengths(
    fresh_model: Any, lengths: list[list[int]], prompt: list[int], budget: int, seed: int
) -> None:
    """Empty responses too: they count as sequences and add nothing."""
    rollouts = rollouts_of(lengths, prompt[: len(lengths)], fresh_model.config.vocab_size, seed)
    expected = gradient(fresh_model, rollouts, None, loss_type="grpo_clip")
    assert_equal_gradients(gradient(fresh_model, rollouts, budget, loss_type="grpo_clip"), expected)


@pytest.mark.parametrize("group_size", [1, 2, 16])
def test_any_group_size_and_equal_prompts_of_two_groups(fresh_model: Any, group_size: int) -> None:
    lengths = [[1 + (i * 5 + g) % 7 for i in range(group_size)] for g in range(3)]
    rollouts = rollouts_of(lengths, [3, 5, 4], fresh_model.config.vocab_size)
    rollouts += [Rollout(r.problem, rollouts[0].prompt_ids, r.completion, {}) for r in rollouts[-group_size:]]
    expected = gradient(fresh_model, rollouts, None)
    for budget in BUDGETS:
        assert_equal_gradients(gradient(fresh_model, rollouts, budget), expected)


@pytest.mark.parametrize("constant", [1.0, 7.0])
def test_supervised_gradients_equal_those_of_the_whole_batch_at_once(fresh_model: Any, constant: float) -> None:
    """Against -sum log p / constant, averaged over responses, from the model's own logits; the empty one counts.

    There are 18 responses where ``train_batch_size`` is 24, as in the last batch of expert iteration, and whatever temperature
    they were sampled at, they are learnt at 1.
    """
    rollouts = rollouts_of([*LENGTHS, [0, 1]], [*PROMPTS, 1], fresh_model.config.vocab_size)
    reference = copy.deepcopy(fresh_model)
    loss = -sum(log_probs_alone(reference, rollout).sum() for rollout in rollouts) / constant / len(rollouts)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    sizes = {"rollout_batch_size": 24, "train_batch_size": 24, "gradient_accumulation_steps": 4}
    for budget in (None, *BUDGETS):
        learner = learner_of(fresh_model, budget, **sizes, sampling_temperature=0.6)
        gradients = last_gradients(learner)
        metrics = learner.sft_update(texts_of(rollouts), constant)
        found = flat(gradients)
        assert (found - expected).norm() / expected.norm() < 1e-5
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["mean_nll"] == pytest.approx(loss.item() * constant * 18 / response_tokens(rollouts), rel=1e-5)
        assert metrics["gradient_norm"] == pytest.approx(expected.norm().item(), rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------- rows


@given(
    lengths=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), min_size=1, max_size=6),
    budget=st.integers(1, 80),
)
def test_every_response_stands_in_one_row_and_rows_keep_to_the_budget(lengths: list[list[int]], budget: int) -> None:
    prompts = [(g,) * (1 + g % 3) for g, group in enumerate(lengths) for _ in group]
    responses = [tuple(range(n)) for group in lengths for n in group]
    rows = fill_rows(prompts, responses, budget)
    members = sorted(i for row in rows for segment in row for i in segment.members)
    assert members == [i for i, response in enumerate(responses) if response]
    for row in rows:
        assert sum(s.tokens for s in row) <= budget or (len(row) == 1 and len(row[0].members) == 1)
        for segment in row:
            assert len({prompts[i] for i in segment.members}) == 1
            assert segment.tokens == len(prompts[segment.members[0]]) + sum(len(responses[i]) - 1 for i in segment.members)
        packed = pack(row, prompts, responses, [range(len(ids)) for ids in responses])
        assert packed.input_ids.shape[1] == sum(s.tokens for s in row)  # no padding
    assert [row[0].tokens for row in rows] == sorted((row[0].tokens for row in rows), reverse=True)


def test_a_row_by_hand() -> None:
    prompts, responses = [(10, 11), (10, 11), (20,)], [(1, 2, 3), (4,), (5, 6)]
    ((first, second),) = fill_rows(prompts, responses, 100)
    exactly_full = [[[s.members for s in row] for row in fill_rows(prompts, responses, budget)] for budget in (6, 4)]
    assert exactly_full == [[[[0, 1], [2]]], [[[0, 1]], [[2]]]]
    assert (first.members, first.tokens, second.members, second.tokens) == ([0, 1], 4, [2], 2)
    row = pack([first, second], prompts, responses, [range(len(ids)) for ids in responses])
    assert row.input_ids.tolist() == [[10, 11, 1, 2, 20, 5]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert row.predictions.labels.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.predictions.source.tolist() == [1, 2, 3, 1, 4, 5]  # both first tokens are predicted from the prompt's last
    assert (row.predictions.members, row.predictions.lengths) == ([0, 1, 2], [3, 1, 2])


# --------------------------------------------------------------------------------------------------------------- logits


def direct(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return log_softmax.gather(-1, labels[:, None]).squeeze(-1), -(log_softmax.exp() * log_softmax).sum(-1)


def results(function: Any, tokens: int, vocabulary: int, shares: tuple[float, float]) -> list[Tensor]:
    """Log-probs, entropies, and the gradients at hidden states and weight of a loss that has these shares of both."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, requires_grad=True) for n in (tokens, vocabulary))
    found, factor = function(hidden, weight, torch.arange(tokens) % vocabulary, 0.7), torch.randn(tokens, generator=generator)
    loss = sum(share * (x * factor).sum() for x, share in zip(found, shares, strict=True) if share)
    return [*(x.detach() for x in found), *torch.autograd.grad(loss, (hidden, weight))]


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.5)], ids=["log-probs", "entropy", "both"])
@pytest.mark.parametrize("tokens", [1, 3, 4, 10])
def test_chunks_and_whole_logits_give_the_results_and_gradients_of_autograd(
    tokens: int, shares: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "TOKENS_AT_ONCE", 3)
    expected = results(direct, tokens, 11, shares)
    for function in (chunked_log_probs, lambda h, w, labels, temperature: log_probs_of(h @ w.T, labels, temperature)):
        torch.testing.assert_close(results(function, tokens, 11, shares), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_the_compiled_head_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """(As on a GPU with ``learner.compile``, but for the compiler's back end.)"""
    for name in ("_forward", "_backward"):
        monkeypatch.setattr(chunked, name, getattr(chunked, name))  # to be restored
    expected = results(chunked_log_probs, 40, 300, (1.0, 0.1))
    chunked.compile_head()
    torch.testing.assert_close(results(chunked_log_probs, 40, 300, (1.0, 0.1)), expected, rtol=1e-5, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("budget", [None, 1000], ids=["padded", "packed"])
def test_an_update_never_holds_the_logits_of_all_tokens(
    fresh_model: Any, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No logits of prompt tokens, and of response tokens only 16 at a time."""
    monkeypatch.setattr(chunked, "TOKENS_AT_ONCE", 16)
    vocabulary = fresh_model.config.vocab_size
    rollouts = rollouts_of([[30, 40, 50, 60]] * 2, [70, 80], vocabulary)
    learner = learner_of(fresh_model, budget, gradient_accumulation_steps=2)
    learner.update(scored(rollouts, torch.ones(8), torch.randn(8)))  # the moments are made at the first step
    with LargestTensor() as seen:
        learner.update(scored(rollouts, torch.ones(8), torch.randn(8)))
        learner.log_probs(rollouts)
    assert seen.largest < (30 + 40 + 50 + 60) * vocabulary
