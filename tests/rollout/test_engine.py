"""The transformers engine against transformers' own ``generate`` and forward pass, and scripted models; ends of responses."""

import copy
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from learner_parts import as_rollouts, log_probs_alone
from model_parts import byte_level as byte_level_bpe
from model_parts import tiny_checkpoint, tiny_model
from study_parts import changed
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from grpo.common.errors import UserError
from grpo.common.records import Completion, Problem
from grpo.common.world import World
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.models.tokenizer import Tokenizer
from grpo.rollout.engine import CompletionSpec, Responses, SamplingParams, derive_seed, require_context_length
from grpo.rollout.make_engine import make_engine, sleeps
from grpo.rollout.sampling import Sampler, sample_rollouts
from grpo.rollout.transformers_engine import TransformersEngine, sample
from grpo.rollout.vllm_engine import request_settings
from grpo.study.schema import Study
from grpo.tasks.formats import R1_ZERO
from grpo.tasks.task import Format

TEXTS = [
    "Mia has 3 apples.",
    "On Monday she buys 2, and on Tuesday she loses 1, but gains 14. How many are left now?",
    "T",
    "Ben sells 12 coins, quickly",
]
LENGTHS = (6, 14, 1, 9)
VOCABULARY = 49_152  # SmolLM2's


@pytest.fixture
def prompts(tokenizer: Any) -> list[list[int]]:
    """Token ids of four prompts, all of different length."""
    ids = [tokenizer(text)["input_ids"][:length] for text, length in zip(TEXTS, LENGTHS, strict=True)]
    assert [len(i) for i in ids] == list(LENGTHS)
    return ids


@pytest.fixture
def chatty(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Model and tokenizer with an end-of-text token that the model samples often, so that completions end early."""
    tokenizer = copy.deepcopy(tokenizer)
    logits = model(torch.tensor([tokenizer(TEXTS[1])["input_ids"]])).logits[0]
    tokenizer.eos_token_id = torch.softmax(logits, -1).mean(0).argmax().item()
    return model, tokenizer


def of_rows(rows: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(row) for row in range(rows)]


def flatten(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def exact_log_probs(
    model: Any, prompt: list[int], completion: Completion, warp: Callable[[Tensor, int], Tensor] = lambda logits, _: logits
) -> list[float]:
    """Log-probabilities of a completion from one forward pass over it alone; ``warp`` is applied to a position's logits."""
    logits = model(torch.tensor([prompt + list(completion.token_ids)])).logits[0, len(prompt) - 1 : -1].detach()
    rows = [torch.log_softmax(warp(row, i), -1) for i, row in enumerate(logits.double())]
    return [row[token].item() for row, token in zip(rows, completion.token_ids, strict=True)]


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens that holds ``top_p``; all others at minus infinity."""
    probabilities = torch.softmax(logits, -1).tolist()
    kept, total = [], 0.0
    for token in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):
        kept.append(token)
        total += probabilities[token]
        if total >= top_p:
            break
    mask = torch.full_like(logits, -torch.inf)
    mask[kept] = 0.0
    return logits + mask


@pytest.mark.parametrize("temperature", [0.0, 1e-6])  # the two likeliest tokens come as near as 2e-4 to each other
def test_greedy_sampling_is_transformers(model: Any, tokenizer: Any, prompts: list[list[int]], temperature: float) -> None:
    """Its log-probabilities are those of temperature 1, among all tokens."""
    params = SamplingParams(temperature, top_p=1.0 if temperature else 0.5, max_tokens=24)
    groups = TransformersEngine(model, tokenizer).generate(prompts, params, n=2, seed=0)
    if not temperature:
        (found, *_), (expected, *_) = as_rollouts(prompts, groups), groups[0]
        assert expected.log_probs == pytest.approx(log_probs_alone(model, found).tolist(), abs=1e-4)
    seen = set()
    for prompt, group in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt])
        said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        expected = said[0, len(prompt) :]
        for completion in group:
            assert list(completion.token_ids) == expected.tolist()
        seen.add(tuple(expected.tolist()))
    assert len(seen) == len(prompts)


@pytest.mark.parametrize(
    ("temperature", "top_p", "min_tokens"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.6, 0), (0.7, 0.8, 0), (0.7, 1.0, 5)]
)
def test_log_probs_are_those_of_a_fresh_forward_pass(
    chatty: tuple[Any, Any], prompts: list[list[int]], temperature: float, top_p: float, min_tokens: int
) -> None:
    """Rows end at different times, so this also checks the rows that remain in the batch."""
    model, tokenizer = chatty
    eos = tokenizer.eos_token_id
    params = SamplingParams(temperature, top_p, min_tokens, max_tokens=20, stop=("s", "."))
    groups = TransformersEngine(model, tokenizer).generate(prompts, params, n=6, seed=1)

    def warp(logits: Tensor, i: int) -> Tensor:
        logits = logits / temperature
        if i < min_tokens:
            logits[eos] = -torch.inf
        return nucleus(logits, top_p) if top_p < 1 else logits

    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert len(completion.log_probs) == len(completion.token_ids)
            assert completion.log_probs == pytest.approx(exact_log_probs(model, prompt, completion, warp), abs=1e-4)
    lengths = {len(c.token_ids) for c in flatten(groups)}
    assert len(lengths) >= 5, "the rows were to end at different times"


def chi_square(counts: Counter[int], probabilities: Tensor, n: int) -> tuple[float, float]:
    """Pearson's statistic, tokens expected less than 5 times taken together, and its critical value at p = 1e-4."""
    expected = probabilities.double() * n
    common = (expected >= 5).nonzero()[:, 0].tolist()
    statistic = sum((counts[i] - expected[i].item()) ** 2 / expected[i].item() for i in common)
    rest = n - sum(expected[i].item() for i in common)
    others = n - sum(counts[i] for i in common)
    statistic += (others - rest) ** 2 / rest if rest > 1e-6 else others
    freedom = len(common) - (rest <= 1e-6)
    variance = 2 / (9 * freedom)
    return statistic, freedom * (1 - variance + 3.719 * math.sqrt(variance)) ** 3  # Wilson and Hilferty 1931


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.5)])
def test_the_exact_distribution(model: Any, tokenizer: Any, prompts: list[list[int]], temperature: float, top_p: float) -> None:
    n, prompt = 8000, prompts[0]
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=1)
    (group,) = TransformersEngine(model, tokenizer).generate([prompt], params, n=n, seed=2)
    counts = Counter(c.token_ids[0] for c in group)
    logits = model(torch.tensor([prompt])).logits[0, -1].detach().double()
    probabilities = torch.softmax(nucleus(logits / temperature, top_p), -1)
    statistic, critical = chi_square(counts, probabilities, n)
    assert statistic < critical
    assert all(probabilities[token] > 0 for token in counts)
    # The test can tell distributions apart: a tenth more temperature is not what was sampled.
    statistic, critical = chi_square(counts, torch.softmax(nucleus(logits / temperature / 1.1, top_p), -1), n)
    assert statistic > critical


