"""Estimate the GPU memory of a study in GiB (2**30 bytes), phase by phase, before it runs.

Computed from the model's shape and the study's settings; nothing is measured. Symbols: N parameters, V vocabulary size, d
hidden size, L layers, f feed-forward width, a and k the widths of all query and all key heads together, b bytes per number (2
in bfloat16 and float16, 4 in float32).

The learner holds (mixed precision as in arXiv 1710.03740, Section 3.1; :mod:`grpo.learner.optimizer`):

- weights                bN
- float32 copy           4N if the model computes in half precision, else 0
- moments                8N (AdamW), or 2N (1 + 4/256) with 8 bits (bitsandbytes, arXiv 2110.02861, Section 2.1)
- starting weights       bN if an arm measures or penalises KL; with ``offload_reference`` on the GPU only while used
- weights to be sent     bN (lag + 1) if an arm is asynchronous and vLLM runs on a GPU

With ``lora`` the float32 copy, moments and gradients cover the adapters only: rank (inputs + outputs) per adapted matrix.
The arm with the most trained parameters decides. Held for part of a step:

- gradients              4N, from the first backward pass of an update to its optimizer step
- activations            of one microbatch of T tokens: T L ((8 + 4b) d + 2b (a + k) + 4b f), plus (4 + b)(a + k) per token and
                         layer if queries and keys are normalised; no attention scores (flash attention, arXiv 2205.14135).
                         With ``gradient_checkpointing`` b T L d, plus all of this for one layer (arXiv 1604.06174)
- logits                 10 V per token of a chunk (:mod:`grpo.learner.chunked`)
- gradient of the output (4 + b) V d: of the output layer, in float32 and in the model's precision

With ``learner.fully_shard`` (:mod:`grpo.models.sharding`) each of P processes holds weights 4N / P, moments 8N / P and starting
weights bN / P. Let R be the parameters of embeddings, last norm and head, and S those of a layer. While it computes it also
holds gathered weights b (R + 2 S), or b V d while vLLM takes the weights; gradients 4N, whole; and reduced gradients 4N / P
plus 4 (R + S) in flight.

vLLM holds ``gpu_memory_utilization`` times the card while it samples. What weights and work space leave of that is for keys and
values, 2 b L k per token. A sleeping engine holds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo.commands.prompt_lengths import prompt_lengths
from grpo.common.imports import named_file
from grpo.common.text_table import text_table
from grpo.rollout.make_engine import memory_share, sleeps
from grpo.study import paths
from grpo.study.effective import effective_run
from grpo.study.methods import GrpoConfig, Lora, RunConfig, SamplingConfig
from grpo.study.schema import Study
from grpo.study.settings import MAIN, HubModel, LocalModel

STATES_ON_DISK = 3  # saved states of a run in progress: two are kept, and a third is being written
GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Assumed, not computed:
TRACE_TOKENS = 1024  # length of a trace for supervised fine-tuning
RESERVE_GIB = 1.0  # CUDA's context, cuBLAS's work space, a sleeping engine's graphs, gaps of the allocator
ENGINE_WORK_GIB = 1.0  # vLLM's work space
USES_REFERENCE = "KL to the start"  # name of the phase in which the starting weights are used


@dataclass(frozen=True)
class Shape:
    """A model of Qwen's architecture, by the names of its config.json.

    Attributes:
        attention_bias: queries, keys and values have biases (Qwen2).
        query_key_norm: each head's queries and keys are normalised (Qwen3).
    """

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    query_key_norm: bool = False

    @property
    def parameters(self) -> int:
        """N, the number of parameters."""
        return self.parameters_around + self.num_hidden_layers * self.parameters_of_layer

    @property
    def parameters_around(self) -> int:
        """R, the parameters of the embeddings, the last norm and the head."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2) + self.hidden_size

    @property
    def parameters_of_layer(self) -> int:
        """S, the parameters of one layer."""
        d, queries, keys = self.hidden_size, self.queries, self.keys
        attention = 2 * d * queries + 2 * d * keys + self.attention_bias * (queries + 2 * keys)
        attention += self.query_key_norm * 2 * self.head_dim
        return attention + 3 * d * self.intermediate_size + 2 * d

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: all except input embeddings that are not also the head."""
        return self.parameters - (0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size)

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads together."""
        return self.num_key_value_heads * self.head_dim

    def kv_bytes(self, precision: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * precision * self.num_hidden_layers * self.keys

    def layer_bytes(self, precision: int) -> int:
        """Bytes per token that a layer keeps for the backward pass."""
        attention = 2 * precision + (4 + precision) * self.query_key_norm
        norms_and_linear = (8 + 4 * precision) * self.hidden_size + 4 * precision * self.intermediate_size
        return norms_and_linear + attention * (self.queries + self.keys)


# From config.json on the Hub. The numbers of parameters agree with the model cards: 1.54, 7.61 and 0.6 billion, and without
# embeddings 1.31, 6.53 and 0.44.
SHAPES = {
    "Qwen/Qwen2.5-Math-1.5B": Shape(28, 1536, 8960, 12, 2, 128, 151936, 4096, True, attention_bias=True),
    "Qwen/Qwen2.5-Math-7B": Shape(28, 3584, 18944, 28, 4, 128, 152064, 4096, False, attention_bias=True),
    "Qwen/Qwen3-0.6B": Shape(28, 1024, 3072, 16, 8, 128, 151936, 40960, True, query_key_norm=True),
}


def shape_of(study: Study, task: str = MAIN) -> Shape | None:
    """The shape of a task's model; None if it is not in :data:`SHAPES` and its config.json is not on this machine."""
    model = study.models[task]
    if isinstance(model, HubModel) and model.repo in SHAPES:
        return SHAPES[model.repo]
    folder = named_file(model.path) if isinstance(model, LocalModel) else paths.model(task)
    return read_shape(folder / "config.json")


def read_shape(path: Path) -> Shape | None:
    """Read the shape from a config.json of Qwen2 or Qwen3; None if the file is missing or of another architecture."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, heads = config["model_type"], config["num_attention_heads"]
        return Shape(
            **{
                name: config[name]
                for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
            },
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias={"qwen2": True, "qwen3": False}[kind],
            query_key_norm=kind == "qwen3",
        )
    except (OSError, ValueError, KeyError):
        return None


def adapter_parameters(shape: Shape, lora: Lora) -> int:
    """Parameters of all LoRA matrices A and B: rank (inputs + outputs) per adapted matrix and layer."""
    d, f = shape.hidden_size, shape.intermediate_size
    sizes = {"q_proj": d + shape.queries, "k_proj": d + shape.keys, "v_proj": d + shape.keys, "o_proj": shape.queries + d}
    sizes |= {"gate_proj": d + f, "up_proj": d + f, "down_proj": f + d}
    return shape.num_hidden_layers * lora.rank * sum(sizes[name] for name in lora.targets or sizes if name in sizes)


def trained_parameters(study: Study, shape: Shape) -> int:
    """Largest number of trained parameters over the arms: all, or those of the adapters."""
    return max(
        (shape.parameters if config.lora is None else adapter_parameters(shape, config.lora) for config in configs(study)),
        default=shape.parameters,
    )


def saved_state_bytes(study: Study, shape: Shape) -> int:
    """Bytes of one saved state of a run: trained weights, their float32 copy and moments (:mod:`grpo.training.state`)."""
    frozen = 0 if _trains_all(study) else shape.parameters * BYTES[study.learner.dtype]
    each = study.learner.processes if study.learner.fully_shard else 1  # a state holds the parts of all processes
    return round(sum(_held(study, shape).values()) * each * GIB) - frozen


@dataclass(frozen=True)
class Phase:
    """What a GPU holds at the peak of one phase of a run.

    Attributes:
        parts: GiB by purpose.
    """

    name: str
    device: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """GiB in all."""
        return sum(self.parts.values())


def configs(study: Study) -> Iterator[RunConfig]:
    """The configuration of each arm that runs on the study's devices, as far as it is known before there are winners."""
    for name in study.made:
        if study.models[study.experiments[name].task].device != "cpu":
            for arm in study.experiments[name].arms:
                yield effective_run(study, name, arm, study.seeds[0], []).config


def longest(study: Study, config: RunConfig) -> int:
    """Tokens of the longest sequence (prompt and response), with the main task's prompts."""
    prompt = config.prompt if config.prompt in study.task(MAIN).formats else study.grpo.prompt  # an arm of another task
    response = config.sampling_max_tokens if isinstance(config, SamplingConfig) else TRACE_TOKENS
    return prompt_lengths(study, MAIN, prompt).longest + response


def phases(study: Study, shape: Shape, card_gib: float) -> list[Phase]:
    """Compute what the study's GPUs hold in each phase, as the maximum over its arms (formulas: see the module).

    Args:
        card_gib: memory of each GPU in GiB.
    """
    from grpo.learner.chunked import TOKENS_AT_ONCE  # imports torch, which `grpo plan` does without

    engine, learner = _device(study.engine.device), _device(study.learner.device)
    held = _held(study, shape) | _to_be_sent(study, shape)
    precision = BYTES[study.learner.dtype]
    each = study.learner.processes if study.learner.fully_shard else 1
    reference = {"starting weights": shape.parameters * precision / each / GIB} if _measures_kl(study) else {}
    stays = {} if study.learner.offload_reference else reference
    sampling = {"the engine": _engine_gib(study, shape, card_gib)}
    awake = sampling if engine == learner and not sleeps(study, follows_policy=True) else {}
    logits = {"logits": min(TOKENS_AT_ONCE, _tokens(study)) * 10 * shape.vocab_size / GIB}
    trained = trained_parameters(study, shape)
    gradients = {"gradients": 4 * trained / GIB}
    output = (4 + precision) * shape.vocab_size * shape.hidden_size / GIB if _trains_all(study) else 0.0
    rest = {"reserve": RESERVE_GIB}
    gathered, reduced, handed_over = _of_sharding(study, shape)
    found = []
    if learner != "cpu":
        backward = {"activations": _activations_gib(study, shape), **logits, "gradient of the output": output}
        found += [
            Phase("backward pass", learner, held | stays | gathered | gradients | reduced | backward | awake | rest),
            Phase("optimizer step", learner, held | stays | (reduced or gradients) | awake | rest),
        ]
        if reference:
            found.append(Phase(USES_REFERENCE, learner, held | reference | gathered | logits | awake | rest))
    if engine != "cpu":
        together = held | stays | handed_over if engine == learner else {}
        found.insert(0, Phase("rollouts", engine, together | sampling | rest))
    return found


def kv_cache_gib(study: Study, shape: Shape, card_gib: float) -> float:
    """GiB of vLLM's share that are left for keys and values."""
    return _engine_gib(study, shape, card_gib) - shape.parameters * BYTES[study.engine.dtype] / GIB - ENGINE_WORK_GIB


def problems(study: Study, shape: Shape, card_gib: float) -> list[str]:
    """List why the study does not fit cards of this size, each reason with a remedy; empty if it fits."""
    found = []
    for phase in phases(study, shape, card_gib):
        if phase.total > card_gib:
            remedies = ", or ".join([*_remedies(study, phase), "use a larger card (gpu_memory_gib)"])
            found.append(f"{phase.name}: {phase.total:.1f} GiB on {phase.device} of {card_gib:g}; {remedies}")
    if study.engine.name == "vllm" and study.engine.device != "cpu":
        needed = shape.max_position_embeddings * shape.kv_bytes(BYTES[study.engine.dtype]) / GIB
        left = kv_cache_gib(study, shape, card_gib)
        if left < needed:
            found.append(
                f"vLLM: {left:.1f} GiB are left for keys and values, and one sequence of the model's "
                f"{shape.max_position_embeddings} tokens needs {needed:.1f}; raise grpo.gpu_memory_utilization"
            )
    return found


def _remedies(study: Study, phase: Phase) -> list[str]:
    """The settings that would make a phase smaller."""
    learner, parts = study.learner, phase.parts
    engine, moments, activations = (name in parts for name in ("the engine", "moments", "activations"))
    whole, vllm = moments and not learner.fully_shard, engine and study.engine.name == "vllm"
    idle = "starting weights" in parts and phase.name != USES_REFERENCE and not learner.offload_reference
    padded = learner.max_tokens_per_microbatch is None
    remedies = {
        "lower grpo.gpu_memory_utilization": vllm,
        "set engine.sleep_level to 2": vllm and phase.name != "rollouts",
        "raise learner.processes": moments and learner.fully_shard,
        "set learner.fully_shard": whole and learner.processes > 1,
        "set learner.optimizer to adamw_8bit": whole and learner.optimizer == "adamw",
        "set learner.dtype to bfloat16": whole and activations and learner.dtype == "float32",
        "set learner.offload_reference": whole and idle,
        "train adapters (lora)": whole and _trains_all(study),
        "set learner.gradient_checkpointing": activations and not learner.gradient_checkpointing,
        "lower learner.max_tokens_per_microbatch": activations and not padded,
        "raise gradient_accumulation_steps": activations
        and padded
        and any(config.micro_train_batch_size > 1 for config in configs(study)),
    }
    return [remedy for remedy, helps in remedies.items() if helps]


def table(study: Study, shape: Shape, card_gib: float) -> str:
    """Format the phases as text: one column per phase, one row per part."""
    found = phases(study, shape, card_gib)
    parts = sorted({part: None for phase in found for part in phase.parts}, key=lambda part: part == "reserve")
    rows = [["GiB", *(f"{phase.name} ({phase.device})" for phase in found)]]
    rows += [[part, *(f"{phase.parts[part]:.2f}" if part in phase.parts else "" for phase in found)] for part in parts]
    rows += [["in all", *(f"{phase.total:.2f}" for phase in found)], ["the card", *[f"{card_gib:.2f}"] * len(found)]]
    lengths = prompt_lengths(study, MAIN, study.grpo.prompt)
    found_in = f"counted in {paths.DATASETS / MAIN}" if lengths.counted else "assumed, as problems or tokenizer are missing"
    text = text_table(rows) + f"\nPrompts of {lengths.longest:,} tokens at most: {found_in}."
    if study.engine.name == "vllm" and study.engine.device != "cpu":
        left = kv_cache_gib(study, shape, card_gib)
        tokens = left * GIB / shape.kv_bytes(BYTES[study.engine.dtype])
        length = max(longest(study, config) for config in configs(study))
        text += f"\nThe engine has {left:.2f} GiB for keys and values: {tokens:,.0f} tokens, "
        text += f"or {tokens / length:.0f} sequences of {length:,}."
    return text


def _to_be_sent(study: Study, shape: Shape) -> dict[str, float]:
    """Weights that the learner of an asynchronous run keeps for its generator."""
    apart = (config.asynchronous for config in configs(study) if isinstance(config, GrpoConfig))
    versions = max((settings.max_policy_lag + 1 for settings in apart if settings is not None), default=0)
    if not versions or study.engine.name != "vllm" or study.engine.device == "cpu":
        return {}
    return {"weights to be sent": versions * BYTES[study.learner.dtype] * shape.parameters / GIB}


def _held(study: Study, shape: Shape) -> dict[str, float]:
    """What the learner holds in every phase."""
    n, precision = trained_parameters(study, shape), BYTES[study.learner.dtype]
    if study.learner.fully_shard:
        each = study.learner.processes
        return {"weights": 4 * n / each / GIB, "moments": 8 * n / each / GIB}
    moments = 2 * n * (1 + 4 / 256) if study.learner.optimizer == "adamw_8bit" else 8 * n
    copy = 4 * n if precision < 4 else 0
    weights = shape.parameters + (0 if _trains_all(study) else n)
    return {"weights": precision * weights / GIB, "float32 copy": copy / GIB, "moments": moments / GIB}


def _of_sharding(study: Study, shape: Shape) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Extra memory of ``learner.fully_shard`` while a model computes, while gradients are reduced, while vLLM takes weights."""
    if not study.learner.fully_shard:
        return {}, {}, {}
    precision, around, of_layer = BYTES[study.learner.dtype], shape.parameters_around, shape.parameters_of_layer
    reduced = 4 * (shape.parameters / study.learner.processes + around + of_layer)
    handed_over = precision * shape.vocab_size * shape.hidden_size
    return (
        {"gathered weights": precision * (around + 2 * of_layer) / GIB},
        {"reduced gradients": reduced / GIB},
        {"gathered weights": handed_over / GIB},
    )


def _measures_kl(study: Study) -> bool:
    """Whether an arm needs a copy of its starting weights. With adapters the frozen weights serve as that copy."""
    return any(getattr(config, "needs_starting_weights", False) and config.lora is None for config in configs(study))


def _trains_all(study: Study) -> bool:
    """Whether an arm trains all weights."""
    return any(config.lora is None for config in configs(study))


def _tokens(study: Study) -> int:
    """Tokens of the largest microbatch, padding included: the budget, or one sequence if longer, or a batch of responses."""
    budget = study.learner.max_tokens_per_microbatch
    return max([budget or 0, *(longest(study, c) * (1 if budget else c.micro_train_batch_size) for c in configs(study))])


def _activations_gib(study: Study, shape: Shape) -> float:
    precision, layers = BYTES[study.learner.dtype], shape.num_hidden_layers
    of_layers = layers * shape.layer_bytes(precision)
    if study.learner.gradient_checkpointing:
        of_layers = layers * precision * shape.hidden_size + shape.layer_bytes(precision)
    return _tokens(study) * of_layers / GIB


def _engine_gib(study: Study, shape: Shape, card_gib: float) -> float:
    """GiB of the engine: vLLM's share, or keys and values of the transformers engine, which shares the learner's weights."""
    if study.engine.name == "vllm":
        return max(memory_share(study, config) for config in (None, *configs(study))) * card_gib
    length = max(longest(study, config) for config in configs(study))
    return study.engine.max_batch_size * length * shape.kv_bytes(BYTES[study.learner.dtype]) / GIB


def _device(name: str) -> str:
    return "cuda:0" if name == "cuda" else name
