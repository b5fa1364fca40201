"""What must hold on a GPU, with small models. Run by `make test-gpu`, before benchmarks/gpu.py measures at the real size."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu import PARTS, measured
from benchmarks.gpu_parts.sampling import make_tokenizer
from benchmarks.gpu_parts.tools import TINY, Batch, Row, Scale, Setting, make_model
from grpo.common.records import Problem, Rollout
from grpo.learner.learner import Learner
from grpo.rollout.engine import SamplingParams
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.config import GrpoConfig, LearnerSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
# Heads of the real size, and rows of several hundred tokens, so that attention has more than one block to compute.
SMALL = replace(
    TINY,
    shape={**TINY.shape, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
    gradients=Batch(4, 4, 60, 200),
    budget=900,
    study="mini",
)


def rows(part: str, scale: Scale = SMALL) -> dict[str, Row]:
    return {name: row for name, _, row in measured(PARTS[part], Setting("cuda", scale, 1))}


def numbers(row: Row) -> Row:
    """A row; the test is skipped where it was, and fails where it did."""
    if "skipped" in row:
        pytest.skip(row["skipped"])
    assert "failed" not in row, row["failed"]
    return row


def test_packed_padded_and_plain_gradients_are_as_near_as_the_precision_allows() -> None:
    found = rows("gradients")
    assert max(numbers(found["float32"]).values()) < 1e-4
    assert numbers(found["bfloat16"])["packed_against_padded"] < 2e-2
    assert numbers(found["float16"])["packed_against_padded"] < 5e-3


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("budget", [None, 900])
def test_the_learner_finds_probabilities_on_the_gpu_that_it_finds_on_the_cpu(own: bool, budget: int | None) -> None:
    model = make_model(SMALL, "cpu", torch.float32, own)
    batch = Batch(4, 4, 60, 200).made(model.config.vocab_size)
    config = GrpoConfig(rollout_batch_size=16, train_batch_size=16, group_size=4, gradient_accumulation_steps=4)
    expected = Learner(model, config, 0).log_probs(batch)
    found = Learner(model.to("cuda"), config, 0, LearnerSettings(max_tokens_per_microbatch=budget)).log_probs(batch)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own", [False, True])
def test_sampling_is_repeatable_and_draws_from_the_learners_distribution(own: bool) -> None:
    model = make_model(SMALL, "cuda", torch.float32, own)
    engine = TransformersEngine(model, make_tokenizer(model.config.vocab_size))
    prompts = [r.prompt_ids for r in Batch(3, 1, 60, 1).made(model.config.vocab_size)]
    sampled, again, other = (engine.generate(prompts, SamplingParams(max_tokens=24), n=4, seed=s) for s in (1, 1, 2))
    assert sampled == again != other
    batch = [Rollout(Problem("", "", ""), p, c) for p, group in zip(prompts, sampled, strict=True) for c in group]
    config = GrpoConfig(rollout_batch_size=12, train_batch_size=12, group_size=4, gradient_accumulation_steps=1)
    for rollout, log_probs in zip(
        batch, Learner(model, config, 0, LearnerSettings(max_tokens_per_microbatch=900)).log_probs(batch), strict=True
    ):
        assert list(rollout.completion.log_probs) == pytest.approx(log_probs.tolist(), abs=1e-3)


@pytest.mark.parametrize("part", ["profile", "recompiles", "optimizer", "state"])
def test_nothing_of_a_part_fails(part: str) -> None:
    failed: dict[str, Any] = {name: row["failed"] for name, row in rows(part).items() if "failed" in row}
    assert not failed


def test_a_killed_run_goes_on_and_learns() -> None:
    found = rows("study")
    if "" in found:
        numbers(found[""])
    for name in ("packed", "padded"):
        row = numbers(found[name])
        assert row["killed_by"] == 9 and row["resumed_after"]
        assert row["answer_reward_last"] > row["answer_reward_first"] + 0.3


def test_vllm_holds_the_policys_weights_samples_by_seed_and_gives_memory_back() -> None:
    found = rows("vllm", replace(SMALL, sampled=(4, 4, 32)))
    for row in found.values():
        numbers(row)
    assert found["seeds"]["same_seed"] == 1 and found["seeds"]["other_seed"] < 0.1
    assert found["weights"]["equal"]
    assert found["mismatch"]["mean"] < 0.05 and not math.isnan(found["mismatch"]["max"])
    assert found["ten sleeps"]["growth_mb"] < 64


@pytest.mark.parametrize("row", ["on one GPU (CUDA IPC)", "between two GPUs (NCCL)"])
def test_weights_that_are_sent_arrive(row: str) -> None:
    found = rows("asynchronous")
    assert numbers(found[row if row in found else ""])["equal"]


def test_vllm_is_nearer_to_the_learner_in_float16_than_a_tenth_of_what_is_noticed() -> None:
    found = rows("vllm_float16", replace(SMALL, sampled=(4, 4, 32)))
    assert numbers(found["weights"])["equal"]
    assert numbers(found["mismatch"])["mean"] < 0.01