def test_top_p_is_the_share_of_what_is_allowed() -> None:
    """If end of text is forbidden, the nucleus consists of the other tokens, as in transformers and vLLM."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(2000, 4)  # the first token is end of text
    params = SamplingParams(top_p=0.55, min_tokens=3, max_tokens=5)
    tokens, log_probs = sample(logits, params, [0], 1, of_rows(2000))
    # Of the others' .5 the second has .6, which is the nucleus by itself.
    assert set(tokens.tolist()) == {1}
    assert log_probs.abs().max() < 1e-6
    tokens, _ = sample(logits, params, [0], 4, of_rows(2000))
    assert set(tokens.tolist()) == {0, 1}


def test_rounding_changes_next_to_no_token_of_a_large_vocabulary() -> None:
    """Inverting a running sum changes some ten of these. Log-probs are off by float32's rounding, and to neither side."""
    logits = 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)) - 30
    rounded = logits + 2e-6 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
    tokens, log_probs = sample(logits.expand(1000, -1), SamplingParams(), (), 1, of_rows(1000))
    others, _ = sample(rounded.expand(1000, -1), SamplingParams(), (), 1, of_rows(1000))
    assert (tokens != others).sum() <= 1 and len(set(tokens.tolist())) > 500
    error = log_probs - torch.log_softmax(logits.double(), -1)[tokens]
    assert error.mean().abs() < 1e-6 and error.abs().max() < 4e-6


def test_completions_do_not_depend_on_the_batch_in_a_large_vocabulary(tokenizer: Any) -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY, initializer_range=0.1)
    asked = [[5, 6, 7], [40_000], [9] * 20, [5, 6, 7]]
    found = [
        TransformersEngine(model, tokenizer, size).generate(asked, SamplingParams(max_tokens=40), n=3, seed=1)
        for size in (1, 7, 1024)
    ]
    first, *others = [[c.token_ids for c in flatten(groups)] for groups in found]
    assert others == [first] * 2 and len(set(first)) == 12


