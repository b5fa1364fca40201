"""Real vLLM (its CPU build) against the model it samples from. Run by `make test-vllm`, in an environment of its own."""

import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from environment_parts import Talk
from learner_parts import as_rollouts
from model_parts import FOR_VLLM, MIXTURES, byte_level, tiny_checkpoint, tiny_model
from pipeline_parts import ROOT, sh
from ruamel.yaml import YAML
from study_parts import ASYNCHRONOUS, Edit, activate, in_two_processes, needed_selections, shard_learner
from training_parts import read_csv, scored
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu_parts.checksums import are_equal, checksums_of_policy, checksums_of_vllm
from grpo.common.errors import UserError
from grpo.common.files import write_json
from grpo.common.records import Problem, Rollout
from grpo.handouts import evaluate_vllm
from grpo.learner.learner import Learner
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.rollout.engine import CompletionSpec, SamplingParams
from grpo.rollout.sampling import Sampler, sample_rollouts
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.rollout.vllm_engine import VllmEngine, VllmSettings, stopping_scheduler
from grpo.study.config import GrpoConfig, LearnerSettings
from grpo.tasks import formats
from grpo.tasks.environment import Environment
from grpo.tasks.task import Format
from grpo.training.asynchronous.actors import Weights

pytestmark = pytest.mark.vllm
STEPS = 14  # of a run of the mini study


@pytest.fixture(scope="module")
def served(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A random model (grouped-query attention, heads of 32, the smallest that vLLM's CPU attention takes), and vLLM with it."""
    torch.set_num_threads(2)
    config = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, tiny_model("qwen2", **config, **FOR_VLLM), tokenizer)
    model = load_model(folder)
    engine = VllmEngine(folder, model, VllmSettings("float32", "cpu", 0.5, max_batch_size=64))
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in ("Mia has 3 apples.", "How many", "Tom")]
    yield SimpleNamespace(engine=engine, model=model, prompts=prompts, folder=folder, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def plain(served: Any) -> Any:
    """vLLM as its users start it, with the same model: it detokenises, and searches the text for stop strings."""
    from vllm import LLM

    return LLM(str(served.folder), dtype="float32", enforce_eager=True, max_num_seqs=64, logprobs_mode="processed_logprobs")


def rollouts(served: Any, params: SamplingParams, n: int, seed: int = 0) -> list[Rollout]:
    return as_rollouts(served.prompts, served.engine.generate(served.prompts, params, n=n, seed=seed))


def make_learner(model: Any, temperature: float = 1.0) -> Learner:
    config = GrpoConfig(
        rollout_batch_size=12, train_batch_size=12, group_size=4, gradient_accumulation_steps=1, learning_rate=1e-2,
        sampling_temperature=temperature,
    )  # fmt: skip
    return Learner(model, config, 0, LearnerSettings(max_tokens_per_microbatch=4096))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_are_the_learners(served: Any, temperature: float) -> None:
    """Greedy ones are those of temperature 1, as in the other engine, which says the same."""
    params = SamplingParams(temperature=temperature, max_tokens=20)
    sampled = rollouts(served, params, n=4 if temperature else 1)
    expected = make_learner(served.model, temperature or 1.0).log_probs(sampled)
    if not temperature:
        here = TransformersEngine(served.model, served.tokenizer).generate(served.prompts, params, n=1, seed=0)
        assert [r.completion.token_ids for r in sampled] == [one.token_ids for (one,) in here]
    for rollout, log_probs in zip(sampled, expected, strict=True):
        assert len(rollout.completion.token_ids) == len(rollout.completion.log_probs) > 0
        assert torch.tensor(rollout.completion.log_probs) == pytest.approx(log_probs, abs=1e-3)


def test_a_completion_ends_at_its_limit_or_right_after_the_stop_string(served: Any) -> None:
    sampled = rollouts(served, SamplingParams(max_tokens=12, stop=("e", "12")), n=20)
    reasons = Counter(r.completion.finish_reason for r in sampled)
    assert set(reasons) == {"stop", "length"}
    for completion in (r.completion for r in sampled):
        whole = served.tokenizer.decode(completion.token_ids)
        assert whole.startswith(completion.text)
        ended_itself = completion.token_ids[-1] == served.tokenizer.eos_token_id
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 12
        elif not ended_itself:
            assert completion.text.endswith(("e", "12"))
            assert "e" not in completion.text[:-1] and "12" not in completion.text[:-1]
    late = rollouts(served, SamplingParams(min_tokens=6, max_tokens=12, stop=("e",)), n=20)
    assert min(len(r.completion.token_ids) for r in late) > 6


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("stop", "least"), [(("e", "12"), 0), ((" th", "é", "a b"), 0), (("e",), 6), ((), 3)])
def test_responses_end_where_vllm_ends_them(
    served: Any, plain: Any, stop: tuple[str, ...], least: int, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same tokens, log-probs and reasons, with either of vLLM's schedulers (on a CPU both schedule a step after the other)."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    core = served.engine._llm.llm_engine.engine_core.engine_core
    if asynchronous:
        ours = stopping_scheduler(served.engine._stops, asynchronous=True)
        assert issubclass(ours, AsyncScheduler) and not isinstance(core.scheduler, AsyncScheduler)
        monkeypatch.setattr(core.scheduler, "__class__", ours)
        core.scheduler.pp_size, core.scheduler._spec_token_placeholders = 1, []
    found = rollouts(served, SamplingParams(min_tokens=least, max_tokens=20, stop=stop), n=40, seed=7)
    ends = {"stop_token_ids": list(served.tokenizer.stop_token_ids), "ignore_eos": True}
    limits = {"n": 40, "min_tokens": least, "max_tokens": 20, "logprobs": 0}
    asked = VllmSamplingParams(**ends, **limits, stop=list(stop), include_stop_str_in_output=True, skip_special_tokens=False)
    torch.manual_seed(7)
    answers = plain.generate([{"prompt_token_ids": list(ids)} for ids in served.prompts], asked, use_tqdm=False)
    for rollout, answer in zip(found, [one for of_prompt in answers for one in of_prompt.outputs], strict=True):
        completion = rollout.completion
        assert (completion.token_ids, completion.finish_reason) == (tuple(answer.token_ids), answer.finish_reason)
        assert completion.log_probs == tuple(
            at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)
        )
        if answer.stop_reason in stop:
            assert completion.text == answer.text
    assert not stop or "stop" in {r.completion.finish_reason for r in found}


