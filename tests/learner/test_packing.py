"""How a batch is cut into packed rows and padded microbatches, and their logits; their gradients are in test_gradients.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_parts import learner_of, rollouts_of
from model_parts import tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_parts import scored

from grpo.learner import chunked
from grpo.learner.chunked import chunked_log_probs, log_probs_of
from grpo.learner.learner import Learner
from grpo.learner.microbatches import neighbours, of_like_length, whole_texts
from grpo.models.packing import fill_rows, pack
from grpo.study.methods import GrpoConfig
from grpo.study.settings import LearnerSettings

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


# ------------------------------------------------------------------------------------------------- padded microbatches


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=20),
    budget=st.integers(1, 80),
)
def test_every_response_is_padded_once_and_microbatches_keep_to_the_budget(sizes: list[tuple[int, int]], budget: int) -> None:
    prompts, responses = [(1,) * p for p, _ in sizes], [(2,) * n for _, n in sizes]
    parts = of_like_length(prompts, responses, budget)
    assert sorted(i for part in parts for i in part) == [i for i, (_, n) in enumerate(sizes) if n]
    inputs = [[sum(sizes[i]) - 1 for i in part] for part in parts]
    assert all(len(part) * max(part) <= budget or len(part) == 1 for part in inputs)
    assert (flat := [n for part in inputs for n in part]) == sorted(flat, reverse=True)
    assert all((len(part) + 1) * max(part) > budget for part in inputs[:-1])  # no room is left


def test_microbatches_by_hand() -> None:
    prompts, responses = [(1,) * 4] * 6, [(2,) * n for n in (3, 9, 1, 0, 4, 3)]
    assert of_like_length(prompts, responses, 15) == [[1], [4, 0], [5, 2]]  # of 12, 7 and 6, 6 and 4 tokens
    assert neighbours(5, 2) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("kind", "packing", "packs"), [("qwen2", True, True), ("qwen2", False, False), ("mistral", True, False)]
)
def test_a_study_says_how_and_a_model_that_cannot_share_prompts_keeps_to_the_budget(
    kind: str, packing: bool, packs: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of 5 tokens and responses of 6: four times ten tokens, or seven responses behind one prompt."""
    config = GrpoConfig(rollout_batch_size=8, train_batch_size=8, group_size=8, gradient_accumulation_steps=1)
    settings = LearnerSettings(max_tokens_per_microbatch=40, packing=packing)
    learner = Learner(tiny_model(kind), config, 0, settings)
    found = learner._microbatches(learner.model, whole_texts([(1, 2, 3, 4, 5)] * 8, [(7, 8, 9, 7, 8, i) for i in range(8)]))
    assert learner.packs == packs
    assert [len(micro.members) for micro in found] == ([7, 1] if packs else [4, 4])
    why = (
        "learner: padded microbatches of 40 tokens, not packed rows: NotImplementedError: its attention takes sliding_window\n"
    )
    assert capsys.readouterr().out == (why if packing and not packs else "")


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
