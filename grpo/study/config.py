"""The sections of params.yaml, typed and validated: hyperparameters by method, then all others. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    FiniteFloat,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from grpo.common.errors import UserError
from grpo.common.imports import is_import_path, keys_of, source_of
from grpo.tasks.sft_dataset import HubTraces, JsonlTraces, TaskTraces
from grpo.tasks.task import SHIPPED_REWARDS, Settings, Share

LOSS_TYPES = ("no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo")
LOSSES_OF_THE_HANDOUTS = {"GRPO-Clip": "grpo_clip", "GRPO-No-Clip": "grpo_no_clip"}  # names in the handouts' text
WITHOUT_RATIO = ("no_baseline", "reinforce_with_baseline")  # losses without the ratio pi / pi_old
LossType = Annotated[str, AfterValidator(lambda name: LOSSES_OF_THE_HANDOUTS.get(name, name))]

# Marks a setting that records omit at its default, so that they equal records from before it existed.
OMIT = "omit at the default"

# Keys of an arm that stand for other values:
# Multiples of the winners' values, or of those of the sweep's arm that the arm takes; a rate is rounded to three digits.
TIMES = {"learning_rate_times": "learning_rate", "n_grpo_steps_times": "n_grpo_steps"}
OFF_POLICY_RANK = "off_policy_rank"  # K: the values of the K-th best off-policy arm of the sweep before
OBJECTIVE = "objective"  # one of OBJECTIVES; also allowed under `grpo:` of a study file

# Published objectives by name, without terms that have their own settings (KL term, overlong_buffer, ...). All set the same
# keys, so that none is left over from another.
_GRPO = {  # arXiv 2402.03300
    "loss_type": "grpo_clip",
    "cliprange": 0.2,
    "cliprange_high": None,
    "length_normalization": "masked_mean",
    "baseline": "group_mean",
    "use_std_normalization": True,
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,
    # arXiv 2503.20783, Section 3: no division by response length or by the group's standard deviation.
    "dr_grpo": _GRPO | {"length_normalization": "masked_normalize", "use_std_normalization": False},
    # arXiv 2503.14476, Eq. 8 with the ranges of Section 4.1.
    "dapo": _GRPO | {"cliprange_high": 0.28, "length_normalization": "token_mean"},
    # arXiv 2507.18071, Eq. 5 with the ranges of Section 5.1.
    "gspo": _GRPO | {"loss_type": "gspo", "cliprange": 3e-4, "cliprange_high": 4e-4},
    # arXiv 2506.13585, Section 3.1, which gives no upper bound: weights up to 5, as TRL recommends after arXiv 2510.13786.
    "cispo": _GRPO | {"loss_type": "cispo", "cliprange_high": 4.0, "length_normalization": "token_mean"},
    # arXiv 2402.14740: REINFORCE on whole responses, without ratio or clip.
    "rloo": _GRPO
    | {"loss_type": "reinforce_with_baseline", "length_normalization": "masked_normalize"}
    | {"baseline": "leave_one_out", "use_std_normalization": False},
}


def require_known(where: str, what: str, name: object, known: Collection[str]) -> None:
    """Raise UserError unless ``name`` is one of ``known``; ``what`` begins its description, such as "no task"."""
    if name not in [*known]:  # a list, as the name may be unhashable
        raise UserError(f"{where}: {what} {name!r} (known: {', '.join(known) or 'none'}).")


def _require_code(key: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise UserError unless each name is known, or MODULE:NAME of a module that exists."""
    for name in (name for name in names if name not in known):
        if not is_import_path(name):
            raise UserError(f"{key}: {name!r} is unknown: use {', '.join((*known, 'MODULE:NAME of your own'))}")
        source_of(name)