def test_completions_of_episodes_have_limits_of_their_own(served: Any) -> None:
    """With ``draws``, those of a prompt side by side, as the transformers engine gives them."""
    prompts, limits = served.prompts[:2], [3, 5, 7, 9]
    draws = [CompletionSpec(seed, limit) for seed, limit in enumerate(limits)]
    for engine in (served.engine, TransformersEngine(served.model, served.tokenizer)):
        groups = engine.generate(prompts, SamplingParams(min_tokens=9, max_tokens=9), 2, 0, draws)
        assert [[len(one.token_ids) for one in group] for group in groups] == [[3, 5], [7, 9]]
        sampled = as_rollouts(prompts, groups)
        for rollout, log_probs in zip(sampled, make_learner(served.model, 1.0).log_probs(sampled), strict=True):
            assert torch.tensor(rollout.completion.log_probs) == pytest.approx(log_probs, abs=2e-2)  # no stop token is drawn


def test_an_episode_of_several_turns(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn is asked with the ids as they were sampled and written; log-probs are transformers', on the sampled tokens."""
    asked: list[list[list[int]]] = []
    generate = VllmEngine.generate

    def noting(self: VllmEngine, prompts: Any, *rest: Any) -> Any:
        asked.append([list(prompt) for prompt in prompts])
        return generate(self, prompts, *rest)

    monkeypatch.setattr(VllmEngine, "generate", noting)
    environment = Environment("environment_parts:Talk", max_turns=3)
    sampler = Sampler(served.engine, served.tokenizer, Format("{question}", stop=("e", "a"), environment=environment), None)
    problems = [Problem(f"p/{i}", text, "") for i, text in enumerate(("Mia has 3 apples.", "How many"))]
    found = sample_rollouts(sampler, problems, SamplingParams(max_tokens=60, stop=("e", "a")), 4, seed=1)
    reference = AutoModelForCausalLM.from_pretrained(served.folder)
    assert {len(rollout.completion.observations) for rollout in found} >= {2}
    histories: list[list[list[int]]] = [[list(rollout.prompt_ids) for rollout in found[::4]], [], []]
    for rollout in found:
        completion, start, environment_of_it = rollout.completion, len(rollout.prompt_ids), Talk()
        environment_of_it.reset("")
        ids = [*rollout.prompt_ids, *completion.token_ids]
        for turn, (first, end) in enumerate(completion.observations):
            histories[turn + 1].append(ids[: start + end])
            said = completion.episode.messages[2 * turn][1]
            assert served.tokenizer.decode(completion.token_ids[first:end]) == environment_of_it.step(said)
        read = {place for span in completion.observations for place in range(*span)}
        sampled = [place for place in range(len(completion.token_ids)) if place not in read]
        with torch.no_grad():
            each = torch.log_softmax(reference(torch.tensor([ids])).logits[0, :-1], dim=-1)
        each = each.gather(-1, torch.tensor(ids)[1:, None])[start - 1 :, 0]
        assert each[sampled].tolist() == pytest.approx(completion.log_probs, abs=1e-3)
    assert asked == histories


def test_a_seed_fixes_the_samples_and_another_changes_them(served: Any) -> None:
    first, again, other = (rollouts(served, SamplingParams(max_tokens=8), n=4, seed=s) for s in (1, 1, 2))
    assert [r.completion for r in first] == [r.completion for r in again]
    assert [r.completion for r in first] != [r.completion for r in other]
    assert len({r.completion.token_ids for r in first[:4]}) > 1  # those of a group differ among themselves


def test_first_tokens_are_drawn_from_the_models_distribution(served: Any) -> None:
    """Chi-square over the tokens with at least 10 expected draws of 3,000, for vLLM as for the transformers engine."""
    prompt, n = served.prompts[0], 3000
    with torch.no_grad():
        p = torch.softmax(served.model(torch.tensor([prompt])).logits[0, -1].double(), dim=-1)
    for engine in (served.engine, TransformersEngine(served.model, served.tokenizer)):
        (group,) = engine.generate([prompt], SamplingParams(max_tokens=1), n=n, seed=3)
        counts = Counter(c.token_ids[0] for c in group)
        often = [i for i in range(len(p)) if p[i] * n >= 10]
        cells = [(counts[i], p[i].item() * n) for i in often]
        cells.append((n - sum(c for c, _ in cells), n - sum(e for _, e in cells)))
        statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
        degrees = len(cells) - 1
        assert degrees > 5
        assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def test_after_an_update_vllm_samples_with_the_new_weights(served: Any) -> None:
    """Completions change, checksums agree, log-probabilities are the new policy's; without synchronising all this fails."""
    params = SamplingParams(max_tokens=16)
    before = rollouts(served, params, n=4, seed=5)
    learner = make_learner(served.model)
    assert learner.update(scored(before, torch.rand(12), torch.randn(12)))["mismatch_mean"] < 1e-4
    sums = checksums_of_vllm(served.engine._llm)
    assert not are_equal(sums, checksums_of_policy(served.model, sums))
    stale = learner.update(scored(rollouts(served, params, n=4, seed=5), torch.rand(12), torch.randn(12)))
    assert stale["mismatch_mean"] > 1e-2  # the measure sees weights that were not put in

    served.engine.synchronize(served.model, policy_version=2)
    assert served.engine.policy_version == 2
    sums = checksums_of_vllm(served.engine._llm)
    assert len(sums) >= 6 and "model.embed_tokens.weight" in sums
    assert are_equal(sums, checksums_of_policy(served.model, sums))
    after = rollouts(served, params, n=4, seed=5)
    assert [r.completion.token_ids for r in after] != [r.completion.token_ids for r in before]
    assert {r.completion.policy_version for r in after} == {2}
    for rollout, log_probs in zip(after, learner.log_probs(after), strict=True):
        assert torch.tensor(rollout.completion.log_probs) == pytest.approx(log_probs, abs=1e-3)


def test_an_engine_that_ends_says_what_to_change(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), EngineDeadError()):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(served.engine._llm, "generate", fail)
            with pytest.raises(UserError, match=r"vLLM ended while it sampled .*lower engine\.max_batch_size"):
                rollouts(served, SamplingParams(max_tokens=4), n=1)


