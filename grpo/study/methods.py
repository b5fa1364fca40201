"""The hyperparameters of one run of each method, typed and checked; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from grpo.common.errors import UserError
from grpo.common.imports import is_import_path, keys_of, source_of
from grpo.tasks.task import OWN_REWARDS

LOSS_TYPES = ("no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo")
LOSSES_OF_THE_HANDOUTS = {"GRPO-Clip": "grpo_clip", "GRPO-No-Clip": "grpo_no_clip"}  # as their text writes these two
WITHOUT_RATIO = ("no_baseline", "reinforce_with_baseline")  # of these, losses that do not contain pi / pi_old
LengthNormalization = Literal["masked_mean", "masked_normalize", "microbatch_longest", "token_mean"]
Baseline = Literal["group_mean", "leave_one_out"]
KlEstimator = Literal["low_variance", "naive"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
LrSchedulerType = Literal["constant", "linear", "cosine"]
RewardWeights = Annotated[dict[str, FiniteFloat], Field(min_length=1)]

RATE_TIMES = "learning_rate_times"  # in an arm: "so many times the rate that the winners before have"
OFF_POLICY_RANK = "off_policy_rank"  # in an arm: "the values of the K-th best off-policy arm of the sweep before"
OBJECTIVE = "objective"  # in an arm, or under `grpo:` of a study's file: the values of one of these

# Published objectives by their names, without what has a setting of its own (KL term, overlong_buffer, ...). Each names all
# keys that another one names, so that none is left over.
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
    # arXiv 2503.20783, Section 3: without the division by response length and by the group's standard deviation.
    "dr_grpo": _GRPO | {"length_normalization": "masked_normalize", "use_std_normalization": False},
    # arXiv 2503.14476, Eq. 8 with the ranges of Section 4.1.
    "dapo": _GRPO | {"cliprange_high": 0.28, "length_normalization": "token_mean"},
    # arXiv 2507.18071, Eq. 5 with the ranges of Section 5.1.
    "gspo": _GRPO | {"loss_type": "gspo", "cliprange": 3e-4, "cliprange_high": 4e-4},
    # arXiv 2506.13585, Section 3.1, which names no upper bound: weights up to 5, as TRL recommends after arXiv 2510.13786.
    "cispo": _GRPO | {"loss_type": "cispo", "cliprange_high": 4.0, "length_normalization": "token_mean"},
    # arXiv 2402.14740: REINFORCE on whole responses, with neither ratio nor clip.
    "rloo": _GRPO
    | {
        "loss_type": "reinforce_with_baseline",
        "length_normalization": "masked_normalize",
        "baseline": "leave_one_out",
        "use_std_normalization": False,
    },
}
# Settings that are left out of a run's record where they have their defaults, which leave all as it was before they came.
LEFT_OUT = (
    "lora",
    "lr_scheduler_type",
    "warmup_steps",
    "dynamic_sampling_rounds",
    "overlong_buffer",
    "baseline",
    "cliprange_high",
    "kl_coefficient",
    "kl_estimator",
    "entropy_coefficient",
)


class Section(BaseModel):
    """A mapping of params.yaml: unknown keys and numbers that are not finite are refused, and types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Lora(Section):
    """Adapters are trained, and the weights stay as they are (:mod:`grpo.models.lora`)."""

    rank: PositiveInt = 8
    alpha: PositiveInt = 32  # what an adapter computes is multiplied by alpha / rank
    targets: list[str] | None = None  # names of layers, such as q_proj; null: every linear layer but the output layer


