"""A study (params.yaml) as typed, validated values.

Nothing here imports torch, so that a mistake in params.yaml is told within a second, before anything runs.
Numbers follow YAML 1.2 (``1e-5`` is a number), as in DVC's own reader.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from grpo.errors import UserError

PARAMS_FILE = Path("params.yaml")
STUDIES_FOLDER = Path("studies")

# Which experiment's winner (and, through it, those before) an experiment builds on. dvc.yaml states the same as deps.
BUILDS_ON: dict[str, str | None] = {
    "grpo_learning_rate": None,
    "grpo_baselines": "grpo_learning_rate",
}

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"]
LengthNormalization = Literal["masked_mean", "masked_normalize", "microbatch_longest"]
PromptName = Literal["r1_zero", "question_only"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A mapping of params.yaml: unknown keys are refused and types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


# ---------------------------------------------------------------------------------------------------------------- task


class ArithmeticTask(Section):
    """Generated word problems; see :mod:`grpo.tasks.arithmetic`."""

    name: Literal["arithmetic"]
    train_size: PositiveInt
    validation_size: PositiveInt
    levels: PositiveInt = Field(le=5)
    seed: int


class HubDataset(Section):
    """A dataset on the Hugging Face Hub at one fixed revision."""

    hub: str
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")


class LocalFiles(Section):
    """Two JSONL files with the columns of the Hub dataset."""

    train: str
    validation: str


class Counts(Section):
    """How many problems each split must have; anything else means that the source changed."""

    train: PositiveInt
    validation: PositiveInt


class DownloadedTask(Section):
    """MATH or GSM8K; see :mod:`grpo.tasks.math` and :mod:`grpo.tasks.gsm8k`."""

    name: Literal["math", "gsm8k"]
    source: HubDataset | LocalFiles
    expected: Counts | None = None
    drop_overlap: bool = False


Task = Annotated[ArithmeticTask | DownloadedTask, Field(discriminator="name")]

# --------------------------------------------------------------------------------------------------------------- model


class PretrainedHere(Section):
    """A small Qwen2-architecture model that the ``model`` stage pretrains on generated documents.

    Of the documents, ``r1_zero_share`` stand under the r1_zero prompt; of these, ``complete_form_share`` end in the
    form that the reward asks for and ``guess_share`` give an answer without the steps.
    """

    source: Literal["pretrain"]
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    r1_zero_share: Share
    complete_form_share: Share
    guess_share: Share
    seed: int

    @model_validator(mode="after")
    def _heads_divide(self) -> PretrainedHere:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of 2 x num_attention_heads "
                f"({self.num_attention_heads}), because rotary embeddings need an even head size"
            )
        return self


class HubModel(Section):
    """A model on the Hugging Face Hub at one fixed revision."""

    source: Literal["hub"]
    repo: str
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")


class LocalModel(Section):
    """A folder in Hugging Face format."""

    source: Literal["local"]
    path: str


Model = Annotated[PretrainedHere | HubModel | LocalModel, Field(discriminator="source")]

# ------------------------------------------------------------------------------------------------- engine, learner, run


class Engine(Section):
    """Where completions are sampled."""

    name: Literal["transformers", "vllm"]
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_batch_size: PositiveInt = 1024


class Learner(Section):
    """Where gradients are computed."""

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False


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


class BestOfN(Section):
    """The ``best_of_n`` stage: ``samples`` completions of each problem, judged as if only N of them had been drawn."""

    problems: PositiveInt = Field(ge=2)
    prompts: list[PromptName] = Field(min_length=1)
    samples: PositiveInt = 16
    n: list[PositiveInt] = Field(default=[1, 4, 8, 16], min_length=1)

    @model_validator(mode="after")
    def _enough_samples(self) -> BestOfN:
        if max(self.n) > self.samples:
            raise ValueError(f"n: {max(self.n)} cannot be chosen from samples ({self.samples}): raise samples or lower n")
        if sorted(set(self.n)) != self.n:
            raise ValueError(f"n: {self.n} must name each number once, in rising order")
        return self


class Evaluation(Section):
    """Validation during a run and zero-shot evaluation; sampling settings are the handout's."""

    every: PositiveInt
    problems: PositiveInt
    zero_shot_problems: PositiveInt
    zero_shot_prompts: list[PromptName] = Field(min_length=1)
    best_of_n: BestOfN
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_tokens: PositiveInt = 1024
    seed: int = 0


class Selection(Section):
    """How an experiment's winner is found: highest mean of the last ``last_k`` validation answer rewards, or by hand."""

    last_k: PositiveInt
    pinned: dict[str, str] = Field(default_factory=dict)