class Section(Settings, allow_inf_nan=False):
    """A mapping of params.yaml, whose values are checked together. Infinite numbers are refused too."""

    def check(self) -> None:
        """Raise UserError, without the section's name, unless the values fit together."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        try:
            self.check()
        except UserError as error:
            raise ValueError(str(error)) from error
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_off(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = values_of(self)
        may_be_off = [(key, field) for key, field in type(self).model_fields.items() if OMIT in field.metadata]
        off = {key for key, field in may_be_off if getattr(self, key) == field.get_default(call_default_factory=True)}
        return {key: value for key, value in values.items() if key not in off}


class Lora(Section):
    """Train adapters and keep the weights fixed (:mod:`grpo.models.lora`)."""

    rank: PositiveInt = 8
    alpha: PositiveInt = 32  # the output of an adapter is multiplied by alpha / rank
    targets: list[str] | None = None  # names of layers, such as q_proj; null: all linear layers except the output layer


class TrainingConfig(Section):
    """Settings of all methods: how a batch becomes an optimizer step, and when a run ends."""

    steps_key: ClassVar[str]  # the setting with the number of steps

    learning_rate: PositiveFloat = 1e-5
    # Names of transformers; see grpo.learner.optimizer.
    lr_scheduler_type: Annotated[Literal["constant", "linear", "cosine"], OMIT] = "constant"
    warmup_steps: Annotated[NonNegativeInt, OMIT] = 0  # updates in which the rate rises from 0, with any schedule
    weight_decay: Annotated[NonNegativeFloat, OMIT] = 0.0  # of AdamW, as the next three; names of transformers
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0), OMIT] = 0.9
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0), OMIT] = 0.95
    adam_epsilon: Annotated[PositiveFloat, OMIT] = 1e-8
    train_batch_size: PositiveInt = 256
    gradient_accumulation_steps: PositiveInt = 128
    max_grad_norm: PositiveFloat = 1.0
    prompt: str = "r1_zero"  # prompt format of the task
    wall_clock_limit_s: PositiveFloat | None = None  # the run ends after the step in which it reaches this limit
    lora: Annotated[Lora | None, OMIT] = None  # null: all weights are trained
    # Checkpoints step-N: GRPO may start from those of fine-tuning; `grpo kl` measures those of GRPO.
    keep_steps: Annotated[list[PositiveInt], OMIT] = Field(default_factory=list)

    def check(self) -> None:
        self._require_divisor("train_batch_size", "gradient_accumulation_steps")
        if late := [step for step in self.keep_steps if step > self.n_steps]:
            raise UserError(f"keep_steps: {late} come after the last step, {self.steps_key} ({self.n_steps}): leave them out")
        if self.lr_scheduler_type == "constant" and not self.warmup_steps:
            return
        if self.n_updates is None:
            raise UserError("lr_scheduler_type, warmup_steps: expert iteration's updates are not known: leave both out")
        if self.warmup_steps >= self.n_updates:
            raise UserError(f"warmup_steps ({self.warmup_steps}) must be less than the run's {self.n_updates} updates")

    def _require_divisor(self, whole: str, part: str) -> None:
        size, piece = getattr(self, whole), getattr(self, part)
        if size % piece:
            raise UserError(f"{whole} ({size}) must be divisible by {part} ({piece}): change one of them")

    @property
    def micro_train_batch_size(self) -> int:
        """Responses in one padded forward and backward pass."""
        return self.train_batch_size // self.gradient_accumulation_steps

    @property
    def n_steps(self) -> int:
        """Steps of the method's loop."""
        return int(getattr(self, self.steps_key))

    @property
    def is_asynchronous(self) -> bool:
        """Whether generator, scorer and learner run concurrently, each in its own process."""
        return getattr(self, "asynchronous", None) is not None

    @property
    def n_updates(self) -> int | None:
        """Optimizer steps of a whole run; None if not known in advance."""
        return None


class SamplingConfig(TrainingConfig):
    """Settings of the methods that sample from the policy."""

    group_size: PositiveInt = 8  # rollouts per question
    sampling_temperature: PositiveFloat = 1.0
    sampling_top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    sampling_min_tokens: NonNegativeInt = 4
    sampling_max_tokens: PositiveInt = 1024

    def check(self) -> None:
        super().check()
        if (least := self.sampling_min_tokens) > (most := self.sampling_max_tokens):
            raise UserError(f"sampling_min_tokens ({least}) must not exceed sampling_max_tokens ({most})")


class SftConfig(TrainingConfig):
    """Supervised fine-tuning on reasoning traces (CS336 A5, Section 4.3).

    All arms take the same number of steps, so that they differ in their examples and not in the length of training.
    """

    steps_key: ClassVar[str] = "n_sft_steps"
    sampling_temperature: ClassVar[float] = 1.0  # nothing is sampled; log-probabilities are the model's own

    n_sft_steps: PositiveInt = 200  # optimizer steps
    evaluate_every: PositiveInt = 20
    examples: PositiveInt | None = None  # number of unique examples, drawn with the run's seed; null: all
    filtered: bool = False  # true: only examples whose response earns the reward
    normalize_constant: PositiveFloat = 1.0  # divides the sum of token losses of each response

    @property
    def n_updates(self) -> int:
        """Optimizer steps of a whole run."""
        return self.n_sft_steps