class TrainingConfig(Section):
    """What the methods have in common: how a batch becomes an optimizer step, and when a run ends."""

    learning_rate: PositiveFloat = 1e-5
    lr_scheduler_type: LrSchedulerType = "constant"  # transformers' names; see grpo.learner.schedule
    warmup_steps: NonNegativeInt = 0  # updates in which the rate rises from 0, with any of these
    train_batch_size: PositiveInt = 256
    gradient_accumulation_steps: PositiveInt = 128
    max_grad_norm: PositiveFloat = 1.0
    prompt: str = "r1_zero"  # a format of the task
    wall_clock_limit_s: PositiveFloat | None = None  # the run ends after the step at which its time is up
    lora: Lora | None = None  # null: all weights are trained

    @model_serializer(mode="wrap")
    def _without_what_is_off(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Runs without what ``LEFT_OUT`` names are recorded, and distinguished from others, as before there was any of it."""
        values: dict[str, Any] = values_of(self)
        off = {key: type(self).model_fields[key].default for key in LEFT_OUT if key in values}
        return {key: value for key, value in values.items() if key not in off or value != off[key]}

    @model_validator(mode="after")
    def _microbatches_divide(self) -> Self:
        self._divides("train_batch_size", "gradient_accumulation_steps")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.lr_scheduler_type == "constant" and not self.warmup_steps:
            return self
        if self.n_updates is None:
            raise ValueError(
                "lr_scheduler_type and warmup_steps: how many updates expert iteration takes is not known beforehand, as it "
                "depends on how many answers are right: leave both out"
            )
        if self.warmup_steps >= self.n_updates:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must be fewer than the run's {self.n_updates} updates: lower it"
            )
        return self

    def _divides(self, whole: str, part: str) -> None:
        if getattr(self, whole) % getattr(self, part):
            raise ValueError(
                f"{whole} ({getattr(self, whole)}) must be divisible by {part} ({getattr(self, part)}): change one of them"
            )

    @property
    def micro_train_batch_size(self) -> int:
        """Responses in one padded forward and backward pass."""
        return self.train_batch_size // self.gradient_accumulation_steps

    @property
    def n_steps(self) -> int:
        """Steps of the method's loop."""
        raise NotImplementedError

    @property
    def n_updates(self) -> int | None:
        """Optimizer steps of a whole run; None where that is not known beforehand."""
        return None


class SamplingConfig(TrainingConfig):
    """What the methods that sample from the policy have in common."""

    group_size: PositiveInt = 8  # rollouts of each question
    sampling_temperature: PositiveFloat = 1.0
    sampling_top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    sampling_min_tokens: NonNegativeInt = 4
    sampling_max_tokens: PositiveInt = 1024

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if self.sampling_min_tokens > self.sampling_max_tokens:
            raise ValueError(
                f"sampling_min_tokens ({self.sampling_min_tokens}) must not exceed "
                f"sampling_max_tokens ({self.sampling_max_tokens})"
            )
        return self


class SftConfig(TrainingConfig):
    """Supervised fine-tuning on reasoning traces (CS336 A5, Section 4.3).

    All arms take the same number of steps, so that they differ in the examples and not in how long they train.
    """

    sampling_temperature: ClassVar[float] = 1.0  # nothing is sampled; log-probabilities are those of the model itself

    n_sft_steps: PositiveInt = 200  # optimizer steps
    evaluate_every: PositiveInt = 20
    examples: PositiveInt | None = None  # so many unique ones, drawn by the run's seed; null: all
    filtered: bool = False  # only those whose response earns the reward
    normalize_constant: PositiveFloat = 1.0  # divides each response's sum of token losses
    keep_steps: list[PositiveInt] = Field(default_factory=list)  # checkpoints step-N, for GRPO to start from

    @model_validator(mode="after")
    def _kept_steps_are_taken(self) -> Self:
        late = [step for step in self.keep_steps if step > self.n_sft_steps]
        if late:
            raise ValueError(f"keep_steps: {late} come after the last step, n_sft_steps ({self.n_sft_steps}): leave them out")
        return self

    @property
    def n_steps(self) -> int:
        """Optimizer steps."""
        return self.n_sft_steps

    @property
    def n_updates(self) -> int:
        """Optimizer steps of a whole run."""
        return self.n_sft_steps


class ExpertIterationConfig(SamplingConfig):
    """Expert iteration (CS336 A5, Algorithm 2): sample, keep what is correct, fine-tune on it, repeat."""

    n_ei_steps: PositiveInt = 5
    ei_batch_size: PositiveInt = 512  # questions of a step, the handout's D_b
    epochs_per_ei_step: PositiveInt = 1
    normalize_constant: PositiveFloat = 1.0

    @property
    def n_steps(self) -> int:
        """Expert iteration steps."""
        return self.n_ei_steps


class Asynchronous(Section):
    """Generator, scorer and learner apart, each a Ray actor: new rollouts are sampled while the learner trains on older ones.

    A *version* of the policy is its weights after so many GRPO steps. A token's *lag* is the version that is trained on it
    less the version that sampled it.
    """

    max_policy_lag: NonNegativeInt = 1  # of new rollouts, always exactly so many; 0: generator and learner take turns
    replay_capacity: PositiveInt = 1  # rollout batches kept to draw from; 1: each batch is trained on once, in order
    replay_max_age: NonNegativeInt | None = None  # groups with more lag than this are dropped; null: only capacity counts

    @model_validator(mode="after")
    def _rollouts_are_young_enough(self) -> Self:
        if self.replay_max_age is None:
            return self
        if self.replay_max_age < self.max_policy_lag:
            raise ValueError(
                f"replay_max_age ({self.replay_max_age}) would drop new rollouts, which may lag by max_policy_lag "
                f"({self.max_policy_lag}): raise the former"
            )
        if self.replay_max_age == self.max_policy_lag and self.replay_capacity > 1:
            raise ValueError(
                f"replay_max_age ({self.replay_max_age}) would drop all but the newest rollouts, which lag by max_policy_lag "
                f"({self.max_policy_lag}), so that nothing is drawn again: raise it, or set replay_capacity to 1"
            )
        return self

    @property
    def is_stale(self) -> bool:
        """Whether rollouts are trained on that an older policy sampled."""
        return self.max_policy_lag > 0 or self.replay_capacity > 1


class GrpoConfig(SamplingConfig):
    """The hyperparameters of one GRPO run, by the handouts' names and with their defaults (Section 7 of CS336 A5)."""

    n_grpo_steps: PositiveInt = 200
    advantage_eps: PositiveFloat = 1e-6
    rollout_batch_size: PositiveInt = 256
    dynamic_sampling_rounds: NonNegativeInt = 0  # so often groups whose rewards are all equal are replaced by other questions'
    epochs_per_rollout_batch: PositiveInt = 1
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.85
    loss_type: str = "reinforce_with_baseline"  # LOSS_TYPES, LOSSES_OF_THE_HANDOUTS, or MODULE:NAME (grpo.learner.losses.Loss)
    loss_options: dict[str, JsonValue] = Field(default_factory=dict)  # handed to the loss; an arm with another loss starts anew
    # MODULE:NAME (grpo.tasks.rewards.apply_reward), or several with their weights; null: the task's own
    reward: str | RewardWeights | None = None
    overlong_buffer: PositiveInt | None = None  # tokens below sampling_max_tokens in which the reward falls by up to 1
    baseline: Baseline = "group_mean"  # what is taken off a reward (grpo.learner.advantages)
    use_std_normalization: bool = True
    length_normalization: LengthNormalization = "masked_mean"
    cliprange: PositiveFloat = 0.2
    cliprange_high: PositiveFloat | None = None  # how far a ratio may rise above 1; null: as far as it may fall, cliprange
    # Truncated importance sampling, token by token: from the policy that sampled a token, as its engine computed it, to the one
    # that is about to be trained.
    importance_cap: PositiveFloat | None = None
    measure_kl: bool = False  # to the frozen starting weights, at every step; by itself it does not enter the loss
    kl_coefficient: NonNegativeFloat = 0.0  # of KL(policy || starting weights) in the loss; 0: there is none
    kl_estimator: KlEstimator = "low_variance"  # of that term (grpo.learner.kl)
    entropy_coefficient: FiniteFloat = 0.0  # of the mean token entropy (nats), taken off the loss; 0: there is none
    start_from: str | None = None  # an SFT checkpoint of the same seed, sft_experiment/ARM/CHECKPOINT; null: the base model
    asynchronous: Asynchronous | None = None  # null: one process samples, scores and trains in turns

    @field_validator("loss_type")
    @classmethod
    def _canonical_loss_type(cls, loss_type: str) -> str:
        return LOSSES_OF_THE_HANDOUTS.get(loss_type, loss_type)

    @field_validator("loss_type", "reward")
    @classmethod
    def _is_found(cls, named: str | dict[str, float] | None, info: ValidationInfo) -> str | dict[str, float] | None:
        known = LOSS_TYPES if info.field_name == "loss_type" else OWN_REWARDS if isinstance(named, dict) else ()
        for name in [named] if isinstance(named, str) else named or ():
            if name in known:
                continue
            if not is_import_path(name):
                raise ValueError(f"{name!r} is unknown: expected {', '.join((*known, 'MODULE:NAME of your own'))}")
            try:
                source_of(name)
            except UserError as error:
                raise ValueError(str(error).removesuffix(".")) from None
        return named

    @model_validator(mode="after")
    def _sanity_checks(self) -> GrpoConfig:
        self._divides("rollout_batch_size", "group_size")
        self._divides("rollout_batch_size", "train_batch_size")
        if self.train_batch_size < self.group_size:
            raise ValueError(
                f"train_batch_size ({self.train_batch_size}) must be at least group_size ({self.group_size}): raise the former"
            )
        if self.measure_kl and self.asynchronous is not None:
            raise ValueError(
                "measure_kl needs rollouts of the current policy, and asynchronous ones are of an older one: "
                "leave out one of the two"
            )
        if self.dynamic_sampling_rounds and self.asynchronous is not None:
            raise ValueError(
                "dynamic_sampling_rounds: whether a group is replaced is known once it is scored, and by then an asynchronous "
                "run's generator samples for a later step: leave out one of the two"
            )
        if self.dynamic_sampling_rounds and self.group_size == 1:
            raise ValueError("dynamic_sampling_rounds: a group of one never has two rewards that differ: raise group_size")
        if self.overlong_buffer is not None and self.overlong_buffer > self.sampling_max_tokens:
            raise ValueError(
                f"overlong_buffer ({self.overlong_buffer}) must not exceed sampling_max_tokens ({self.sampling_max_tokens}): "
                "lower the former"
            )
        ratio_is_to_engine = self.asynchronous is not None and self.asynchronous.is_stale and self.importance_cap is None
        if ratio_is_to_engine and self.loss_type not in WITHOUT_RATIO:
            self._refuse_narrowed_sampling()
        # A loss of the user's own may well take raw rewards.
        if self.group_size == 1 and self.loss_type in LOSS_TYPES and self.loss_type != "no_baseline":
            raise ValueError(
                "group_size 1 leaves every advantage at zero, so nothing would be trained: "
                "use at least 2, or loss_type no_baseline"
            )
        return self

    def _refuse_narrowed_sampling(self) -> None:
        """Ratios of stale tokens are to what the engine noted: the probability among the tokens that it could draw."""
        narrowed = {"sampling_top_p": (self.sampling_top_p, 1.0), "sampling_min_tokens": (self.sampling_min_tokens, 0)}
        for key, (value, off) in narrowed.items():
            if value != off:
                raise ValueError(
                    f"{key} ({value}) leaves tokens out, so that ratios of asynchronous rollouts would be wrong: set it to "
                    f"{off}, or set importance_cap"
                )

    @property
    def needs_starting_weights(self) -> bool:
        """Whether the learner computes log-probabilities under the weights that training started from."""
        return self.measure_kl or self.kl_coefficient > 0.0

    @property
    def n_prompts_per_rollout_batch(self) -> int:
        """Questions sampled in one GRPO step."""
        return self.rollout_batch_size // self.group_size

    @property
    def n_steps(self) -> int:
        """GRPO steps."""
        return self.n_grpo_steps

    @property
    def n_updates(self) -> int:
        """Optimizer steps of a whole run."""
        return self.n_grpo_steps * self.updates_per_rollout_batch

    @property
    def updates_per_rollout_batch(self) -> int:
        """Optimizer steps taken on one rollout batch; 1 is exactly on-policy."""
        return self.epochs_per_rollout_batch * (self.rollout_batch_size // self.train_batch_size)


def explain(path: Path, item: Any, values: Any) -> str:
    """One line for one pydantic error about ``values``: file, key path, what is wrong, what was expected."""
    key, kind, value = ".".join(keys_of(item, values)), item["type"], item.get("input")
    if kind == "extra_forbidden":
        if key.split(".")[-1] == OBJECTIVE:
            return f"{path}: {key}: a study's file may have it, and so may an arm. Here write {value} out (docs/settings.md)."
        return f"{path}: {key}: unknown key. Check its spelling, or remove it."
    if kind == "missing":
        return f"{path}: {key}: missing. Add it (see studies/ for examples)."
    if item["loc"][-1] == "[key]":
        return f"{path}: {key}: {value!r} is a name here, which YAML reads as a number or the like. Write it in quotes."
    message = item["msg"].removeprefix("Value error, ")
    shown = repr(value)
    where = f"{path}: {key}: " if key else f"{path}: "
    if kind == "value_error":
        return f"{where}{message}."
    return f"{where}{message[0].lower() + message[1:]}, but it is {shown if len(shown) <= 200 else shown[:200] + '…'}."


RunConfig = GrpoConfig | SftConfig | ExpertIterationConfig


def evaluation_steps(config: RunConfig, every: int | Sequence[int]) -> list[int]:
    """The steps after which a run is evaluated: 0, every few, and the last one.

    Args:
        every: the study's ``evaluation.every``, which GRPO runs keep to: a number of steps, or a list of first steps, of whose
            last the later ones are multiples. Supervised fine-tuning has a setting of its own, and expert iteration, whose
            steps are long, is evaluated after each.
    """
    match config:
        case SftConfig():
            every = config.evaluate_every
        case ExpertIterationConfig():
            every = 1
    first = [every] if isinstance(every, int) else every
    steps = {0, *first, *range(first[-1], config.n_steps, first[-1]), config.n_steps}
    return sorted(step for step in steps if step <= config.n_steps)


Config = TypeVar("Config", bound=TrainingConfig)


def merged(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """``values`` with ``overrides`` in their place; another loss does not inherit the options of the former one."""
    kept = dict(values)
    if overrides.get("loss_type", values.get("loss_type")) != values.get("loss_type"):
        kept.pop("loss_options", None)
    return kept | overrides


def with_objective(values: dict[str, Any], path: str) -> dict[str, Any]:
    """``values`` with those of the ``objective`` that they name below them.

    Args:
        path: where the values stand, for the message.

    Raises:
        ValueError: there is no such objective.
    """
    if OBJECTIVE not in values:
        return values
    name, own = values[OBJECTIVE], {key: value for key, value in values.items() if key != OBJECTIVE}
    if name not in OBJECTIVES:
        raise ValueError(f"{path}.{OBJECTIVE}: no objective is named {name!r} (known: {', '.join(OBJECTIVES)})")
    return OBJECTIVES[name] | own


def resolved(config: Config, arm: dict[str, Any], path: str) -> dict[str, Any]:
    """An arm's own values, with those of its ``objective`` and the rate that ``learning_rate_times`` gives (rounded to three
    digits); without its rank.

    Args:
        config: what the arm's values go over.
        path: where the arm stands, for the message.

    Raises:
        ValueError: there is no such objective; or the factor is no number above 0, or stands beside a rate.
    """
    values = with_objective({key: value for key, value in arm.items() if key not in (OFF_POLICY_RANK, RATE_TIMES)}, path)
    if RATE_TIMES not in arm:
        return values
    times = arm[RATE_TIMES]
    if isinstance(times, bool) or not isinstance(times, int | float) or not times > 0 or "learning_rate" in arm:
        raise ValueError(f"{path}.{RATE_TIMES}: expected a number above 0, and no learning_rate beside it, but it is {times!r}")
    return values | {"learning_rate": float(f"{times * config.learning_rate:.3g}")}


def apply_overrides(config: Config, overrides: dict[str, Any], path: str) -> Config:
    """``config`` with ``overrides`` applied and everything checked again.

    Args:
        overrides: may be empty; ``off_policy_rank`` must have been resolved.
        path: where the overrides stand, for the message.

    Raises:
        ValueError: a key that the method does not have, or a value or combination it refuses.
    """
    values = merged(config.model_dump(), overrides)
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        lines = [explain(Path(), item, values).removeprefix(".: ") for item in error.errors()]
        raise ValueError(f"{path}: " + " ".join(lines).rstrip(".")) from error
