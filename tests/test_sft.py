"""The tests that the handout names for supervised fine-tuning (CS336 assignment 5), through tests/adapters.py.

The course's own tests compare with stored arrays (`make test-course` runs them); these compare with numbers worked out by hand
and with torch's distributions.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adapters import (
    run_compute_entropy,
    run_get_response_log_probs,
    run_masked_normalize,
    run_sft_microbatch_train_step,
    run_tokenize_prompt_and_output,
)
from torch import Tensor
from torch.testing import assert_close


class LetterTokenizer:
    """One token a character, a = 1, b = 2 and so on; a beginning-of-text token where special tokens are asked for."""

    pad_token_id: int | None = 0
    eos_token_id = 99

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": ([77] if add_special_tokens else []) + [ord(c) - ord("a") + 1 for c in text]}


def test_tokenize_prompt_and_output() -> None:
    result = run_tokenize_prompt_and_output(["ab", "c"], ["cde", "a"], LetterTokenizer())
    # rows: 1 2 | 3 4 5   and   3 | 1, padded to 3 1 0 0 0
    assert result["input_ids"].tolist() == [[1, 2, 3, 4], [3, 1, 0, 0]]
    assert result["labels"].tolist() == [[2, 3, 4, 5], [1, 0, 0, 0]]
    assert result["response_mask"].int().tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]
    assert result["input_ids"].dtype == result["labels"].dtype == torch.int64


def test_where_there_is_no_padding_token_the_end_of_text_pads() -> None:
    tokenizer = LetterTokenizer()
    tokenizer.pad_token_id = None
    result = run_tokenize_prompt_and_output(["ab", "c"], ["cde", ""], tokenizer)
    assert result["labels"].tolist()[1] == [99, 99, 99, 99]
    assert result["response_mask"].sum(dim=1).tolist() == [3, 0]


def test_compute_entropy() -> None:
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0)) * 4
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert_close(run_compute_entropy(logits), expected, atol=1e-5, rtol=1e-5)
    assert_close(run_compute_entropy(torch.zeros(1, 8)), torch.tensor([math.log(8)]))


@pytest.mark.parametrize("with_entropy", [True, False])
def test_get_response_log_probs(model: Any, with_entropy: bool) -> None:
    ids = torch.randint(0, 512, (3, 9), generator=torch.Generator().manual_seed(2))
    inputs, labels = ids[:, :-1], ids[:, 1:]
    result = run_get_response_log_probs(model, inputs, labels, with_entropy)
    distribution = torch.distributions.Categorical(logits=model(inputs).logits.double())
    expected = {"log_probs": distribution.log_prob(labels)} | (
        {"token_entropy": distribution.entropy()} if with_entropy else {}
    )
    assert_close({name: values.double() for name, values in result.items()}, expected, atol=1e-5, rtol=1e-5)


VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASKS = [torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=kind) for kind in (torch.float32, torch.bool, torch.int64)]


@pytest.mark.parametrize("mask", MASKS, ids=["float", "bool", "int"])
@pytest.mark.parametrize(("dim", "result"), [(None, 2.5), (0, [0.25, 0.0, 2.25]), (1, [1.0, 1.5]), (-1, [1.0, 1.5])], ids=str)
def test_masked_normalize(mask: Tensor, dim: int | None, result: Any) -> None:
    assert_close(run_masked_normalize(VALUES, mask, dim, 4.0), torch.tensor(result))


POLICY = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -6.0, -8.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(("constant", "loss"), [(1.0, 5.25), (3.0, 1.75)])
def test_sft_microbatch_train_step(constant: float, loss: float) -> None:
    """Sums 1 + 2 = 3 and 4 + 6 + 8 = 18, mean 10.5, over 2 steps 5.25."""
    policy = POLICY.clone().requires_grad_()
    expected = -MASK.float() / 2 / 2 / constant
    for times in (1, 2):  # gradients add up
        got, metadata = run_sft_microbatch_train_step(policy, MASK, 2, constant)
        assert_close(got, torch.tensor(loss))
        assert not got.requires_grad
        assert_close(policy.grad, times * expected)
    assert_close(metadata["mean_nll"], torch.tensor(21 / 5))