class Experiment(Section):
    """The arms of an experiment: name -> what it changes in the configuration."""

    arms: dict[str, dict[str, Any]] = Field(min_length=1)


class Resources(Section):
    """What a scheduler reserves for one stage. Changing these makes nothing stale."""

    gpus: NonNegativeInt
    cpus: PositiveInt
    mem_mb: PositiveInt
    runtime_min: PositiveInt


class Study(Section):
    """All of params.yaml."""

    study: str
    description: str
    seeds: list[NonNegativeInt] = Field(min_length=1)
    threads: PositiveInt
    task: Task
    model: Model
    engine: Engine
    learner: Learner
    grpo: GrpoConfig
    evaluation: Evaluation
    selection: Selection
    experiments: dict[str, Experiment]
    resources: dict[Literal["small", "model", "evaluate", "train"], Resources]

    @model_validator(mode="after")
    def _experiments_resolve(self) -> Study:
        expected = set(BUILDS_ON)
        if set(self.experiments) != expected:
            missing, unknown = expected - set(self.experiments), set(self.experiments) - expected
            raise ValueError(
                "experiments: "
                + "; ".join(
                    text
                    for text in (
                        f"missing {', '.join(sorted(missing))}" if missing else "",
                        f"unknown {', '.join(sorted(unknown))} (known: {', '.join(BUILDS_ON)})" if unknown else "",
                    )
                    if text
                )
            )
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} names a seed twice")
        for name, experiment in self.experiments.items():
            for arm, overrides in experiment.arms.items():
                path = f"experiments.{name}.arms.{arm}"
                if not re.fullmatch(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*", arm):
                    raise ValueError(f"{path}: an arm's name may hold letters, digits, '_' and '-' only")
                apply_overrides(self.grpo, overrides, path)
        for name, arm in self.selection.pinned.items():
            if name not in self.experiments:
                raise ValueError(f"selection.pinned.{name}: no such experiment (known: {', '.join(self.experiments)})")
            if arm not in self.experiments[name].arms:
                known = ", ".join(self.experiments[name].arms)
                raise ValueError(f"selection.pinned.{name}: no arm {arm!r} (known: {known})")
        if set(self.resources) != {"small", "model", "evaluate", "train"}:
            raise ValueError("resources: needs exactly small, model, evaluate and train")
        n_train = self.task.train_size if isinstance(self.task, ArithmeticTask) else None
        if n_train is not None and n_train < self.grpo.n_prompts_per_rollout_batch:
            raise ValueError(
                f"task.train_size ({n_train}) is smaller than the {self.grpo.n_prompts_per_rollout_batch} questions of one "
                "rollout batch (grpo.rollout_batch_size / grpo.group_size): raise it"
            )
        return self


# ------------------------------------------------------------------------------------------------------------- reading


def read_yaml(path: Path) -> Any:
    """Parse a YAML 1.2 file.

    Raises:
        UserError: the file is missing or is not YAML; the message names file, line and remedy.
    """
    from ruamel.yaml import YAML, YAMLError

    if not path.exists():
        raise UserError(f"{path}: no such file. Run this in the project's folder, or choose a study: `grpo study use mini`.")
    try:
        return YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or error}). Mend that line.") from error


def load_study(path: Path = PARAMS_FILE) -> Study:
    """Read and validate a study.

    Raises:
        UserError: one line for each wrong key, with its path in the file and what was expected.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of sections at the top. Compare with {STUDIES_FOLDER}/mini.yaml.")
    try:
        return Study.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(_explain(path, item) for item in error.errors())) from error


def _explain(path: Path, item: Any) -> str:
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
        return f"{path}: {key}: missing. Add it (see {STUDIES_FOLDER}/ for examples)."
    message = item["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{path}: {key + ': ' if key else ''}{message}."
    return f"{path}: {key}: {message[0].lower() + message[1:]}, but it is {value!r}."


# --------------------------------------------------------------------------------------------- effective configuration


def apply_overrides(config: GrpoConfig, overrides: dict[str, Any], path: str) -> GrpoConfig:
    """``config`` with ``overrides`` applied and everything checked again.

    Args:
        path: where the overrides stand, for the message.

    Raises:
        ValueError: a key that GrpoConfig does not have, or a value or combination it refuses.
    """
    try:
        return GrpoConfig.model_validate({**config.model_dump(), **overrides})
    except ValidationError as error:
        lines = [_explain(Path(), item).removeprefix(".: ") for item in error.errors()]
        raise ValueError(f"{path}: " + " ".join(lines).rstrip(".")) from error
