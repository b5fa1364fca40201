"""Estimate the GPU memory of a study in GiB (2**30 bytes), phase by phase, before it runs.

Computed from the model's shape and the study's settings; nothing is measured. Symbols: N parameters, V vocabulary size, d
hidden size, L layers, f feed-forward width, a and k the widths of all query and all key heads together, b bytes per number (2
in bfloat16 and float16, 4 in float32).

The learner holds (mixed precision, arXiv 1710.03740, Section 3.1):

- weights                bN
- float32 copy           4N if the model computes in half precision, else 0
- moments                8N (AdamW), or 2N (1 + 4/256) with 8 bits (bitsandbytes, arXiv 2110.02861, Section 2.1)
- starting weights       bN if an arm penalises KL
- weights to be sent     bN (lag + 1) if an arm is asynchronous and vLLM runs on a GPU

With ``lora`` the float32 copy, moments and gradients cover the adapters only: rank (inputs + outputs) per adapted matrix.
Held for part of a step:

- gradients              4N, from the first backward pass of an update to its optimizer step
- activations            of one microbatch of T tokens: T L ((8 + 4b) d + 2b (a + k) + 4b f), plus (4 + b)(a + k) per token and
                         layer if queries and keys are normalised; no attention scores (flash attention, arXiv 2205.14135).
                         With ``gradient_checkpointing`` b T L d, plus all of this for one layer (arXiv 1604.06174)
- logits                 10 V per token of a chunk (:func:`grpo.learner.microbatches.chunked_log_probs`)
- gradient of the output (4 + b) V d: of the output layer, in float32 and in the model's precision

With ``learner.fully_shard`` (:mod:`grpo.models.sharding`) each of P processes holds weights 4N / P, moments 8N / P and starting
weights bN / P. Let R be the parameters of embeddings, last norm and head, and S those of a layer. While it computes it also
holds gathered weights b (R + 2 S), or b V d while vLLM takes the weights; gradients 4N, whole; and reduced gradients 4N / P
plus 4 (R + S) in flight.

vLLM holds ``gpu_memory_utilization`` times the card while it samples. What weights and work space leave of that is for keys and
values, 2 b L k per token. A sleeping engine holds nothing, and so does the transformers engine between its rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3Config

from grpo.common.files import read_json
from grpo.common.imports import named_file
from grpo.common.records import read_problems
from grpo.learner.microbatches import TOKENS_AT_ONCE
from grpo.rollout.make_engine import memory_share, sleeps
from grpo.study import paths
from grpo.study.config import MAIN, GrpoConfig, HubModel, LocalModel, Lora, RunConfig, SamplingConfig
from grpo.study.effective import effective_run
from grpo.study.schema import Study
from grpo.tasks.task import Format, find_format

STATES_ON_DISK = 2  # saved states of a run in progress: one is kept, and another is being written
GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Assumed, not computed:
PROMPT_TOKENS = 200  # about the r1_zero prompt with a question
TRACE_TOKENS = 1024  # length of a trace for supervised fine-tuning
RESERVE_GIB = 1.0  # CUDA's context, cuBLAS's work space, a sleeping engine's graphs, gaps of the allocator
ENGINE_WORK_GIB = 1.0  # vLLM's work space
USES_REFERENCE = "KL to the start"  # name of the phase in which the starting weights are used
# Part of a phase, what makes it smaller, and whether the study can do so.
REMEDIES: tuple[tuple[str, str, Callable[[Study], bool]], ...] = (
    ("the engine", "lower grpo.gpu_memory_utilization", lambda s: s.engine.name == "vllm"),
    ("the engine", "set engine.sleep_level to 2", lambda s: s.engine.name == "vllm" and s.engine.sleep_level < 2),
    ("moments", "raise learner.processes", lambda s: s.learner.fully_shard),
    ("moments", "set learner.fully_shard", lambda s: not s.learner.fully_shard and s.learner.processes > 1),
    ("moments", "set learner.optimizer to adamw_8bit", lambda s: not s.learner.fully_shard and s.learner.optimizer == "adamw"),
    ("moments", "train adapters (lora)", lambda s: not s.learner.fully_shard and trains_all(s)),
    ("activations", "set learner.dtype to bfloat16", lambda s: not s.learner.fully_shard and s.learner.dtype == "float32"),
    ("activations", "set learner.gradient_checkpointing", lambda s: not s.learner.gradient_checkpointing),
    ("activations", "lower learner.max_tokens_per_microbatch", lambda s: s.learner.max_tokens_per_microbatch is not None),
    ("activations", "raise gradient_accumulation_steps", lambda s: s.learner.max_tokens_per_microbatch is None),
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a causal language model of transformers."""

    config: Any  # its configuration, which names hidden_size, num_hidden_layers and so on
    parameters: int  # N
    in_layers: int  # parameters of all layers
    matrices: dict[str, int]  # inputs plus outputs of each linear map of a layer, by its name
    query_key_norm: bool  # whether each head's queries and keys are normalised, as in Qwen3

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The shape of the model that transformers would build; it is built without memory for its weights."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        layers = model.base_model.layers
        maps = {name.rpartition(".")[2]: part for name, part in layers[0].named_modules() if isinstance(part, torch.nn.Linear)}
        matrices = {name: part.in_features + part.out_features for name, part in maps.items()}
        whole, in_layers = (sum(parameter.numel() for parameter in module.parameters()) for module in (model, layers))
        return cls(config, whole, in_layers, matrices, "q_norm" in dict(layers[0].self_attn.named_children()))

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: all except input embeddings that are not also the head."""
        embeddings = int(self.config.vocab_size * self.config.hidden_size)
        return self.parameters - (0 if self.config.tie_word_embeddings else embeddings)

    @property
    def head_dim(self) -> int:
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads)

    def kv_bytes(self, precision: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * precision * int(self.config.num_hidden_layers) * int(self.config.num_key_value_heads) * self.head_dim

    def layer_bytes(self, precision: int) -> int:
        """Bytes per token that a layer keeps for the backward pass."""
        heads = int(self.config.num_attention_heads) + int(self.config.num_key_value_heads)
        attention = (2 * precision + (4 + precision) * self.query_key_norm) * heads * self.head_dim
        hidden, feed_forward = int(self.config.hidden_size), int(self.config.intermediate_size)
        return (8 + 4 * precision) * hidden + 4 * precision * feed_forward + attention

    def adapter_parameters(self, lora: Lora) -> int:
        """Parameters of all LoRA matrices A and B: rank (inputs + outputs) per adapted matrix and layer."""
        adapted = sum(self.matrices.get(name, 0) for name in lora.targets or self.matrices)
        return int(self.config.num_hidden_layers) * lora.rank * adapted


# From config.json on the Hub: layers, hidden and feed-forward width, heads for queries and for keys, vocabulary, context. The
# numbers of parameters agree with the model cards: 1.54, 7.61 and 0.6 billion, and without embeddings 1.31, 6.53 and 0.44.
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
KNOWN = {
    "Qwen/Qwen2.5-Math-1.5B": (Qwen2Config, (28, 1536, 8960, 12, 2, 151936), 4096, True),
    "Qwen/Qwen2.5-Math-7B": (Qwen2Config, (28, 3584, 18944, 28, 4, 152064), 4096, False),
    "Qwen/Qwen3-0.6B": (Qwen3Config, (28, 1024, 3072, 16, 8, 151936), 40960, True),
}


def shape_of(study: Study, task: str = MAIN) -> Shape | None:
    """The shape of a task's model; None if it is neither in :data:`KNOWN` nor on this machine, or is of another kind."""
    model = study.models[task]
    if isinstance(model, HubModel) and model.repo in KNOWN:
        kind, sizes, context, tied = KNOWN[model.repo]
        named = dict(zip(SIZES, sizes, strict=True))
        return Shape.of(kind(**named, max_position_embeddings=context, tie_word_embeddings=tied))
    folder = named_file(model.path) if isinstance(model, LocalModel) else paths.model(task)
    try:
        return Shape.of(AutoConfig.from_pretrained(folder)) if (folder / "config.json").exists() else None
    except (OSError, ValueError, AttributeError):  # damaged, or of an architecture without such layers
        return None