class ExpertIterationConfig(SamplingConfig):
    """Expert iteration (CS336 A5, Algorithm 2): sample, keep correct responses, fine-tune on them, repeat."""

    steps_key: ClassVar[str] = "n_ei_steps"

    n_ei_steps: PositiveInt = 5
    ei_batch_size: PositiveInt = 512  # questions per step (D_b in the handout)
    epochs_per_ei_step: PositiveInt = 1
    normalize_constant: PositiveFloat = 1.0


class Asynchronous(Section):
    """Generator, scorer and learner as separate Ray actors: the generator samples while the learner trains on older rollouts.

    The *version* of the policy is the number of GRPO steps that its weights have had. A token's *lag* is the version that is
    trained on it minus the version that sampled it.
    """

    max_policy_lag: NonNegativeInt = 1  # lag of new rollouts, always exactly; 0: generator and learner take turns
    replay_capacity: PositiveInt = 1  # rollout batches in the replay buffer; 1: each batch is trained on once, in order
    replay_max_age: NonNegativeInt | None = None  # groups with a larger lag are dropped; null: no limit

    def check(self) -> None:
        age, lag = self.replay_max_age, self.max_policy_lag
        if age is not None and age < lag:
            raise UserError(f"replay_max_age ({age}) would drop new rollouts, which lag by max_policy_lag ({lag}): raise it")
        if age == lag and self.replay_capacity > 1:
            raise UserError(f"replay_max_age ({age}) would drop all but the newest: raise it, or set replay_capacity to 1")

    @property
    def is_stale(self) -> bool:
        """Whether the learner trains on rollouts of an older policy."""
        return self.max_policy_lag > 0 or self.replay_capacity > 1


