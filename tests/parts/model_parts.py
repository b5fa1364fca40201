"""Tiny models with random weights, of several architectures, and tiny tokenizers."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from grpo.models.packing import Layout
from grpo.models.transformer import TransformerConfig, TransformerLM

torch.set_num_threads(1)  # a second thread costs more than it saves on so small models

_ARCHITECTURES = YAML(typ="safe", pure=True).load(Path(__file__).with_name("models.yaml"))
TINY: dict[str, dict[str, Any]] = _ARCHITECTURES["tiny"]
MIXTURES: dict[str, dict[str, Any]] = _ARCHITECTURES["mixtures"]
RANDOM: dict[str, dict[str, Any]] = _ARCHITECTURES["random"]
SIZES: dict[str, Any] = _ARCHITECTURES["sizes"]
SMALLER = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
# Heads of 32, the smallest that vLLM's attention on the CPU takes.
FOR_VLLM = {**SMALLER, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.2}


def tiny_model(kind: str = "qwen2", vocab_size: int = 512, **changes: Any) -> Any:
    """A randomly initialised model, as load_model would give it."""
    from transformers import AutoConfig

    from grpo.models.hugging_face import AutoModelForCausalLM, examine  # it knows the attention that is asked for

    torch.manual_seed(0)
    values = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **SIZES, **TINY.get(kind, {}), **changes}
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, **values)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.traits = examine(model)
    return model


def random_model(kind: str, vocab_size: int = 512, **changes: Any) -> Any:
    """A randomly initialised model of transformers, which the learner need not be able to train."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **SIZES, **(changes or MIXTURES.get(kind, {}))}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=vocab_size, **values)).eval()


def own_model(vocab_size: int = 512, **changes: Any) -> TransformerLM:
    """The project's own Transformer, as large."""
    torch.manual_seed(0)
    return TransformerLM(TransformerConfig(vocab_size, **{**SIZES, **changes})).eval()


def like_llama3(folder: Path, texts: Sequence[str]) -> None:
    """A tokenizer whose tokenizer.json puts a beginning before each text, and its chat template another; three stop tokens, and
    none for padding.
    """
    begin, end, turn, more = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"
    backend = byte_level(texts, [begin, end, turn, more, "<|start_header_id|>", "<|end_header_id|>"])
    add = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), add])
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    template = (
        "{{ bos_token }}{% for message in messages %}"
        + header.format("{{ message['role'] }}")
        + "{{ message['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
        + header.format("assistant")
        + "{% endif %}"
    )
    ends = [backend.token_to_id(token) for token in (end, more, turn)]
    config = {"bos_token": begin, "eos_token": turn}
    _write(folder, backend, config, template, {"eos_token_id": ends, "temperature": 0.6, "top_p": 0.9})


def like_gemma(folder: Path, texts: Sequence[str]) -> None:
    """A beginning, a token for padding, and a chat template (in tokenizer_config.json) that refuses system messages."""
    backend = byte_level(texts, ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"])
    begin = backend.token_to_id("<bos>")
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", begin)])
    template = (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "<start_of_turn>{{ message['role'] }}\n{{ message['content'] }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "add_bos_token": True}
    ends = [backend.token_to_id(token) for token in ("<eos>", "<end_of_turn>")]
    _write(folder, backend, config | {"chat_template": template}, None, {"eos_token_id": ends})


def like_qwen3(folder: Path, texts: Sequence[str]) -> None:
    """No beginning; the end of a turn is also padding; thinking can be left out."""
    backend = byte_level(texts, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    template = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    config = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "bos_token": None, "add_bos_token": False}
    ends = [backend.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    _write(folder, backend, config, template, {"eos_token_id": ends})


def like_olmo(folder: Path, texts: Sequence[str]) -> None:
    """No beginning, no chat template, one stop token, and no generation_config.json."""
    _write(folder, byte_level(texts, ["<|endoftext|>"]), {"eos_token": "<|endoftext|>"}, None, None)


TOKENIZERS = {"like_llama3": like_llama3, "like_gemma": like_gemma, "like_qwen3": like_qwen3, "like_olmo": like_olmo}


def byte_level(texts: Sequence[str], special: Sequence[str], size: int = 300) -> Backend:
    """Byte-level BPE of so many tokens and these."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens(list(special))
    return backend


def _write(
    folder: Path, backend: Backend, config: dict[str, Any], template: str | None, generation: dict[str, Any] | None
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


@contextmanager
def flex_attention_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn layouts into block masks, as on a GPU. torch refuses gradients on a CPU, but its uncompiled function has them."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(Layout, "on", Layout.block_mask)
    with torch.compiler.set_stance("force_eager"):
        yield


def put(folder: Path, name: str = "tokenizer_config.json", **values: Any) -> None:
    """Put values into a JSON file of a model's folder, which may not be there yet."""
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | values))


def tiny_checkpoint(folder: Path, kind: str, tokenizer: str, texts: Sequence[str], **changes: Any) -> None:
    """A folder as it comes from the Hub: a tiny model of an architecture, saved by transformers, and such a tokenizer."""
    TOKENIZERS[tokenizer](folder, texts)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    size = Backend.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    tiny_model(kind, size, **changes).save_pretrained(folder)
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    if "generation_config.json" not in kept:
        (folder / "generation_config.json").unlink()
