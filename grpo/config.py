"""The hyperparameters of one GRPO run, typed and checked; nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"]
LengthNormalization = Literal["masked_mean", "masked_normalize", "microbatch_longest"]
PromptName = Literal["r1_zero", "question_only"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


OFF_POLICY_RANK = "off_policy_rank"  # in an arm: "the values of the K-th best off-policy arm of the sweep before"


class Section(BaseModel):
    """A mapping of params.yaml: unknown keys are refused and types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class GrpoConfig(Section):
    """The hyperparameters of one GRPO run, by the handouts' names and with their defaults (Section 7 of CS336 A5)."""

    n_grpo_steps: PositiveInt = 200
    learning_rate: PositiveFloat = 1e-5
    advantage_eps: PositiveFloat = 1e-6
    rollout_batch_size: PositiveInt = 256
    group_size: PositiveInt = 8
    sampling_temperature: PositiveFloat = 1.0
    sampling_top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    sampling_min_tokens: NonNegativeInt = 4
    sampling_max_tokens: PositiveInt = 1024
    epochs_per_rollout_batch: PositiveInt = 1
    train_batch_size: PositiveInt = 256
    gradient_accumulation_steps: PositiveInt = 128
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.85
    loss_type: LossType = "reinforce_with_baseline"
    use_std_normalization: bool = True
    length_normalization: LengthNormalization = "masked_mean"
    cliprange: PositiveFloat = 0.2
    max_grad_norm: PositiveFloat = 1.0
    prompt: PromptName = "r1_zero"
    importance_cap: PositiveFloat | None = None  # truncated importance sampling between engine and learner, token by token
    measure_kl: bool = False  # to the frozen starting weights, at every step; it never enters the loss
    wall_clock_limit_s: PositiveFloat | None = None  # the run ends after the step at which its time is up

    @model_validator(mode="after")
    def _sanity_checks(self) -> GrpoConfig:
        def divides(whole: str, part: str) -> None:
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"{whole} ({getattr(self, whole)}) must be divisible by {part} ({getattr(self, part)}): change one of them"
                )

        divides("train_batch_size", "gradient_accumulation_steps")
        divides("rollout_batch_size", "group_size")
        divides("rollout_batch_size", "train_batch_size")
        if self.train_batch_size < self.group_size:
            raise ValueError(
                f"train_batch_size ({self.train_batch_size}) must be at least group_size ({self.group_size}): raise the former"
            )
        if self.group_size == 1 and self.loss_type != "no_baseline":
            raise ValueError(
                "group_size 1 leaves every advantage at zero, so nothing would be trained: "
                "use at least 2, or loss_type no_baseline"
            )
        if self.sampling_min_tokens > self.sampling_max_tokens:
            raise ValueError(
                f"sampling_min_tokens ({self.sampling_min_tokens}) must not exceed "
                f"sampling_max_tokens ({self.sampling_max_tokens})"
            )
        return self

    @property
    def n_prompts_per_rollout_batch(self) -> int:
        """Questions sampled in one GRPO step."""
        return self.rollout_batch_size // self.group_size

    @property
    def micro_train_batch_size(self) -> int:
        """Rollouts in one forward and backward pass."""
        return self.train_batch_size // self.gradient_accumulation_steps

    @property
    def updates_per_rollout_batch(self) -> int:
        """Optimizer steps taken on one rollout batch; 1 is exactly on-policy."""
        return self.epochs_per_rollout_batch * (self.rollout_batch_size // self.train_batch_size)


def explain(path: Path, item: Any) -> str:
    """One line for one pydantic error: file, key path, what is wrong, what was expected."""
    # pydantic puts the chosen member of a union into the location; it is no key of the file.
    inserted = {"arithmetic", "math", "gsm8k", "pretrain", "hub", "local", "HubDataset", "LocalFiles"}
    parts = [str(part) for part in item["loc"]]
    key = ".".join(
        part
        for i, part in enumerate(parts)
        if not (i == 1 and parts[0] in {"task", "model"} and part in inserted) and part not in {"HubDataset", "LocalFiles"}
    )
    kind, value = item["type"], item.get("input")
    if kind == "extra_forbidden":
        return f"{path}: {key}: unknown key. Check its spelling, or remove it."
    if kind == "missing":
        return f"{path}: {key}: missing. Add it (see studies/ for examples)."
    message = item["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{path}: {key + ': ' if key else ''}{message}."
    return f"{path}: {key}: {message[0].lower() + message[1:]}, but it is {value!r}."


def apply_overrides(config: GrpoConfig, overrides: dict[str, Any], path: str) -> GrpoConfig:
    """``config`` with ``overrides`` applied and everything checked again.

    Args:
        overrides: may be empty; ``off_policy_rank`` must have been resolved.
        path: where the overrides stand, for the message.

    Raises:
        ValueError: a key that GrpoConfig does not have, or a value or combination it refuses.
    """
    try:
        return GrpoConfig.model_validate({**config.model_dump(), **overrides})
    except ValidationError as error:
        lines = [explain(Path(), item).removeprefix(".: ") for item in error.errors()]
        raise ValueError(f"{path}: " + " ".join(lines).rstrip(".")) from error