class GrpoConfig(SamplingConfig):
    """Hyperparameters of one GRPO run, with the names and defaults of the handouts (CS336 A5, Section 7)."""

    steps_key: ClassVar[str] = "n_grpo_steps"

    n_grpo_steps: PositiveInt = 200
    advantage_eps: PositiveFloat = 1e-6
    rollout_batch_size: PositiveInt = 256
    dynamic_sampling_rounds: Annotated[NonNegativeInt, OMIT] = 0  # in which groups with equal rewards are replaced
    epochs_per_rollout_batch: PositiveInt = 1
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.85
    loss_type: LossType = "reinforce_with_baseline"  # LOSS_TYPES, or MODULE:NAME (grpo.learner.losses.Loss)
    loss_options: dict[str, JsonValue] = Field(default_factory=dict)  # passed to the loss; not inherited by another loss
    questions: Annotated[PositiveInt | None, OMIT] = None  # number of training questions, drawn with the run's seed; null: all
    # MODULE:NAME or one of SHIPPED_REWARDS (grpo.tasks.rewards), or several with weights; null: the task's own reward
    reward: str | Annotated[dict[str, FiniteFloat], Field(min_length=1)] | None = None
    overlong_buffer: Annotated[PositiveInt | None, OMIT] = None  # last tokens over which the reward falls by up to 1
    mask_truncated_completions: Annotated[bool, OMIT] = False  # responses cut off at sampling_max_tokens have no loss
    # MODULE:NAME (grpo.learner.advantages.Advantage) in the place of baseline and use_std_normalization; null: these two
    advantage: Annotated[str | None, OMIT] = None
    advantage_options: Annotated[dict[str, JsonValue], OMIT] = Field(default_factory=dict)  # passed to it
    # Subtracted from a reward (grpo.learner.advantages).
    baseline: Annotated[Literal["group_mean", "leave_one_out"], OMIT] = "group_mean"
    use_std_normalization: bool = True  # divide by the group's standard deviation
    length_normalization: Literal["masked_mean", "masked_normalize", "microbatch_longest", "token_mean"] = "masked_mean"
    cliprange: PositiveFloat = 0.2
    cliprange_high: Annotated[PositiveFloat | None, OMIT] = None  # the ratio may rise to 1 + this; null: cliprange
    # Cap of the importance weights: a token's probability under the policy to be trained over the one that the engine computed
    # when it sampled it, or the product of a response's (`sequence_truncate`). null: no weights.
    importance_cap: PositiveFloat | None = None
    importance_mode: Annotated[Literal["token_truncate", "sequence_truncate"], OMIT] = "token_truncate"
    kl_coefficient: Annotated[NonNegativeFloat, OMIT] = 0.0  # of KL(policy || starting weights) in the loss; 0: no such term
    entropy_coefficient: Annotated[FiniteFloat, OMIT] = 0.0  # of the mean token entropy (nats), subtracted from the loss
    start_from: str | None = None  # SFT checkpoint of the same seed, sft_experiment/ARM/CHECKPOINT; null: the base model
    asynchronous: Asynchronous | None = None  # null: one process samples, scores and trains in turn

    def check(self) -> None:
        super().check()
        _require_code("loss_type", [self.loss_type], LOSS_TYPES)
        _require_code("advantage", [self.advantage] if self.advantage is not None else [], ())
        if self.advantage_options and self.advantage is None:
            raise UserError("advantage_options: without advantage, which takes them: name it, or leave them out")
        _require_code("reward", [self.reward] if isinstance(self.reward, str) else self.reward or (), SHIPPED_REWARDS)
        self._require_divisor("rollout_batch_size", "group_size")
        self._require_divisor("rollout_batch_size", "train_batch_size")
        if self.train_batch_size < self.group_size:
            raise UserError(f"train_batch_size ({self.train_batch_size}) must be at least group_size ({self.group_size})")
        if self.dynamic_sampling_rounds and self.asynchronous is not None:
            raise UserError("dynamic_sampling_rounds: not in an asynchronous run, which samples ahead: leave one out")
        if self.dynamic_sampling_rounds and self.group_size == 1:
            raise UserError("dynamic_sampling_rounds: in a group of one all rewards are equal: raise group_size")
        if (self.overlong_buffer or 0) > (most := self.sampling_max_tokens):
            raise UserError(f"overlong_buffer ({self.overlong_buffer}) must not exceed sampling_max_tokens ({most}): lower it")
        if self.importance_cap is None and self.importance_mode != "token_truncate":
            raise UserError("importance_mode: without importance_cap there are no weights: set it")
        stale = self.asynchronous is not None and self.asynchronous.is_stale
        if stale and self.importance_cap is None and self.loss_type not in WITHOUT_RATIO:
            # The ratio is to the engine's probabilities, which are among the allowed tokens only.
            for key, off in (("sampling_top_p", 1.0), ("sampling_min_tokens", 0)):
                if (value := getattr(self, key)) != off:
                    wrong = f"{key} ({value}) excludes tokens, so ratios of asynchronous rollouts would be wrong"
                    raise UserError(f"{wrong}: set it to {off}, or set importance_cap")
        # A user's own loss may use raw rewards, and an own advantage may do without a group.
        ours = self.loss_type in LOSS_TYPES and self.advantage is None
        if self.group_size == 1 and ours and self.loss_type != "no_baseline":
            raise UserError("group_size 1 makes every advantage zero: use at least 2, or loss_type no_baseline")

    @property
    def n_prompts_per_rollout_batch(self) -> int:
        """Questions sampled in one GRPO step."""
        return self.rollout_batch_size // self.group_size

    @property
    def n_updates(self) -> int:
        """Optimizer steps of a whole run."""
        return self.n_grpo_steps * self.updates_per_rollout_batch

    @property
    def updates_per_rollout_batch(self) -> int:
        """Optimizer steps taken on one rollout batch; 1 is exactly on-policy."""
        return self.epochs_per_rollout_batch * (self.rollout_batch_size // self.train_batch_size)


RunConfig = GrpoConfig | SftConfig | ExpertIterationConfig
Config = TypeVar("Config", bound=TrainingConfig)


def with_objective(values: dict[str, Any], path: str) -> dict[str, Any]:
    """Replace the key ``objective`` by the objective's values, under the other values; UserError if it is unknown."""
    if OBJECTIVE not in values:
        return values
    others = dict(values)
    name = others.pop(OBJECTIVE)
    require_known(f"{path}.{OBJECTIVE}", "no objective", name, OBJECTIVES)
    return OBJECTIVES[name] | others


def resolved(config: TrainingConfig, arm: dict[str, Any], path: str) -> dict[str, Any]:
    """Write out an arm's values over ``config``: its ``objective``, and the multiples of :data:`TIMES`; no rank."""
    values = with_objective({key: value for key, value in arm.items() if key not in (OFF_POLICY_RANK, *TIMES)}, path)
    for name, key in ((name, key) for name, key in TIMES.items() if name in arm):
        times = arm[name]
        if isinstance(times, bool) or not isinstance(times, int | float) or not times > 0 or key in arm:
            raise UserError(f"{path}.{name}: expected a number above 0, and no {key} beside it, but it is {times!r}.")
        if not hasattr(config, key):
            raise UserError(f"{path}.{name}: this method has no {key}. Leave it out.")
        times *= getattr(config, key)
        values[key] = max(round(times), 1) if key == "n_grpo_steps" else float(f"{times:.3g}")
    return values


def apply_overrides(config: Config, overrides: dict[str, Any], path: str) -> Config:
    """Apply an arm's or a winner's values and validate everything again; another loss or advantage inherits no options."""
    new, values = resolved(config, overrides, path), config.model_dump()
    for key, options in (("loss_type", "loss_options"), ("advantage", "advantage_options")):
        if new.get(key, values.get(key)) != values.get(key):
            values.pop(options, None)
    values |= new
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: " + " ".join(explain(error, values))) from error


def explain(error: ValidationError, values: Any) -> list[str]:
    """Describe each error about ``values`` in a line: key, what is wrong, what was expected."""
    keys = [".".join(keys_of(item, values)) for item in error.errors()]
    return [(f"{key}: " if key else "") + _explained(item, key) for key, item in zip(keys, error.errors(), strict=True)]


# TRL's names of settings (GRPOConfig) and where they are here; docs/settings.md has the defaults of both.
OF_TRL = {
    "beta": "grpo.kl_coefficient",
    "num_generations": "grpo.group_size",
    "generation_batch_size": "grpo.rollout_batch_size",
    "per_device_train_batch_size": "grpo.train_batch_size / grpo.gradient_accumulation_steps",
    "num_iterations": "grpo.epochs_per_rollout_batch",
    "max_steps": "grpo.n_grpo_steps",
    "num_train_epochs": "grpo.n_grpo_steps",
    "warmup_ratio": "grpo.warmup_steps",
    "max_completion_length": "grpo.sampling_max_tokens",
    "max_prompt_length": "tasks.main.max_prompt_tokens",
    "temperature": "grpo.sampling_temperature",
    "top_p": "grpo.sampling_top_p",
    "epsilon": "grpo.cliprange",
    "epsilon_high": "grpo.cliprange_high",
    "scale_rewards": "grpo.use_std_normalization",
    "use_vllm": "engine.name: vllm",
    "reward_funcs": "grpo.reward",
    "peft_config": "grpo.lora",
    "optim": "learner.optimizer",
    "bf16": "learner.dtype: bfloat16",
    "fp16": "learner.dtype: float16",
    "save_steps": "save_state_every",
    "eval_steps": "evaluation.every",
    "seed": "seeds",
    "report_to": "the environment variable MLFLOW_TRACKING_URI",
}
CHECK_IT = "Check its spelling and its place, or remove it; docs/settings.md has the names of TRL's settings, too."


def _explained(item: Any, key: str) -> str:
    kind, value, message = item["type"], item.get("input"), item["msg"].removeprefix("Value error, ")
    unknown, shown = key.split(".")[-1], repr(value)
    if kind == "extra_forbidden" and unknown == OBJECTIVE:
        return f"only allowed in study files and arms. Write the values of {value} here (docs/settings.md)."
    if kind == "extra_forbidden" and unknown in OF_TRL:
        return f"unknown key. Here: {OF_TRL[unknown]}."
    if kind == "extra_forbidden":
        near = get_close_matches(unknown, sorted(_known_keys(Settings)), n=1, cutoff=0.75)
        return f"unknown key. {f'Did you mean {near[0]}?' if near and near[0] != unknown else CHECK_IT}"
    if kind == "missing":
        return "missing. Add it (see studies/ for examples)."
    if item["loc"][-1:] == ("[key]",):
        return f"{value!r} is a name here, which YAML reads as a number or the like. Write it in quotes."
    if kind == "value_error":
        return f"{message.removesuffix('.')}."
    return f"{message[0].lower() + message[1:]}, but it is {shown if len(shown) <= 200 else shown[:200] + '…'}."


def _known_keys(section: type[Settings]) -> set[str]:
    return {*section.model_fields}.union(*map(_known_keys, section.__subclasses__()))


# ------------------------------------------------------------------------------------ models, engines, evaluations, experiments

MAIN = "main"  # the task that is evaluated zero-shot; default task of experiments

# cpu: runs of this (small) model sample and train on the CPU, whatever `engine` and `learner` say.
Device = Literal["cpu"] | None


class PretrainedHere(Section):
    """A small model of Qwen2's architecture that the ``model`` stage pretrains on its task's documents."""

    source: Literal["pretrain"]
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = True  # the output layer shares the weights of the embedding
    steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    seed: int
    # One model for each seed of the study, so that intervals over runs also cover the base models. The zero-shot evaluation and
    # other stages without seeds take the first one.
    one_per_seed: Annotated[bool, OMIT] = False
    documents: dict[str, Any] = Field(default_factory=dict)  # passed to :meth:`grpo.tasks.task.Task.documents`
    device: Device = None

    def check(self) -> None:
        if self.hidden_size % (2 * self.num_attention_heads):
            heads = self.num_attention_heads
            raise UserError(f"hidden_size {self.hidden_size} must be a multiple of 2 x num_attention_heads ({heads})")


class HubModel(Section):
    """A model on the Hugging Face Hub at one fixed revision."""

    source: Literal["hub"]
    repo: str
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    gguf_file: Annotated[str | None, OMIT] = None  # the model and its tokenizer are read from this file of the repository
    device: Device = None

    @property
    def origin(self) -> str:
        return f"{self.repo} at {self.revision}"


class LocalModel(Section):
    """A folder in Hugging Face format, or with a GGUF file."""

    source: Literal["local"]
    path: str
    gguf_file: Annotated[str | None, OMIT] = None  # the file's name in the folder
    device: Device = None

    @property
    def origin(self) -> str:
        return f"{self.path}/{self.gguf_file}" if self.gguf_file else self.path


class WheelModel(Section):
    """A GGUF file in a wheel of the package index. The wheel is downloaded and not installed."""

    source: Literal["wheel"]
    package: str = Field(pattern=r"^\w[\w.-]*==\w[\w.!+-]*$")  # NAME==VERSION
    file: str  # path in the wheel
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # of this file
    device: Device = None

    @property
    def origin(self) -> str:
        return f"{self.file} of {self.package}, SHA-256 {self.sha256}"


Elsewhere = Annotated[HubModel | LocalModel | WheelModel, Field(discriminator="source")]
Model = Annotated[PretrainedHere | HubModel | LocalModel | WheelModel, Field(discriminator="source")]


class SampledTraces(Section):
    """Solutions of the training questions, right and wrong, that a teacher samples through the study's engine."""

    source: Literal["sampled"]
    prompt: str  # format of the traces
    model: Elsewhere  # the teacher
    asked_in: str  # format in which the teacher is asked
    questions: PositiveInt | None = None  # number of training questions, from the first; null: all
    samples: PositiveInt = 1  # per question
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_tokens: PositiveInt = 1024
    seed: int = 0


SftDataset = Annotated[TaskTraces | JsonlTraces | HubTraces | SampledTraces, Field(discriminator="source")]


class EngineSettings(Section):
    """The engine that samples completions."""

    name: Literal["transformers", "vllm"]
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_batch_size: PositiveInt = 1024
    sleep_level: Literal[0, 2] = 0  # 2: vLLM frees its memory while a learner on the same GPU trains

    def check(self) -> None:
        if self.sleep_level and self.device == "cpu":
            raise UserError(f"sleep_level {self.sleep_level}: vLLM can only sleep on a GPU: set it to 0, or device to cuda:0")
        if self.name == "vllm" and self.device not in {"cpu", "cuda", "cuda:0"}:
            raise UserError(f"device {self.device!r}: vLLM takes the first GPU that it sees: set it to cuda:0")


class LearnerSettings(Section):
    """Device of the learner, how a batch is split, and options for speed and memory. All give the same gradient.

    With ``max_tokens_per_microbatch``, the responses to a prompt share one copy of it in packed rows without padding; without
    ``packing``, responses of similar length are padded together within the budget. With null, microbatches are padded and have
    ``train_batch_size / gradient_accumulation_steps`` responses. Weights and gradients are kept in float32, whatever the
    ``dtype`` of the model's computation.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_tokens_per_microbatch: PositiveInt | None = None
    packing: bool = True
    gradient_checkpointing: bool = False
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    compile: bool = False  # torch.compile: 10 to 15% faster on CPU, after 5 to 20 s of compiling
    # Processes (torchrun) that train a run together, each on its share of the questions, with one GPU each or on the CPU.
    processes: PositiveInt = 1
    fully_shard: Annotated[bool, OMIT] = False  # shard weights, gradients and moments over the processes

    def check(self) -> None:
        if self.processes > 1 and self.device not in {"cpu", "cuda"}:
            raise UserError(f"device {self.device!r} is one GPU for {self.processes} processes: use device cuda")
        wrong = {
            "processes is 1: set it to 2 or more": self.processes == 1,
            "compile is on: set it to false": self.compile,
            "optimizer is adamw_8bit: set it to adamw": self.optimizer != "adamw",
        }
        if self.fully_shard and any(wrong.values()):
            raise UserError(f"fully_shard: {'; '.join(text for text, is_given in wrong.items() if is_given)}")


class BestOfN(Section):
    """The ``best_of_n`` stage: estimates for N from ``samples`` completions of each problem.

    Without prompts nothing is sampled, and the report leaves it out.
    """

    problems: PositiveInt = Field(ge=2)
    prompts: list[str]
    samples: PositiveInt = 16
    # EXPERIMENT/ARM whose base, middle (in `keep_steps`) and last checkpoint are sampled too, by the stage ``pass_at_k``
    checkpoints: Annotated[list[str], OMIT] = Field(default_factory=list)
    n: list[PositiveInt] = Field(default=[1, 4, 8, 16], min_length=1)

    def check(self) -> None:
        if max(self.n) > self.samples:
            raise UserError(f"n: {max(self.n)} cannot be chosen from samples ({self.samples}): raise samples or lower n")
        if sorted(set(self.n)) != self.n:
            raise UserError(f"n: {self.n} must list each number once, in rising order")


RewardName = Literal["answer_reward", "reward"]


class OldTask(Section):
    """A task that the starting model knows and that runs do not train on. The ``kl`` stage shows what they forget of it."""

    task: str  # entry of `tasks`
    prompt: str


class Evaluation(Section):
    """Validation during a run and zero-shot evaluation; the sampling settings are those of the handout."""

    every: PositiveInt | Annotated[list[PositiveInt], Field(min_length=1)]  # see EvaluationSteps
    problems: PositiveInt  # of each evaluation but the last
    last_problems: PositiveInt  # of the last evaluation, which is the run's result
    # The first of them choose winners and learning rates, and the others judge. 0: all of them do both.
    selection_problems: NonNegativeInt
    zero_shot_problems: PositiveInt
    zero_shot_prompts: list[str] = Field(min_length=1)
    best_of_n: BestOfN
    old_task: Annotated[OldTask | None, OMIT] = None  # kept checkpoints of all methods are evaluated on it too
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_tokens: PositiveInt = 1024
    seed: int = 0
    # What runs, arms and checkpoints are compared by. null: `reward` if all runs have one reward of the study's own, else the
    # task's `answer_reward`.
    metric: Annotated[RewardName | None, OMIT] = None

    def check(self) -> None:
        every = [self.every] if isinstance(self.every, int) else self.every
        if sorted(set(every)) != every:
            raise UserError(f"every: {every} must list each step once, in rising order")
        if self.last_problems < self.problems:
            raise UserError(f"last_problems ({self.last_problems}) must be at least problems ({self.problems}): raise it")
        if self.selection_problems >= self.last_problems:
            none = f"leaves none of last_problems ({self.last_problems}) to judge"
            raise UserError(f"selection_problems ({self.selection_problems}) {none}: lower it")
        if self.temperature == 0.0 and (self.best_of_n.prompts or self.best_of_n.checkpoints):
            off = "set evaluation.best_of_n.prompts and checkpoints to []"
            raise UserError(f"temperature 0: all samples of best_of_n would be equal: {off}")


@dataclass(frozen=True)
class EvaluationSteps:
    """The steps after which a run is evaluated, in order, always with 0 and the last one.

    They are not listed, as a run that trains until a time limit may name billions of steps. For GRPO runs ``every`` is the
    study's ``evaluation.every``: a number of steps, or a list of first steps, followed by the multiples of its last. Supervised
    fine-tuning uses ``evaluate_every``; expert iteration is evaluated after each of its (long) steps.
    """

    config: RunConfig
    every: int | Sequence[int]

    @property
    def _before_the_last(self) -> tuple[list[int], range]:
        """0 and the first steps, then the multiples."""
        match self.config:
            case SftConfig():
                every: Sequence[int] = [self.config.evaluate_every]
            case ExpertIterationConfig():
                every = [1]
            case _:
                every = [self.every] if isinstance(self.every, int) else self.every
        last = self.config.n_steps
        return [0, *(step for step in every[:-1] if step < last)], range(every[-1], last, every[-1])

    def __contains__(self, step: int) -> bool:
        first, multiples = self._before_the_last
        return step in first or step in multiples or step == self.config.n_steps

    @property
    def middle(self) -> int:
        """The step of the middle one, or the later of two."""
        first, multiples = self._before_the_last
        place = (len(first) + len(multiples) + 1) // 2
        if place < len(first):
            return first[place]
        return multiples[place - len(first)] if place - len(first) < len(multiples) else self.config.n_steps


class Selection(Section):
    """How an experiment's winner is chosen: by :func:`grpo.results.selection.result_of`, or pinned by hand."""

    best_few: PositiveInt = 2  # off-policy arms of the broad sweep that the focused sweep continues
    # The winner of an experiment, or a list: the winner, and the off-policy arms in the order that `off_policy_rank` counts.
    pinned: dict[str, str | Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)

    def pinned_arms(self, experiment: str) -> list[str]:
        """The arms that are pinned, the winner first; empty if none is."""
        arms = self.pinned.get(experiment, [])
        return [arms] if isinstance(arms, str) else arms


class Divergence(Section):
    """When a run has diverged and is stopped.

    A rule must hold at ``patience`` evaluations in a row. Low entropy and short responses count only once the answer reward is
    below half of the run's best, as a policy that has learnt its task may be short and certain. With ``stop_when_collapsed``,
    a reward below ``collapsed_below`` times the best one counts too, if the best was clearly above the start.
    """

    patience: PositiveInt = 2
    reward_below_start: Share = 0.5  # validation answer reward below this share of its value before training
    entropy_below: PositiveFloat = 1e-3  # mean token entropy in nats
    length_below: Share = 0.2  # validation response length below this share of its value before training
    skipped_updates: PositiveInt = 5  # optimizer steps in a row without a finite gradient
    stop_when_collapsed: bool = False
    collapsed_below: Share = 0.2  # validation answer reward below this share of the run's best


class KissingNumber(Section):
    """The search of the ``kissing_number`` stage: its strategy, and its limits (the first one reached ends it).

    Without a strategy no search runs, and the stage only checks the committed program. A strategy asks ``model`` of the
    endpoint that ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` name. ``best_of_n``: independent answers. ``conversation``: each
    prompt has all earlier answers and their evaluations. ``hybrid``: a conversation in which each turn is the best of several
    answers.
    """

    strategy: Literal["best_of_n", "conversation", "hybrid"] | None = None
    model: str | None = None
    calls: PositiveInt | None = None
    tokens: PositiveInt | None = None
    seconds: PositiveFloat | None = None  # with this limit, two searches may differ
    seed: int = 0

    def check(self) -> None:
        limited = (self.calls, self.tokens, self.seconds) != (None, None, None)
        if limited != (self.strategy is not None):
            raise UserError("a strategy needs a limit (calls, tokens or seconds), and a limit needs a strategy")
        if bool(self.model) != (self.strategy is not None):
            raise UserError("a strategy needs a model (by the name that the endpoint has for it), and a model needs a strategy")


Method = Literal["grpo", "sft", "expert_iteration"]


class Experiment(Section):
    """An experiment compares arms of one method. An experiment without arms is left out of the study."""

    title: str = ""  # in the report; default: the experiment's name
    question: str = ""  # what it asks, in a sentence, for the report
    note: str = ""  # what a reader of its results must know, such as an arm that cannot differ by construction
    method: Method = "grpo"  # training method of its runs; also the section of params.yaml that its arms change
    task: str = MAIN  # entry of `tasks` that its runs are trained on
    builds_on: str | None = None  # earlier experiment; runs start from the values of its winner and of all winners before it
    # What later experiments use: the winner's values, or only the ranking, of which an arm with `off_policy_rank: K` takes the
    # K-th best arm.
    passes_on: Literal["winner", "ranking"] = "winner"
    off_policy_only: bool = False  # whether the winner's values apply to off-policy configurations only
    seeds: Annotated[PositiveInt | None, OMIT] = None  # number of the study's seeds, from the first; null: all
    resources: str = "train"  # entry of `resources` that a scheduler reserves for a run
    # Entry of `resources` for the first seed of an arm, if the arms' seconds are compared: it must leave no room for another
    # stage. The other seeds report no seconds, unless `resources` is the same entry. null: no arm runs alone.
    timed: Annotated[str | None, OMIT] = None
    one_stage: Annotated[bool, OMIT] = False  # train all arms and seeds one after another in one stage, which starts once
    # By name the values that an arm changes, the handouts' default or the lowest rate first. Arms called `NAME-rate_X` are one
    # setting NAME at several learning rates: see :func:`setting_of`.
    arms: dict[str, dict[str, Any]]


def setting_of(arm: str) -> str:
    """The setting of an arm: its name without ``-rate_X``. Arms of one setting differ in their learning rate only."""
    return re.sub(r"-rate_[^-]*$", "", arm)


class Resources(Section):
    """What a scheduler reserves for a stage. Changing these values makes no stage stale."""

    gpus: NonNegativeInt
    cpus: PositiveInt
    mem_mb: PositiveInt
    runtime_min: PositiveInt
