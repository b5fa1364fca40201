"""A study (params.yaml) as typed, validated values.

Nothing here imports torch, so that a mistake in params.yaml is told within a second, before anything runs.
Numbers follow YAML 1.2 (``1e-5`` is a number), as in DVC's own reader.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from grpo.config import OFF_POLICY_RANK, GrpoConfig, PromptName, Section, Share, apply_overrides, explain
from grpo.errors import UserError
from grpo.experiments import EXPERIMENTS, RANKED_BY

PARAMS_FILE = Path("params.yaml")
STUDIES_FOLDER = Path("studies")

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
    sleep_level: Literal[0, 1, 2] = 0  # vLLM gives its GPU memory back while the learner trains: 1 keeps its weights, 2 not


class Learner(Section):
    """Where gradients are computed, how a batch is cut, and what is done for speed and memory. All give the same gradient.

    With a budget of tokens, responses to a prompt share one copy of it in packed rows without padding; with null,
    microbatches are padded. Weights and gradients are kept in float32 whatever ``dtype`` the model computes in.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_tokens_per_microbatch: PositiveInt | None = None
    gradient_checkpointing: bool = False
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    offload_reference: bool = False  # the starting weights of ``measure_kl`` wait in the CPU's memory
    compile: bool = False  # torch.compile: 10 to 15% faster on CPU, after 5 to 20 s of compiling
    processes: PositiveInt = 1  # share the work, as torchrun starts them: one GPU each, or cores of the CPU

    @model_validator(mode="after")
    def _one_gpu_each(self) -> Learner:
        if self.processes > 1 and self.device not in {"cpu", "cuda"}:
            raise ValueError(f"device {self.device!r} names one GPU for {self.processes} processes: use device cuda")
        return self


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
    """How an experiment's winner is found: mean of the last ``last_k`` validation answer rewards, or pinned by hand.

    ``best_few`` off-policy arms of the broad sweep go on to the focused one.
    """

    last_k: PositiveInt
    best_few: PositiveInt = 2
    pinned: dict[str, str] = Field(default_factory=dict)


class Divergence(Section):
    """When a run has clearly diverged and is stopped.

    A rule must hold ``patience`` evaluations in a row. Entropy and length count as collapsed only once the answer reward
    has fallen below half of the run's best, because a policy that has learnt its task may be short and sure.
    """

    patience: PositiveInt = 2
    reward_below_start: Share = 0.5  # validation answer reward below this share of the untrained one
    entropy_below: PositiveFloat = 1e-3  # mean token entropy in nats
    length_below: Share = 0.2  # validation response length below this share of the untrained one
    skipped_updates: PositiveInt = 5  # optimizer steps in a row without a finite gradient


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
    divergence: Divergence | None  # null: no run is ever stopped
    checkpoints: list[Literal["last", "best"]] = Field(min_length=1)
    experiments: dict[str, Experiment]
    resources: dict[Literal["small", "model", "evaluate", "train"], Resources]

    @model_validator(mode="after")
    def _experiments_resolve(self) -> Study:
        expected = set(EXPERIMENTS)
        if set(self.experiments) != expected:
            missing, unknown = expected - set(self.experiments), set(self.experiments) - expected
            raise ValueError(
                "experiments: "
                + "; ".join(
                    text
                    for text in (
                        f"missing {', '.join(sorted(missing))}" if missing else "",
                        f"unknown {', '.join(sorted(unknown))} (known: {', '.join(EXPERIMENTS)})" if unknown else "",
                    )
                    if text
                )
            )
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} names a seed twice")
        if self.learner.processes > 1 and self.engine.name == "vllm":
            raise ValueError(
                f"learner.processes: {self.learner.processes} processes cannot share one with vLLM in it: "
                "set it to 1, or engine.name to transformers"
            )
        for name, experiment in self.experiments.items():
            for arm, overrides in experiment.arms.items():
                path = f"experiments.{name}.arms.{arm}"
                if not re.fullmatch(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*", arm):
                    raise ValueError(f"{path}: an arm's name may hold letters, digits, '_' and '-' only")
                self._check_rank(path, name, overrides)
                apply_overrides(self.grpo, {k: v for k, v in overrides.items() if k != OFF_POLICY_RANK}, path)
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

    def _check_rank(self, path: str, experiment: str, overrides: dict[str, Any]) -> None:
        """An arm may take its values from the sweep before, if there is one, and from as many arms as that hands on."""
        if OFF_POLICY_RANK not in overrides:
            return
        rank = overrides[OFF_POLICY_RANK]
        if experiment not in RANKED_BY:
            raise ValueError(f"{path}.{OFF_POLICY_RANK}: only the arms of {' and '.join(RANKED_BY)} can have it")
        few = self.selection.best_few
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= few:
            raise ValueError(f"{path}.{OFF_POLICY_RANK}: {rank!r} is no whole number from 1 to selection.best_few ({few})")


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
        raise UserError("\n".join(explain(path, item) for item in error.errors())) from error