def configs(study: Study) -> list[RunConfig]:
    """The configuration of each arm that runs on the study's devices, as far as it is known before there are winners."""
    runs = [effective_run(study, name, arm, study.seeds[0], []) for name, arm in study.arms]
    return [run.config for run in runs if study.models[run.task].device != "cpu"]


def trains_all(study: Study) -> bool:
    """Whether an arm trains all weights, not only adapters."""
    return any(config.lora is None for config in configs(study))


def trained_parameters(study: Study, shape: Shape) -> int:
    """Largest number of trained parameters over the arms; an arm with LoRA trains only its adapters."""
    adapters = (shape.adapter_parameters(config.lora) for config in configs(study) if config.lora)
    return shape.parameters if trains_all(study) else max(adapters, default=shape.parameters)


def bytes_per_parameter(study: Study) -> dict[str, float]:
    """Bytes that the learner holds of each trained parameter in every phase; with ``fully_shard`` over all processes."""
    learner, precision = study.learner, BYTES[study.learner.dtype]
    if learner.fully_shard:
        return {"weights": 4, "float32 copy": 0, "moments": 8}
    moments = 2 * (1 + 4 / 256) if learner.optimizer == "adamw_8bit" else 8
    return {"weights": precision, "float32 copy": 4 if precision < 4 else 0, "moments": moments}