@pytest.mark.parametrize("stop", [(), ("s", ".")])
def test_prompt_and_seed_alone_decide_a_completion(chatty: tuple[Any, Any], prompts: list[list[int]], stop: Any) -> None:
    """Not the size of a batch, nor what the others in it are and when they end, nor the processes that share the prompts."""
    params, asked = SamplingParams(max_tokens=30, stop=stop), [*prompts, *prompts[::-1]]
    n, engine = (8 if stop else 32), TransformersEngine(*chatty)

    def sampled(prompts: list[list[int]] = asked, seed: int = 5, by: TransformersEngine = engine) -> list[list[Any]]:
        torch.rand(7)  # torch's global generator has no part in it
        return [[c.token_ids for c in group] for group in by.generate(prompts, params, n=n, seed=seed)]

    whole = sampled()
    assert all(a != b for a, b in zip(whole, sampled(seed=6), strict=True))
    assert sampled() == whole  # whatever was sampled before
    others = sampled([prompts[1], *asked[1:]])
    assert others[1:] == whole[1:] and [*map(len, others[0])] != [*map(len, whole[0])]  # they end at other times
    assert sampled(by=TransformersEngine(*chatty, 4 * n)) == whole
    for size in (2, 3):
        for rank in range(size):
            assert sampled(by=TransformersEngine(*chatty, 4 * n, World(rank, size))) == whole[rank::size]


def test_derived_seeds_depend_on_every_part_and_are_stable() -> None:
    parts = [(0, "rollout", 1), (0, "rollout", 2), (1, "rollout", 1), (0, "other", 1), (0,), (0, 1), ("01",)]
    seeds = [derive_seed(*some) for some in parts]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # SHA-256 of "0/rollout/1" starts with these 8 bytes
    assert derive_seed(0, "rollout", 1) == 0xF754D9F034BC25AB >> 1


PARAMS = SamplingParams(temperature=0.7, top_p=0.9, min_tokens=2, max_tokens=9, stop=("x", "yz"))


def test_on_a_gpu_every_prompt_has_a_seed_of_its_own() -> None:
    seeds = [
        settings["seed"]
        for run in range(3)
        for purpose, step in (("rollout", 1), ("rollout", 2), ("chunk", 1))
        for settings in request_settings(PARAMS, 8, derive_seed(run, purpose, step), "cuda", prompts=100)
    ]
    children = {seed + i for seed in seeds for i in range(8)}  # vLLM's completion i of a prompt draws from seed + i
    assert len(children) == 8 * len(seeds) == 7200
    assert min(children) >= 0 and max(children) < 2**63
    assert max(seeds) > 2**61  # the room is used
    of_seven = [derive_seed(7, "prompt", i) >> 1 for i in range(3)]
    assert [s["seed"] for s in request_settings(PARAMS, 8, 7, "cuda:0", 3)] == of_seven
    assert request_settings(PARAMS, 8, 7, "cuda", 3) == request_settings(PARAMS, 8, 7, "cuda", 5)[:3]
    # SHA-256 of "7/prompt/2" starts with these 8 bytes, whatever the process and machine.
    assert request_settings(PARAMS, 8, 7, "cuda", 3)[2]["seed"] == 0x4894623774330F51 >> 2
    assert all("seed" not in settings for settings in request_settings(PARAMS, 8, 7, "cpu", 3))  # there they fail


class NotesCalls:
    """A stand-in for a ``vllm.LLM`` on a GPU, which records its calls and their order."""

    def __init__(self, **settings: Any):
        self.settings, self.calls = settings, []
        self.model_config = SimpleNamespace(max_model_len=256)
        self.sleep = lambda level: self.calls.append(f"sleep {level}")
        self.wake_up = lambda tags: self.calls.extend(f"wake {tag}" for tag in tags)
        self.reset_prefix_cache = lambda: self.calls.append("forget prefixes")

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.calls.append("generate")
        self.seeds = [one.seed for one in params]
        self.ends = params[0].stop_token_ids, params[0].ignore_eos
        self.prompts = [prompt["prompt_token_ids"] for prompt in prompts]
        ids = [(i, len(prompt)) for i, prompt in enumerate(self.prompts)]
        flat = [SimpleNamespace(start_indices=[0, 1], logprobs=[-t / 4 for t in pair]) for pair in ids]
        said = {"text": "text of another tokenizer", "finish_reason": "length"}
        answers = [SimpleNamespace(token_ids=pair, logprobs=found, **said) for pair, found in zip(ids, flat, strict=True)]
        return [SimpleNamespace(outputs=[answer] * one.n) for answer, one in zip(answers, params, strict=True)]

    def collective_rpc(self, method: Any, kwargs: dict[str, Any] | None = None) -> list[bool] | None:
        if kwargs is None:
            return [True]  # it has a head
        dict(kwargs["weights_iterator"])
        self.calls.append(method)
        return None


class TakesTokens:
    """A stand-in for a scheduler of vLLM, which adds a step's tokens to a request."""

    def _update_request_with_output(self, request: Any, new_token_ids: list[int], is_stale: bool = False) -> Any:
        request.output_token_ids += new_token_ids
        return new_token_ids, len(request.output_token_ids) == 9


