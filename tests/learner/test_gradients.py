"""How a batch is cut, and gradients, log-probabilities and metrics of the learner against one plain loss, for every layout."""

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as with_settings
from hypothesis import strategies as st
from learner_parts import ADVANTAGES, PROBLEM, REWARDS, flat, last_gradients, learner_of, log_softmax_alone, rollouts_of
from model_parts import flex_attention_on_a_cpu, own_model, tiny_model
from ruamel.yaml import YAML
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from training_parts import scored

from grpo.common.records import Completion, Rollout, response_tokens
from grpo.learner import microbatches
from grpo.learner.learner import Learner
from grpo.learner.microbatches import chunked_log_probs, log_probs_of, split_by_length, split_in_order, texts_of, whole_texts
from grpo.models.packing import fill_rows, pack
from grpo.study.config import GrpoConfig, LearnerSettings
from grpo.training.step import update_policy

LAYOUTS = {  # token budget of a microbatch, and whether its responses are packed
    "padded": (None, False),
    "padded by budget": (25, False),
    "one response a row": (1, True),
    "packed": (25, True),
    "one row": (10_000, True),
    "packed as on a GPU": (60, True),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    of = getattr(request.node, "callspec", None)
    with flex_attention_on_a_cpu(monkeypatch) if of and "GPU" in str(of.params.get("layout")) else nullcontext():
        yield


# Of each response the lengths of the policy's and of the environment's pieces, in turn. Four responses share a prompt.
PIECES = [(3, 4, 2), (1, 1, 1, 5, 6), (9,), (2, 7, 3), (1,), (0,), (2, 2, 2, 2, 2), (7,)]


def responses() -> list[Rollout]:
    """Responses whose log-probabilities the engine reports as -1; the third and the last are cut off."""
    rng, found = random.Random(5), []
    for i, pieces in enumerate(PIECES):
        prompt = tuple(random.Random(i // 4).randrange(1, 512) for _ in range(4 + i // 4))
        ends = [sum(pieces[: n + 1]) for n in range(len(pieces))]
        observations = tuple((ends[n - 1], ends[n]) for n in range(1, len(pieces), 2))
        ids = tuple(rng.randrange(1, 512) for _ in range(sum(pieces)))
        reason = "length" if i in (2, 7) else "stop"
        found.append(Rollout(PROBLEM, prompt, Completion(ids, "", (-1.0,) * sum(pieces[::2]), reason, 0, observations), {}))
    return scored(found, REWARDS, ADVANTAGES)


def apart(log_probs: list[Tensor], by: float, seed: int) -> list[Tensor]:
    """Log-probabilities that differ from these by up to ``by``."""
    generator = torch.Generator().manual_seed(seed)
    return [row + by * (2 * torch.rand(row.shape, generator=generator) - 1) for row in log_probs]


def clipped(ratio: Tensor, advantage: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)


PER_TOKEN: dict[str, Callable[[Tensor, Tensor, Rollout], Tensor]] = {
    "no_baseline": lambda new, _, r: -r.rewards["reward"] * new,
    "reinforce_with_baseline": lambda new, _, r: -r.advantage * new,
    "grpo_no_clip": lambda new, old, r: -r.advantage * (new - old).exp(),
    "grpo_clip": lambda new, old, r: clipped((new - old).exp(), r.advantage),
    "gspo": lambda new, old, r: clipped((new - old).sum().div(max(1, len(new))).exp(), r.advantage).expand(len(new)),
    "cispo": lambda new, old, r: -(new - old).exp().detach().clamp(max=1.3) * r.advantage * new,
}


def sampled_alone(model: Any, rollout: Rollout, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the tokens that the policy wrote, from a forward pass over the text alone."""
    written = {place for start, end in rollout.completion.observations for place in range(start, end)}
    places = [place for place in range(len(rollout.completion.token_ids)) if place not in written]
    distribution = log_softmax_alone(model, rollout, temperature)[places]
    ids = torch.tensor(rollout.completion.token_ids, dtype=torch.long)[places]
    return distribution.gather(-1, ids[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def weight_of(i: int, batch: list[Rollout], config: GrpoConfig) -> float:
    """The weight of each token of the batch's i-th response."""
    lengths, size = [rollout.length for rollout in batch], config.micro_train_batch_size
    start = i - i % size
    if config.length_normalization == "token_mean":
        return 1 / sum(lengths)
    divisors = {"masked_mean": lengths[i], "masked_normalize": 16, "microbatch_longest": max(lengths[start : start + size])}
    return 1 / max(1, divisors[config.length_normalization]) / len(batch)


def plain_loss(model: Any, batch: list[Rollout], config: GrpoConfig) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch, one response at a time, and its metrics, all but the extremes means over the sampled tokens."""
    loss, tokens, measured = torch.zeros(()), response_tokens(batch), dict[str, list[Tensor]]()
    for i, rollout in enumerate(batch):
        new, entropy = sampled_alone(model, rollout, config.sampling_temperature)
        old = new.detach() if rollout.old_log_probs is None else rollout.old_log_probs
        engine = torch.tensor(rollout.completion.log_probs)
        found = {"token_entropy": entropy, "ratio_mean": (new - old).exp()}
        found |= {"mismatch_mean": (engine - old).abs(), "mismatch_kl": engine - old}
        per_token = PER_TOKEN[config.loss_type](new, old, rollout)
        if config.loss_type == "grpo_clip":
            found["clip_fraction"] = (per_token > -found["ratio_mean"] * rollout.advantage).float()
        if config.importance_cap is not None:
            difference = old - engine
            if config.importance_mode == "sequence_truncate":
                difference = difference.sum().expand(len(new))
            weights = difference.exp().clamp(max=config.importance_cap)
            found |= {"importance_mean": weights, "importance_capped": (weights == config.importance_cap).float()}
            per_token = per_token * weights
        if config.kl_coefficient:
            assert rollout.reference_log_probs is not None
            difference = rollout.reference_log_probs - new
            found["kl_loss"] = difference.exp() - difference - 1
            per_token = per_token + config.kl_coefficient * found["kl_loss"]
        loss = loss + weight_of(i, batch, config) * per_token.sum() - config.entropy_coefficient * entropy.sum() / tokens
        for name, values in found.items():
            measured.setdefault(name, []).append(values.detach())
    metrics = {name: torch.cat(values).mean().item() for name, values in measured.items()}
    ratios = torch.cat(measured["ratio_mean"])
    return loss, metrics | {"loss": loss.item(), "ratio_min": ratios.min().item(), "ratio_max": ratios.max().item()}


def gradient_of(model: Any, loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_same_gradient(found: dict[str, Tensor], expected: Tensor) -> None:
    assert expected.norm() > 0 and (flat(found) - expected).norm() / expected.norm() < 2e-5


def moved(model: Any, layout: str = "packed", **changes: Any) -> tuple[Learner, Any]:
    """A learner whose weights are no longer the starting ones, and a copy of its model."""
    learner = learner_of(model, *LAYOUTS[layout], **{"gradient_accumulation_steps": 4} | changes)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1.05)
    return learner, copy.deepcopy(learner.model)


OBJECTIVES: dict[str, dict[str, Any]] = YAML(typ="safe", pure=True).load(Path(__file__).with_name("objectives.yaml"))


OWN = ("own", "own, its layers computed again in the backward pass")
UPDATES = [*((name, "Qwen2") for name in OBJECTIVES), *(("KL and entropy", kind) for kind in OWN)]


@every_layout
@pytest.mark.parametrize(("objective", "kind"), UPDATES)
def test_an_update_is_that_of_the_plain_loss(fresh_model: Any, objective: str, kind: str, layout: str) -> None:
    """Policy, sampling policy, engine and starting weights all differ."""
    fresh_model = fresh_model if kind == "Qwen2" else own_model()
    learner, model = moved(fresh_model, layout, **{"cliprange": 0.2, "cliprange_high": 0.3} | OBJECTIVES[objective])
    if kind == OWN[1]:
        learner.model.gradient_checkpointing_enable()
    assert learner.packs == LAYOUTS[layout][1]
    config, batch = learner.config, responses()
    for found, rollout in zip(computed := learner.log_probs(batch), batch, strict=True):
        assert_close(found, sampled_alone(model, rollout, config.sampling_temperature)[0].detach(), atol=1e-4, rtol=1e-4)
    alone = [sampled_alone(model, rollout, config.sampling_temperature)[1].mean().item() for rollout in batch]
    assert learner.token_entropies(batch) == pytest.approx(alone, rel=1e-4, nan_ok=True)
    old = apart(computed, 0.5, seed=7)
    engine = apart(old, 0.4, seed=8)
    engine[0][0] = old[0][0] + (0.5 if learner.packs else -0.5)  # the largest difference, with either sign
    batch = scored(batch, REWARDS, ADVANTAGES, old)[: config.train_batch_size]
    for rollout, log_probs in zip(batch, engine, strict=False):
        rollout.completion = replace(rollout.completion, log_probs=tuple(log_probs.tolist()))
        if config.kl_coefficient:
            rollout.reference_log_probs = sampled_alone(fresh_model, rollout)[0].detach()
    if config.kl_coefficient:
        for found, rollout in zip(learner.reference_log_probs(batch), batch, strict=True):
            assert_close(found, rollout.reference_log_probs, atol=1e-4, rtol=1e-4)
    loss, expected = plain_loss(model, batch, config)
    gradients = last_gradients(learner)
    metrics = learner.update(batch)
    assert_same_gradient(gradients, gradient_of(model, loss))
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-4, abs=1e-6)
    differences = torch.cat([e - o for e, o in zip(engine, old, strict=True)][: len(batch)]).abs()
    assert metrics["mismatch_max"] == pytest.approx(differences.max().item(), rel=1e-4)
    assert metrics["mismatch_above"] == pytest.approx((differences > 0.1).float().mean().item())
    assert ("importance_mean" in metrics) == ("importance_capped" in metrics) == (config.importance_cap is not None)


@every_layout
@pytest.mark.parametrize("normalization", ["masked_mean", "token_mean"])
def test_responses_that_were_cut_off_may_have_no_loss(fresh_model: Any, layout: str, normalization: str) -> None:
    """Neither in the sum nor in `token_mean`'s number of tokens; nor have they entropies."""
    changes = {"mask_truncated_completions": True, "length_normalization": normalization}
    learner, model = moved(fresh_model, layout, **changes)
    gradients = last_gradients(learner)
    (metrics,) = update_policy(learner.config, learner, responses(), version=0)
    batch = responses()
    for rollout in (batch[2], batch[7]):
        rollout.completion = replace(rollout.completion, token_ids=(), log_probs=())
    loss, expected = plain_loss(model, batch, learner.config)
    assert_same_gradient(gradients, gradient_of(model, loss))
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)

    learner, _ = moved(fresh_model, layout, **changes, entropy_coefficient=0.1)
    nothing, batch = last_gradients(learner), responses()
    for rollout in batch:
        rollout.completion = replace(rollout.completion, finish_reason="length")
    (metrics,) = update_policy(learner.config, learner, batch, version=0)
    assert flat(nothing).norm() == metrics["loss"] == metrics["skipped_update"] == 0.0
    assert all(math.isnan(metrics[name]) for name in ("token_entropy", "ratio_min", "ratio_max", "mismatch_max"))


@with_settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=5).filter(
        lambda groups: sum(map(len, groups)) > 1 and sum(map(sum, groups)) > 0
    ),
    prompts=st.lists(st.integers(1, 6), min_size=5, max_size=5),
    vocabulary=st.sampled_from([2, 3, 512]),  # of the first all prompts of one length are equal
    budget=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_packed_rows_of_any_lengths_have_the_gradient_of_the_plain_loss(
    fresh_model: Any, lengths: list[list[int]], prompts: list[int], vocabulary: int, budget: int, seed: int
) -> None:
    batch, generator = rollouts_of(lengths, prompts[: len(lengths)], vocabulary, seed), torch.Generator().manual_seed(1)
    n, model = len(batch), copy.deepcopy(fresh_model)
    learner = learner_of(fresh_model, budget, rollout_batch_size=n, train_batch_size=n, group_size=n, loss_type="grpo_clip")
    old = apart([sampled_alone(model, rollout)[0].detach() for rollout in batch], 0.1, seed=1)
    batch = scored(batch, torch.rand(n, generator=generator), torch.randn(n, generator=generator), old)
    gradients = last_gradients(learner)
    learner.update(batch)
    assert_same_gradient(gradients, gradient_of(model, plain_loss(model, batch, learner.config)[0]))


@every_layout
@pytest.mark.parametrize("constant", [1.0, 7.0])
def test_a_fine_tuning_update_is_that_of_the_plain_loss(fresh_model: Any, constant: float, layout: str) -> None:
    """-sum log p / constant, averaged over responses, which are learnt at temperature 1 whatever they were sampled at.

    There may be fewer of them than ``train_batch_size``, as in the last batch of expert iteration.
    """
    batch, model = responses(), copy.deepcopy(fresh_model)
    sizes = {"rollout_batch_size": 24, "train_batch_size": 24, "gradient_accumulation_steps": 4}
    learner = learner_of(fresh_model, *LAYOUTS[layout], **sizes, sampling_temperature=0.6)
    loss = -torch.stack([sampled_alone(model, rollout)[0].sum() for rollout in batch]).mean() / constant
    expected, gradients = gradient_of(model, loss), last_gradients(learner)
    metrics = learner.sft_update(texts_of(batch), constant)
    assert_same_gradient(gradients, expected)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["mean_nll"] == pytest.approx(loss.item() * constant * len(batch) / response_tokens(batch), rel=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(expected.norm().item(), rel=1e-5)


@given(
    lengths=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), min_size=1, max_size=6), budget=st.integers(1, 80)
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


def test_a_row_and_microbatches_by_hand() -> None:
    prompts, responses = [(10, 11), (10, 11), (20,)], [(1, 2, 3), (4,), (5, 6)]
    ((first, second),) = fill_rows(prompts, responses, 100)
    exactly_full = [[[s.members for s in row] for row in fill_rows(prompts, responses, budget)] for budget in (6, 4)]
    assert exactly_full == [[[[0, 1], [2]]], [[[0, 1]], [[2]]]]
    assert (first.members, first.tokens, second.members, second.tokens) == ([0, 1], 4, [2], 2)
    row = pack([first, second], prompts, responses, [range(len(ids)) for ids in responses])
    assert row.input_ids.tolist() == [[10, 11, 1, 2, 20, 5]] and row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert row.predictions.labels.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.predictions.source.tolist() == [1, 2, 3, 1, 4, 5]  # both first tokens are predicted from the prompt's last
    assert (row.predictions.members, row.predictions.lengths) == ([0, 1, 2], [3, 1, 2])
    prompts, responses = [(1,) * 4] * 6, [(2,) * n for n in (3, 9, 1, 0, 4, 3)]
    assert split_by_length(prompts, responses, 15) == [[1], [4, 0], [5, 2]]  # of 12, 7 and 6, 6 and 4 tokens
    assert split_in_order(5, 2) == [[0, 1], [2, 3], [4]]


@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=20), budget=st.integers(1, 80))
def test_every_response_is_padded_once_and_microbatches_keep_to_the_budget(sizes: list[tuple[int, int]], budget: int) -> None:
    prompts, responses = [(1,) * p for p, _ in sizes], [(2,) * n for _, n in sizes]
    parts = split_by_length(prompts, responses, budget)
    assert sorted(i for part in parts for i in part) == [i for i, (_, n) in enumerate(sizes) if n]
    inputs = [[sum(sizes[i]) - 1 for i in part] for part in parts]
    assert all(len(part) * max(part) <= budget or len(part) == 1 for part in inputs)
    assert (flat := [n for part in inputs for n in part]) == sorted(flat, reverse=True)
    assert all((len(part) + 1) * max(part) > budget for part in inputs[:-1])  # no room is left