def saved_state_bytes(study: Study, shape: Shape) -> int:
    """Bytes of one saved state of a run: trained weights, their float32 copy and moments (:mod:`grpo.training.state`)."""
    return round(trained_parameters(study, shape) * sum(bytes_per_parameter(study).values()))


@cache
def _count(files: tuple[Path, ...], tokenizer: Path, prompt: Format) -> int:
    prompts = [prompt.prompt(problem.question) for file in files for problem in read_problems(file)]
    return max(len(encoded.ids) for encoded in Tokenizer.from_file(str(tokenizer)).encode_batch(prompts))


def longest_prompt(study: Study, prompt: str) -> int | None:
    """Count the tokens of the main task's longest prompt, without a chat template's; None without its problems and model."""
    report, tokenizer = paths.dataset_report(MAIN), (paths.model(MAIN) / "tokenizer.json").absolute()
    files = tuple(path.absolute() for path in (paths.train(MAIN), paths.validation(MAIN)))
    there = all(path.exists() for path in (report, tokenizer, *files))
    # The report may be of another study.
    if not there or read_json(report, f"dataset@{MAIN}", keys=("task",))["task"] != study.tasks[MAIN]["use"]:
        return None
    return _count(files, tokenizer, find_format(study.task(MAIN), prompt))


def longest(study: Study, config: RunConfig) -> int:
    """Tokens of the longest sequence (prompt and response), with the main task's prompts."""
    prompt = config.prompt if config.prompt in study.task(MAIN).formats else study.grpo.prompt  # an arm of another task
    response = config.sampling_max_tokens if isinstance(config, SamplingConfig) else TRACE_TOKENS
    return (longest_prompt(study, prompt) or PROMPT_TOKENS) + response


@dataclass(frozen=True)
class Phase:
    """What a GPU holds at the peak of one phase of a run: GiB by purpose."""

    name: str
    device: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def phases(study: Study, shape: Shape, card_gib: float) -> list[Phase]:
    """Compute what the study's GPUs of ``card_gib`` GiB hold in each phase, as the maximum over its arms (see the module)."""
    learner, precision, arms = study.learner, BYTES[study.learner.dtype], configs(study)
    shards = learner.processes if learner.fully_shard else 1
    n, trained, whole = shape.parameters, trained_parameters(study, shape), trains_all(study)
    # With adapters the frozen weights serve as the starting weights.
    penalises_kl = any(isinstance(config, GrpoConfig) and config.kl_coefficient and config.lora is None for config in arms)
    lags = [config.asynchronous.max_policy_lag for config in arms if isinstance(config, GrpoConfig) and config.asynchronous]
    sent = max(lags) + 1 if lags and study.engine.name == "vllm" and study.engine.device != "cpu" else 0
    tokens, output = _tokens(study), shape.config.vocab_size * shape.config.hidden_size
    around, of_layer = n - shape.in_layers, shape.in_layers // int(shape.config.num_hidden_layers)  # R and S
    sharded = learner.fully_shard

    # Part, bytes, and the phases that hold it by their first letters: rollouts, backward pass, optimizer step, KL to the start.
    of_learner = [(part, size * trained / shards, "rboK") for part, size in bytes_per_parameter(study).items()] + [
        ("frozen weights", 0 if whole else precision * n, "rboK"),
        ("weights to be sent", sent * precision * n, "rboK"),
        ("starting weights", precision * n / shards if penalises_kl else 0, "rboK"),
        ("gathered weights", precision * (around + 2 * of_layer) if sharded else 0, "bK"),
        ("gathered weights", precision * output if sharded else 0, "r"),
        ("gradients", 4 * trained, "b" if sharded else "bo"),
        ("reduced gradients", 4 * (n / shards + around + of_layer) if sharded else 0, "bo"),
        ("activations", tokens * _activation_bytes(study, shape), "b"),
        ("logits", min(TOKENS_AT_ONCE, tokens) * 10 * shape.config.vocab_size, "bK"),
        ("gradient of the output", (4 + precision) * output if whole else 0, "b"),
    ]
    # Keys and values of the transformers engine end with its rollouts.
    held = "r" if study.engine.name == "transformers" or sleeps(study, follows_policy=True) else "rboK"
    of_engine = [("the engine", _engine_gib(study, shape, card_gib) * GIB, held)]
    of_both = [("reserve", RESERVE_GIB * GIB, "rboK")]
    learns_on, samples_on = ("cuda:0" if place.device == "cuda" else place.device for place in (learner, study.engine))
    listed = []
    for name in ("rollouts", "backward pass", "optimizer step", *([USES_REFERENCE] if penalises_kl else [])):
        device = samples_on if name == "rollouts" else learns_on
        rows = of_learner * (device == learns_on) + of_engine * (device == samples_on) + of_both
        parts = {part: size / GIB for part, size, held in rows if name[0] in held and size}
        if device != "cpu":
            listed.append(Phase(name, device, parts))
    return listed