@pytest.fixture
def folder(model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    """A checkpoint with one more stop token than the tokenizer's."""
    save_checkpoint(tmp_path, model, tokenizer)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    return tmp_path


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class EngineDeadError(Exception): ...

    vllm = SimpleNamespace(LLM=NotesCalls, SamplingParams=lambda **settings: SimpleNamespace(**settings))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    others = {
        "engine.exceptions": SimpleNamespace(EngineDeadError=EngineDeadError),
        "core.sched.scheduler": SimpleNamespace(Scheduler=TakesTokens),
        "core.sched.async_scheduler": SimpleNamespace(AsyncScheduler=type("AsyncScheduler", (TakesTokens,), {})),
        "request": SimpleNamespace(RequestStatus=SimpleNamespace(FINISHED_STOPPED="stopped")),
    }
    for name, module in others.items():
        monkeypatch.setitem(sys.modules, f"vllm.v1.{name}", module)
    monkeypatch.setattr("grpo.rollout.vllm_engine._end_process_group", lambda: None)  # called at the exit
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")


def on_vllm(study: Study, **engine: Any) -> Study:
    """The study with vLLM on a GPU that engine and learner share."""
    return changed(study, engine={"name": "vllm", "device": "cuda:0", **engine}, learner={"device": "cuda"})


@pytest.mark.usefixtures("on_gpu")
def test_a_sleeping_vllm_takes_weights_on_waking(mini_study: Study, folder: Path, model: Any, tokenizer: Any) -> None:
    """Memory for weights, then the current weights, then memory for keys and values."""
    engine = make_engine(on_vllm(mini_study, sleep_level=2), folder, model, tokenizer)
    llm = engine._llm  # type: ignore[attr-defined]
    assert llm.settings["enable_sleep_mode"] is True
    assert llm.settings["logprobs_mode"] == "processed_logprobs"  # vLLM's word for those at the temperature, of what is allowed
    put = ["reload_weights", "forget prefixes"]
    assert llm.calls == [*put, "sleep 2"]
    engine.synchronize(model, policy_version=3)
    assert llm.calls == [*put, "sleep 2"]  # not while it sleeps
    groups = engine.generate([(5, 6), (7,)], PARAMS, n=2, seed=4)
    assert llm.calls[3:] == ["wake weights", *put, "wake kv_cache", "generate", "sleep 2"]
    assert llm.prompts == [[5, 6], [7]] and llm.ends == ([0, 7], True)
    assert llm.seeds == [settings["seed"] for settings in request_settings(PARAMS, 2, 4, "cuda", 2)]
    for group, (i, n) in zip(groups, ((0, 2), (1, 1)), strict=True):
        assert group == [Completion((i, n), tokenizer.decode([i, n]), (-i / 4, -n / 4), "length", policy_version=3)] * 2
    llm.calls.clear()
    with engine.turns():
        for prompts in ([(5,), (6,)], [(5, 7, 8)]):
            engine.generate(prompts, PARAMS, 1, 4, [CompletionSpec(1, 2)] * len(prompts))
    assert llm.calls == ["wake weights", *put, "wake kv_cache", "generate", "generate", "sleep 2"]  # once in an episode


@pytest.mark.usefixtures("on_gpu")
def test_vllms_asynchronous_scheduler_ends_responses(mini_study: Study, folder: Path, model: Any, tokenizer: Any) -> None:
    """(tests/rollout/test_vllm.py has vLLM's own scheduler.)"""
    engine = make_engine(on_vllm(mini_study), folder, model, tokenizer)
    settings = engine._llm.settings  # type: ignore[attr-defined]
    assert settings["async_scheduling"] is True and settings["scheduler_cls"].__mro__[1].__name__ == "AsyncScheduler"
    scheduler = settings["scheduler_cls"]()
    x, other = tokenizer("x")["input_ids"], tokenizer("=")["input_ids"]
    engine.generate([(5,)], PARAMS, n=1, seed=4)  # the stop strings are x and yz, after two tokens
    request = SimpleNamespace(output_token_ids=[], status="running", sampling_params=SimpleNamespace(min_tokens=2))
    for new, stops in ((x, False), (x, False), (other, False), ([], False), (x, True)):
        assert scheduler._update_request_with_output(request, new, is_stale=False) == (new, stops)
        assert request.status == ("stopped" if stops else "running")


@pytest.mark.usefixtures("on_gpu")
def test_a_vllm_that_stays_awake_takes_weights_at_once(mini_study: Study, folder: Path, model: Any, tokenizer: Any) -> None:
    engine = make_engine(on_vllm(mini_study), folder, model, tokenizer)
    llm = engine._llm  # type: ignore[attr-defined]
    engine.synchronize(model, policy_version=1)
    engine.generate([(5,)], PARAMS, n=1, seed=4)
    assert llm.calls == ["reload_weights", "forget prefixes"] * 2 + ["generate"]
    assert llm.settings["enable_sleep_mode"] is False


@pytest.mark.parametrize(
    ("level", "engine", "learner", "follows_policy", "expected"),
    [
        (2, "cuda", "cuda", True, True),
        (2, "cuda:0", "cuda", True, True),
        (2, "cuda", "cuda:0", True, True),
        (0, "cuda:0", "cuda:0", True, False),
        (2, "cuda:0", "cuda:1", True, False),  # a GPU each
        (2, "cuda:0", "cpu", True, False),
        (2, "cuda:0", "cuda:0", False, False),  # a stage that evaluates, or an asynchronous run's generator
    ],
)
def test_vllm_sleeps_only_where_a_learner_on_the_same_gpu_gains_by_it(
    mini_study: Study, level: int, engine: str, learner: str, follows_policy: bool, expected: bool
) -> None:
    study = changed(on_vllm(mini_study, sleep_level=level, device=engine), learner={"device": learner})
    assert sleeps(study, follows_policy) == expected


@pytest.mark.usefixtures("on_gpu")
def test_a_runs_share_of_memory(
    mini_study: Study, model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In colocated and asynchronous runs; fine-tuning and stages that only evaluate get the study's share."""
    from grpo.training.asynchronous import start

    save_checkpoint(tmp_path, model, tokenizer)
    study, own = on_vllm(mini_study, sleep_level=2), mini_study.grpo.model_copy(update={"gpu_memory_utilization": 0.3})
    assert mini_study.grpo.gpu_memory_utilization == 0.85
    engines: list[Any] = [make_engine(study, tmp_path, model, tokenizer, config=config) for config in (own, study.sft, None)]
    monkeypatch.setattr(start, "_set_up", lambda *_: None)  # this process is no actor's
    run: Any = SimpleNamespace(model=tmp_path, config=own)
    engines.append(start._make_generator(study, run, Path())[0])
    assert [engine._llm.settings["gpu_memory_utilization"] for engine in engines] == [0.3, 0.85, 0.85, 0.3]
    assert engines[-1]._llm.calls == []  # it waits for weights, and does not sleep meanwhile


@pytest.mark.parametrize(("allowed", "held"), [(7, 6), (2, 3)], ids=["two prompts of three", "a group is never split"])
def test_a_batch_holds_whole_groups(model: Any, tokenizer: Any, prompts: list[list[int]], allowed: int, held: int) -> None:
    """And the model keeps its mode."""
    rows, training = [], []
    model.train(allowed == 7)

    def note(module: Any, args: Any) -> None:
        rows.append(len(args[0]))
        training.append(module.training)

    hook = model.register_forward_pre_hook(note)
    groups = TransformersEngine(model, tokenizer, allowed).generate(prompts, SamplingParams(max_tokens=6), n=3, seed=0)
    hook.remove()
    assert not any(training) and model.training is (allowed == 7)
    assert max(rows) == held and [len(group) for group in groups] == [3] * len(prompts)


def test_synchronize_changes_weights_and_policy_version(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    engine = TransformersEngine(model, tokenizer)
    params = SamplingParams(max_tokens=6)
    before = engine.generate(prompts, params, n=1, seed=0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    engine.synchronize(other, policy_version=4)
    after = engine.generate(prompts, params, n=1, seed=0)
    assert {c.policy_version for c in flatten(before)} == {0}
    assert {c.policy_version for c in flatten(after)} == {4}
    assert after == [
        [Completion(c.token_ids, c.text, c.log_probs, c.finish_reason, 4) for c in group]
        for group in TransformersEngine(other, tokenizer).generate(prompts, params, n=1, seed=0)
    ]
    assert [c.token_ids for c in flatten(before)] != [c.token_ids for c in flatten(after)]


def test_context_overflow_names_what_fits(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    longest = max(len(prompt) for prompt in prompts)
    engine = TransformersEngine(model, tokenizer)
    fits = 256 - longest
    told = rf"context of 256 .*{longest} tokens and a response of up to {fits + 1}.*{fits} or less"
    with pytest.raises(UserError, match=told):
        engine.generate(prompts, SamplingParams(max_tokens=fits + 1), n=1, seed=0)
    (completion,) = engine.generate(prompts[1:2], SamplingParams(max_tokens=fits), n=1, seed=0)[0]
    assert len(completion.token_ids) == fits or completion.finish_reason == "stop"
    with pytest.raises(UserError, match="1 of 2 prompts are too long"):  # the other one just fits
        require_context_length(10, [(1,) * 4, (1,) * 5], max_tokens=6)


def test_tokens_that_the_model_lacks_may_pad_and_end_a_turn(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    """As after tokens were added to the tokenizer only."""
    found, params, lacking = [], SamplingParams(min_tokens=2, max_tokens=5), len(tokenizer)
    for pad, turn in ((lacking, lacking), (-1, None), (None, None), (tokenizer.pad_token_id, None)):
        other = copy.deepcopy(tokenizer)
        other.pad_token_id, other.end_of_turn_id = pad, turn
        found.append(TransformersEngine(model, other).generate(prompts, params, n=2, seed=0))
    assert found == [found[-1]] * 4


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", ["transformers", "vllm"])
def test_a_prompt_without_tokens_is_refused(mini_study: Study, folder: Path, model: Any, tokenizer: Any, name: str) -> None:
    study = on_vllm(mini_study) if name == "vllm" else mini_study
    engine = make_engine(study, folder, model, tokenizer)
    with pytest.raises(UserError, match="prompt 2 of 2 has no tokens"):
        engine.generate([(5, 6), ()], SamplingParams(max_tokens=5), n=2, seed=0)


SAID: dict[str, tuple[str, dict[str, Any], str, str, int]] = {  # what is said, how; text, why it ended, number of tokens
    "end of text is a token, but no text": ("4 apples$ and more", {"max_tokens": 30}, "4 apples", "stop", 9),
    "the limit": ("4 apples and more", {"max_tokens": 10}, "4 apples a", "length", 10),
    "end of text as the last allowed token": ("abc$", {"max_tokens": 4, "stop": (";x",)}, "abc", "stop", 4),
    "a stop string as the last allowed token": ("ab;x", {"max_tokens": 4, "stop": (";x",)}, "ab;x", "stop", 4),
    "a stop string stays": ("</think> <answer>4</answer> x", {"max_tokens": 60, "stop": ("</answer>",)},
        "</think> <answer>4</answer>", "stop", 27),
    "beyond ASCII": ("antwoord één, twee", {"max_tokens": 40, "stop": ("éé",)}, "antwoord éé", "stop", 13),
    # Tokens 3 to 5 are the fallback in the place of end of text; the sixth may end the completion.
    "no end of text before the minimum": ("ab$$$$cd", {"min_tokens": 5, "max_tokens": 12}, "ab...", "stop", 6),
    "end of text after the minimum": ("abcd$", {"min_tokens": 4, "max_tokens": 12}, "abcd", "stop", 5),
    "one before the minimum": ("a;bcdefg$", {"min_tokens": 6, "max_tokens": 30, "stop": (";",)}, "a;bcdefg", "stop", 9),
    "a stop string at the minimum": ("ab;cdef$", {"min_tokens": 3, "max_tokens": 30, "stop": (";",)}, "ab;cdef", "stop", 8),
    "a stop string after the minimum": ("abc;def", {"min_tokens": 3, "max_tokens": 30, "stop": (";",)}, "abc;", "stop", 4),
    # A stop string before the minimum is not found again later, by the > of another word.
    "an early stop string": ("<e>b>cd$", {"min_tokens": 4, "max_tokens": 30, "stop": ("<e>",)}, "<e>b>cd", "stop", 8),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_how_a_completion_ends(byte_tokenizer: Any, case: str) -> None:
    """Where a model says this (``$`` is end of text), one token a byte, and dots where that is forbidden and after it."""
    said, params, text, reason, tokens = SAID[case]
    script, (dot,) = (byte_tokenizer(text)["input_ids"] for text in (said.replace("$", byte_tokenizer.eos_token), "."))

    def forward(ids: Tensor, past_key_values: Any, shared: Any = None, **_: Any) -> Any:
        """Find the place in the script by the tokens in the cache: a row that loses its cache says something else."""
        seen, _ = past_key_values.update(*[ids[:, None, :, None].float()] * 2, 0)
        before = [] if shared is None else seen[0, 0, :, 0].long().tolist()
        logits = torch.zeros(1, ids.shape[1], len(byte_tokenizer)).index_fill(2, torch.tensor(dot), 50.0)
        if len(before) < len(script) and all(a in (b, dot) for a, b in zip(before, script, strict=False)):
            logits[0, -1, script[len(before)]] = 100.0
        return SimpleNamespace(logits=logits)

    model = torch.nn.Module()
    model.forward, model.device, model.dtype = forward, torch.device("cpu"), torch.float32
    model.config = SimpleNamespace(max_position_embeddings=512)
    ((completion,),) = TransformersEngine(model, byte_tokenizer).generate([[65]], SamplingParams(**params), n=1, seed=0)
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == (text, reason, tokens)


def test_any_of_several_stop_tokens_ends_a_completion(tmp_path: Path) -> None:
    """The token stays in the completion, but not in its text; none is drawn before min_tokens; padding may be one of them."""
    tiny_checkpoint(tmp_path, "llama", "like_qwen3", TEXTS, initializer_range=0.1)
    model, tokenizer = load_model(tmp_path), load_tokenizer(tmp_path)
    assert len(tokenizer.stop_token_ids) == 2 and tokenizer.pad_token_id == tokenizer.eos_token_id
    prompts = [tokenizer.prompt_ids(text) for text in TEXTS]
    engine = TransformersEngine(model, tokenizer)
    completions = flatten(engine.generate(prompts, SamplingParams(max_tokens=30), n=150, seed=1))
    ended_by = Counter(c.token_ids[-1] for c in completions if c.finish_reason == "stop")
    assert set(ended_by) == set(tokenizer.stop_token_ids)
    assert all(not set(c.token_ids[:-1]) & set(ended_by) for c in completions)
    assert all(len(c.token_ids) == 30 for c in completions if c.finish_reason == "length")
    shown = [tokenizer.decode(c.token_ids[:-1] if c.finish_reason == "stop" else c.token_ids) for c in completions]
    assert [c.text for c in completions] == shown and not any("<|im_end|>" in text for text in shown)
    late = flatten(engine.generate(prompts, SamplingParams(min_tokens=20, max_tokens=30), n=150, seed=1))
    assert not any(set(c.token_ids[:20]) & set(ended_by) for c in late)


TAGS = ("<think>", "</think>", "<answer>", "</answer>")
WRITTEN = ["the answer is 4 END of it", "Q: what A: 42 so Q: next A: 7", "END END", "a b c \n d"]


def made_of(backend: Backend, stop_tokens: list[str]) -> Tokenizer:
    ends = {"eos_token_id": [backend.token_to_id(token) for token in stop_tokens]}
    files = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps({"eos_token": stop_tokens[0]})}
    return Tokenizer({name: text.encode() for name, text in (files | {"generation_config.json": json.dumps(ends)}).items()})


def byte_level(special_tags: bool = False, stop_tokens: tuple[str, ...] = ("</s>",)) -> Tokenizer:
    """A tokenizer like GPT-2's, with the tags of r1_zero as added tokens."""
    backend = byte_level_bpe(WRITTEN * 5, ["</s>", "<|im_end|>"])
    backend.add_tokens([AddedToken(tag, special=special_tags, normalized=False) for tag in TAGS])
    return made_of(backend, list(stop_tokens))


def like_llama2(prepend_scheme: str = "always") -> Tokenizer:
    """A tokenizer in which a space is part of the next token, and a text's first space is dropped."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend_scheme, split=True)
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    backend.train_from_iterator(WRITTEN * 5, trainer)
    return made_of(backend, ["</s>"])


def said(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...]) -> Completion:
    """The completion that an engine makes of a sequence of tokens."""
    responses, reason, length = Responses(tokenizer, stop), "length", len(ids)
    for n in range(1, len(ids) + 1):
        if responses.has_ended(ids[:n]):
            reason, length = "stop", n
            break
    return responses.completion(ids[:length], [-1.0] * length, reason, 3)


@pytest.mark.parametrize("tokenizer", [byte_level(), like_llama2("always"), like_llama2("first")], ids=["bytes", "▁", "▁first"])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("the answer is 4 END of it", " END"),
        ("so Q: next", "Q: "),
        ("so Q: next", ": n"),
        ("4 END of it", "END "),
        ("a b", " "),
        ("so 4 \n d", "\n"),
        ("the é is é 漢字, then", "漢字"),
        ("so 🧮 it is", "🧮 i"),
        ("nothing ends it", "END"),
    ],
)
def test_a_response_ends_where_its_text_first_holds_a_stop_string(tokenizer: Tokenizer, text: str, stop: str) -> None:
    """The text, decoded whole and cut there, is the truth."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(ids)
    assert whole == text
    one = said(tokenizer, ids, (stop,))
    before, found, _ = whole.partition(stop)
    assert one.text == before + found
    assert one.finish_reason == ("stop" if found else "length")
    # No token more than it takes.
    assert stop not in tokenizer.decode(one.token_ids[:-1]) or not found


@pytest.mark.parametrize("stop", [("</answer>",), ("é", "42"), ("d END", "->"), ("n",)])
def test_the_newest_tokens_of_a_byte_level_tokenizer_tell_what_the_whole_text_tells(stop: tuple[str, ...]) -> None:
    """For tokens in any order, of which many are parts of characters, and others tags."""
    rng, tokenizer = random.Random(0), byte_level()
    assert tokenizer.is_byte_level and not like_llama2().is_byte_level
    newest, whole = Responses(tokenizer, stop), Responses(tokenizer, stop)
    whole._newest = slice(None)
    pieces = [tokenizer(text)["input_ids"] for text in (*WRITTEN, *TAGS, "é", "42", "d END", "- >", "->", "n")]
    ends = 0
    for _ in range(300):
        ids = [token for _ in range(8) for token in rng.choice([rng.choice(pieces), [rng.randrange(len(tokenizer))]])]
        found = [[one.has_ended(ids[:n]) for n in range(1, len(ids) + 1)] for one in (newest, whole)]
        assert found[0] == found[1]
        assert [newest.text(ids[:n], "stop") for n in range(1, 9)] == [whole.text(ids[:n], "stop") for n in range(1, 9)]
        ends += sum(found[0])
    assert ends > 50


TURN, TWO = "a<|im_end|> b", {"stop_tokens": ("</s>", "<|im_end|>")}
ANSWER = "so 3 </think> <answer> 42 </answer>"


@pytest.mark.parametrize(
    ("kind", "written", "stop", "text", "tokens"),  # of the tokens and of the completion the text
    [
        ({}, TURN, (), TURN, TURN),  # no end: all is text
        ({}, TURN, ("<|im_end|>",), "a<|im_end|>", "a<|im_end|>"),  # a stop string stays
        (TWO, TURN, (), "a", "a<|im_end|>"),  # a stop token does not
        (TWO, TURN, ("<|im_end|>",), "a<|im_end|>", "a<|im_end|>"),
        (TWO, TURN, (">",), "a", "a<|im_end|>"),  # which only happens to be in the stop token
        ({}, TURN, ("<|im",), "a<|im", "a<|im_end|>"),  # cut within the token
        # Of two stop strings that one token completes, the first in the text counts.
        ({}, "so END of it", ("N", "D"), "so EN", "so END"),
        ({}, "so END of it", ("D", "N"), "so EN", "so END"),
        # Tags that are tokens of their own, and perhaps special ones, are read in the text.
        ({}, f"{ANSWER} and more", R1_ZERO.stop, ANSWER, ANSWER),
        ({"special_tags": True}, f"{ANSWER} and more", R1_ZERO.stop, ANSWER, ANSWER),
    ],
)
def test_the_text_holds_every_token_but_the_one_that_ends_it(
    kind: dict[str, Any], written: str, stop: tuple[str, ...], text: str, tokens: str
) -> None:
    tokenizer = byte_level(**kind)
    one = said(tokenizer, tokenizer(written)["input_ids"], stop)
    assert (one.text, tokenizer.decode(one.token_ids)) == (text, tokens)
    assert one.finish_reason == ("stop" if tokens != written else "length")


def test_a_stop_string_that_was_complete_before_the_newest_token_does_not_count() -> None:
    """As where it stands within the first ``min_tokens``."""
    tokenizer = byte_level()
    ids, responses = tokenizer("so END")["input_ids"], Responses(tokenizer, ("END",))
    assert responses.has_ended(ids) and not responses.has_ended([*ids, *tokenizer("!")["input_ids"]])


def test_a_stop_token_within_the_minimum_stays_in_the_text() -> None:
    """With an engine that lets one through, and a response that the limit cuts after it."""
    for text in ("a</s>b", "a</s>"):
        ids = (tokenizer := byte_level())(text)["input_ids"]
        assert Responses(tokenizer, ()).completion(ids, [0.0] * len(ids), "length", 0).text == text


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_a_response_that_the_engine_did_not_finish_is_no_completion(reason: Any) -> None:
    with pytest.raises(ValueError, match=rf"ended a response with {reason!r}"):
        Completion((5, 6), "4", (-0.1, -0.2), reason)
    with pytest.raises(ValueError, match=rf"ended a response with {reason!r}"):
        Responses(byte_level(), ("x",)).completion([], [], reason, 0)


def test_each_token_of_a_completion_has_a_log_probability() -> None:
    for tokens, log_probs in ((2, 1), (1, 2), (0, 1)):
        with pytest.raises(ValueError, match=f"gave {tokens} tokens with {log_probs} log-probabilities"):
            Completion((5,) * tokens, "", (0.0,) * log_probs, "stop")


@pytest.mark.parametrize(
    ("sizes", "length", "message"),
    [
        ([3, 5], 2, r"groups of 4 responses, and returned groups of \[3, 5\]"),
        ([4], 2, r"groups of \[4\]"),
        ([4, 4, 4], 2, r"groups of \[4, 4, 4\]"),
        ([4, 4], 0, "asked for 1 to 8 tokens, and returned a response of 0"),
        ([4, 4], 9, "asked for 1 to 8 tokens, and returned a response of 9"),
        ([4, 4], 1, None),
        ([4, 4], 8, None),
    ],
)
def test_what_an_engine_returns_is_what_it_was_asked_for(sizes: list[int], length: int, message: str | None) -> None:
    group = [Completion((5,) * length, "4", (-0.1,) * length, "stop")] * 5
    engine = SimpleNamespace(generate=lambda *_, **__: [group[:size] for size in sizes])
    sampler = Sampler(cast(Any, engine), byte_level(), Format("{question}"), cast(Any, None))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        rollouts = sample_rollouts(sampler, [Problem(name, name, "") for name in "ab"], SamplingParams(max_tokens=8), 4, 0)
        assert [rollout.problem.id for rollout in rollouts] == [*"aaaabbbb"]