def test_evaluate_vllm_takes_the_handouts_arguments(plain: Any, tmp_path: Path) -> None:
    from vllm import SamplingParams as VllmSamplingParams

    def says_something(response: str, truth: str) -> dict[str, float]:
        return {"reward": float(bool(response)), "truth": float(truth)}

    asked = VllmSamplingParams(temperature=1.0, top_p=1.0, max_tokens=8)
    records = evaluate_vllm(plain, says_something, ["Mia has", "Tom has"], asked, ["1", "2"], tmp_path / "out.jsonl")
    assert [record["truth"] for record in records] == [1.0, 2.0]
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == records


# After those that use `served`: ending an engine ends what vLLM keeps for all of a process.
@pytest.mark.parametrize(
    ("kind", "tokenizer_kind"), [("llama", "like_llama3"), ("qwen3", "like_qwen3"), ("gemma2", "like_gemma")]
)
def test_other_architectures_and_several_stop_tokens(kind: str, tokenizer_kind: str, tmp_path: Path) -> None:
    """vLLM's log-probs and ends of responses equal those of learner and engine, in a chat if there is a template, before and
    after an update.
    """
    sizes = {"head_dim": 32, "sliding_window": 64} if kind == "gemma2" else {"head_dim": 32}
    tiny_checkpoint(tmp_path, kind, tokenizer_kind, ["What is 1 + 1?", "It is 2."], **FOR_VLLM | sizes)
    model, tokenizer = load_model(tmp_path), load_tokenizer(tmp_path)
    asked = (formats.CHAT, formats.QUESTION_ONLY)
    prompts = [f.encode(tokenizer, f.prompt(text)) for f in asked for text in ("What is 1 + 1?", "And 2 + 2?")]
    engine = VllmEngine(tmp_path, model, VllmSettings("float32", "cpu", 0.5, 64))
    learner = make_learner(model)
    for version in (1, 2):
        found = as_rollouts(prompts, engine.generate(prompts, SamplingParams(max_tokens=40), n=64, seed=version))
        for rollout, log_probs in zip(found, learner.log_probs(found), strict=True):
            assert rollout.completion.log_probs == pytest.approx(log_probs.tolist(), abs=1e-3)
            *before, last = rollout.completion.token_ids
            assert not set(before) & set(tokenizer.stop_token_ids)
            assert (last in tokenizer.stop_token_ids) == (rollout.completion.finish_reason == "stop")
        assert {r.completion.token_ids[-1] for r in found} >= set(tokenizer.stop_token_ids)
        learner.update(scored(found, torch.rand(len(found)), torch.randn(len(found))))
        engine.synchronize(model, version)