def kv_cache_gib(study: Study, shape: Shape, card_gib: float) -> float:
    """GiB of vLLM's share that are left for keys and values."""
    return _engine_gib(study, shape, card_gib) - shape.parameters * BYTES[study.engine.dtype] / GIB - ENGINE_WORK_GIB


def problems(study: Study, shape: Shape, card_gib: float) -> list[str]:
    """List why the study does not fit cards of this size, each reason with a remedy; empty if it fits."""
    messages = []
    for phase in phases(study, shape, card_gib):
        if phase.total > card_gib:
            helps = [remedy for part, remedy, possible in REMEDIES if part in phase.parts and possible(study)]
            remedies = ", or ".join([*helps, "use a larger card (gpu_memory_gib)"])
            messages.append(f"{phase.name}: {phase.total:.1f} GiB on {phase.device} of {card_gib:g}; {remedies}")
    if study.engine.name == "vllm" and study.engine.device != "cpu":
        context, left = shape.config.max_position_embeddings, kv_cache_gib(study, shape, card_gib)
        if left < (needed := context * shape.kv_bytes(BYTES[study.engine.dtype]) / GIB):
            sequence = f"one sequence of the model's {context} tokens needs {needed:.1f}; raise grpo.gpu_memory_utilization"
            messages.append(f"vLLM: {left:.1f} GiB are left for keys and values, and {sequence}")
    return messages


def largest_microbatch(study: Study, shape: Shape, card_gib: float) -> int | None:
    """The most tokens that a microbatch can have on the learner's card, prompts and padding included; None on a CPU."""
    for phase in phases(study, shape, card_gib):
        if "activations" in phase.parts:
            room = card_gib - phase.total + phase.parts["activations"]
            return max(0, int(room * GIB / _activation_bytes(study, shape)))
    return None


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows in columns, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([f"{cell:{'>' if i else '<'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def table(study: Study, shape: Shape, card_gib: float) -> str:
    """Format the phases as text: one column per phase, one row per part."""
    computed = phases(study, shape, card_gib)
    parts = sorted({part: None for phase in computed for part in phase.parts}, key=lambda part: part == "reserve")
    rows = [["GiB", *(f"{phase.name} ({phase.device})" for phase in computed)]]
    rows += [[part, *(f"{phase.parts[part]:.2f}" if part in phase.parts else "" for phase in computed)] for part in parts]
    rows += [["in all", *(f"{phase.total:.2f}" for phase in computed)], ["the card", *[f"{card_gib:.2f}"] * len(computed)]]
    counted = longest_prompt(study, study.grpo.prompt)
    source = f"counted in {paths.DATASETS / MAIN}" if counted else "assumed, as problems or tokenizer are missing"
    text = text_table(rows) + f"\nPrompts of {counted or PROMPT_TOKENS:,} tokens at most: {source}."
    if most := largest_microbatch(study, shape, card_gib):
        text += f"\nA microbatch of {most:,} tokens would still fit; the largest has {_tokens(study):,}."
    if study.engine.name == "vllm" and study.engine.device != "cpu":
        left, length = kv_cache_gib(study, shape, card_gib), max(longest(study, config) for config in configs(study))
        tokens = round(left * GIB / shape.kv_bytes(BYTES[study.engine.dtype]))
        sequences = f"{tokens:,} tokens, or {tokens / length:.0f} sequences of {length:,}"
        text += f"\nThe engine has {left:.2f} GiB for keys and values: {sequences}."
    return text


def _tokens(study: Study) -> int:
    """Tokens of the largest microbatch, padding included: the budget, or one sequence if longer, or a batch of responses."""
    budget = study.learner.max_tokens_per_microbatch
    return max([budget or 0, *(longest(study, c) * (1 if budget else c.micro_train_batch_size) for c in configs(study))])


def _activation_bytes(study: Study, shape: Shape) -> int:
    precision, layers = BYTES[study.learner.dtype], int(shape.config.num_hidden_layers)
    if study.learner.gradient_checkpointing:
        return layers * precision * int(shape.config.hidden_size) + shape.layer_bytes(precision)
    return layers * shape.layer_bytes(precision)


def _engine_gib(study: Study, shape: Shape, card_gib: float) -> float:
    """GiB of the engine: vLLM's share, or keys and values of the transformers engine, which shares the learner's weights."""
    if study.engine.name == "vllm":
        return max(memory_share(study, config) for config in (None, *configs(study))) * card_gib
    length = max(longest(study, config) for config in configs(study))
    return study.engine.max_batch_size * length * shape.kv_bytes(BYTES[study.learner.dtype]) / GIB