@pytest.mark.parametrize(
    ("kind", "packing", "packs"), [("qwen2", True, True), ("qwen2", False, False), ("mistral", True, False)]
)
def test_how_responses_are_cut(kind: str, packing: bool, packs: bool, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_chunked_logits_are_those_of_autograd(
    tokens: int, shares: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbatches, "TOKENS_AT_ONCE", 3)
    expected = results(direct, tokens, 11, shares)
    for function in (chunked_log_probs, lambda h, w, labels, temperature: log_probs_of(h @ w.T, labels, temperature)):
        torch.testing.assert_close(results(function, tokens, 11, shares), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_the_compiled_head_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """(As on a GPU with ``learner.compile``, but for the compiler's back end.)"""
    for name in ("_forward", "_backward"):
        monkeypatch.setattr(microbatches, name, getattr(microbatches, name))  # to be restored
    expected = results(chunked_log_probs, 40, 300, (1.0, 0.1))
    microbatches.compile_head()
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
def test_an_update_never_holds_all_logits(fresh_model: Any, budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No logits of prompt tokens, and of response tokens only 16 at a time."""
    monkeypatch.setattr(microbatches, "TOKENS_AT_ONCE", 16)
    vocabulary = fresh_model.config.vocab_size
    rollouts = rollouts_of([[30, 40, 50, 60]] * 2, [70, 80], vocabulary)
    learner = learner_of(fresh_model, budget, gradient_accumulation_steps=2)
    learner.update(scored(rollouts, torch.ones(8), torch.randn(8)))  # the moments are made at the first step
    with LargestTensor() as seen:
        learner.update(scored(rollouts, torch.ones(8), torch.randn(8)))
        learner.log_probs(rollouts)
    assert seen.largest < (30 + 40 + 50 + 60) * vocabulary