def test_a_mixture_of_experts_is_sampled_from_and_not_updated(tmp_path: Path) -> None:
    """transformers stacks experts in another way than vLLM's loader reads, so they are refused, whoever brings them."""
    tiny_checkpoint(tmp_path, "mixtral", "like_qwen3", ["What is 1 + 1?", "It is 2."], **FOR_VLLM | MIXTURES["mixtral"])
    model, tokenizer = load_model(tmp_path), load_tokenizer(tmp_path)
    settings = VllmSettings("float32", "cpu", 0.5, 64)
    engine = VllmEngine(tmp_path, None, settings)
    prompts = [tokenizer.prompt_ids("What is 1 + 1?")]
    found = as_rollouts(prompts, engine.generate(prompts, SamplingParams(max_tokens=40), n=16, seed=1))
    for rollout, log_probs in zip(found, make_learner(model).log_probs(found), strict=True):
        assert rollout.completion.log_probs == pytest.approx(log_probs.tolist(), abs=1e-3)
    for given in (model, Weights(dict(model.state_dict()))):
        with pytest.raises(UserError, match=r"takes no new weights .*engine\.name"):
            engine.synchronize(given, 1)
    with pytest.raises(UserError, match=r"takes no new weights .*engine\.name"):
        VllmEngine(tmp_path, model, settings)


@pytest.mark.parametrize("name", ["model.layers.0.no_such.weight", "no_such.weight", "model.norm.weight"])
def test_weights_that_vllm_does_not_take_are_refused(name: str, served: Any) -> None:
    """Of a name that it does not know, or of another shape."""
    with pytest.raises(UserError, match=r"vLLM cannot take the weights .*engine\.name"):
        served.engine.synchronize(Weights({name: torch.ones(2)}), 3)


@pytest.mark.parametrize("error", [KeyError, RuntimeError])
def test_an_error_in_the_policys_own_weights_keeps_its_kind(error: type[Exception], served: Any) -> None:
    """Though vLLM's loader asks for them."""

    class Broken(Weights):
        def state_dict(self) -> Any:
            raise error("no weights")

    with pytest.raises(error, match="no weights"):
        served.engine.synchronize(Broken({}), 3)


def test_both_engines_end_and_read_responses_alike(tmp_path: Path) -> None:
    """Tags that are special tokens, stop tokens that only config.json names, and a tokenizer that transformers reads in another
    way than its tokenizer.json describes.
    """
    backend = byte_level(["so 42 of them"], ["</s>", "<answer>", "</answer>"], 260)
    size, ends = backend.get_vocab_size(), [backend.token_to_id("</s>"), 65, 66]
    tiny_model("llama", size, eos_token_id=ends[1:], **FOR_VLLM | {"initializer_range": 0.02}).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    backend.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "LlamaTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert AutoTokenizer.from_pretrained(tmp_path).decode(backend.encode("so 42").ids) != "so 42"
    model, tokenizer = load_model(tmp_path), load_tokenizer(tmp_path)
    prompt, tag = tokenizer.prompt_ids("so"), backend.token_to_id("</answer>")
    engines = TransformersEngine(model, tokenizer), VllmEngine(tmp_path, model, VllmSettings("float32", "cpu", 0.5, 64))
    for engine, stop in itertools.product(engines, (("</answer>",), ())):
        (group,) = engine.generate([prompt], SamplingParams(max_tokens=60, stop=stop), n=256, seed=1)
        ended_by = Counter(one.token_ids[-1] for one in group if one.finish_reason == "stop")
        assert set(ended_by) == {*ends, *([tag] if stop else [])}
        assert not any(set(one.token_ids[:-1]) & set(ended_by) for one in group)
        for one in group:
            shown = one.token_ids[:-1] if one.token_ids[-1] in ends else one.token_ids
            assert one.text == backend.decode(shown, skip_special_tokens=False)
        assert all(any(text in one.text for one in group) for text in ("<answer>", "</answer>"))


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the mini study's data and model; its runs have 14 steps."""
    folder = tmp_path_factory.mktemp("mini")
    yaml = YAML()
    params = yaml.load(activate("mini", folder))
    params["evaluation"] |= {"zero_shot_prompts": ["question_only"], "every": STEPS // 2, "problems": 512}
    # Under the bare question it learns within 14 steps. A minimum length would narrow down what is drawn from.
    params["grpo"] |= {"n_grpo_steps": STEPS, "sampling_min_tokens": 0, "prompt": "question_only"}
    params |= {"seeds": [0], "seeds_in_one_stage": False}  # as several processes want it
    params["experiments"]["grpo_kl_divergence"]["arms"]["best"] = {}  # it keeps later steps
    yaml.dump(params, folder / "params.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # vLLM's environment lacks the project
        for stage in ("dataset", "model"):
            sh(folder, "grpo", stage, "main")
        yield folder


def use_engine(folder: Path, name: str, edit: Edit | None = None) -> None:
    yaml = YAML()
    params = yaml.load(folder / "params.yaml")
    params["engine"]["name"] = name
    if edit is not None:
        edit(params)
    yaml.dump(params, folder / "params.yaml")


def test_the_mini_study_learns_on_vllm(mini: Path) -> None:
    """Zero-shot rewards of both engines agree; 14 GRPO steps lift the reward as far on both."""
    folder = mini
    sh(folder, "grpo", "math_baseline")
    transformers = json.loads((folder / "reports/math_baseline.json").read_text())["question_only"]["accuracy"]
    use_engine(folder, "vllm")
    sh(folder, "grpo", "math_baseline")
    vllm = json.loads((folder / "reports/math_baseline.json").read_text())["question_only"]["accuracy"]
    p, n = (vllm["value"] + transformers["value"]) / 2, vllm["problems"]
    assert abs(vllm["value"] - transformers["value"]) < 3 * math.sqrt(2 * p * (1 - p) / n)

    run = folder / "data/runs/grpo_learning_rate/3e-4/0"
    sh(folder, "grpo", "train", "grpo_learning_rate", "3e-4")
    on_vllm = json.loads((run / "metrics.json").read_text())
    assert max(row["mismatch_mean"] for row in read_csv(run / "history.csv")) < 1e-3
    assert on_vllm["val/answer_reward"] > on_vllm["first/answer_reward"] + 0.2

    use_engine(folder, "transformers")
    sh(folder, "grpo", "train", "grpo_learning_rate", "3e-4")
    on_transformers = json.loads((run / "metrics.json").read_text())
    found, expected = on_vllm["val/answer_reward"], on_transformers["val/answer_reward"]
    print(f"answer reward after {STEPS} steps: {found:.3f} on vLLM, {expected:.3f} on transformers")
    # Four standard errors: problems (n = 512), and a spread between runs of .03.
    assert abs(found - expected) < 4 * math.sqrt(2 * (expected * (1 - expected) / n + 0.03**2))


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_each_sample_with_a_vllm_of_their_own(sharded: bool, mini: Path, tmp_path: Path) -> None:
    """Each works beside the process group with the policy's or the gathered weights."""
    folder = shutil.copytree(mini, tmp_path / "study")
    use_engine(folder, "vllm", shard_learner if sharded else in_two_processes)
    sh(folder, "grpo", "train", "grpo_learning_rate", "3e-4")
    run = folder / "data/runs/grpo_learning_rate/3e-4/0"
    metrics = json.loads((run / "metrics.json").read_text())
    how = "with a share of the weights each" if sharded else "with all weights each"
    print(f"answer reward after {STEPS} steps in two processes {how}: {metrics['val/answer_reward']:.3f} on vLLM")
    assert metrics["val/answer_reward"] > metrics["first/answer_reward"] + 0.2
    history = read_csv(run / "history.csv")
    assert len(history) == STEPS and max(row["mismatch_mean"] for row in history) < 1e-3


def test_with_a_generator_of_its_own_vllm_is_one_version_behind(mini: Path) -> None:
    """The generator's actor runs vLLM, and gets the learner's weights after each step."""
    use_engine(mini, "vllm")
    for experiment in needed_selections(ASYNCHRONOUS):
        winner = {"experiment": experiment, "winner": "the study's own", "overrides": {}, "before": []}
        write_json(mini / f"reports/select/{experiment}.json", winner)
    sh(mini, "grpo", "train", ASYNCHRONOUS, "lag_1")
    run = mini / f"data/runs/{ASYNCHRONOUS}/lag_1/0"
    metrics = json.loads((run / "metrics.json").read_text())
    print(f"answer reward after {STEPS} steps one version behind: {metrics['val/answer_reward']:.3f} on vLLM")
    assert metrics["val/answer_reward"] > metrics["first/answer_reward"] + 0.2
    history = read_csv(run / "history.csv")
    assert [row["lag_max"] for row in history] == [0] + [1] * (STEPS - 1)
    # One step moves the policy a little; weights of another version, or of none, would show at once.
    assert all(abs(row["ratio_mean"] - 1) < 0.05 for row in history)
