"""The other sections of params.yaml, typed and validated; :mod:`grpo.study.methods` has the hyperparameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from grpo.common.errors import UserError
from grpo.study.methods import OMIT, ExpertIterationConfig, RunConfig, Section, SftConfig
from grpo.tasks.sft_dataset import HubTraces, JsonlTraces, TaskTraces
from grpo.tasks.task import Share

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


Score = Literal["answer_reward", "reward"]


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
    metric: Annotated[Score | None, OMIT] = None

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

    Without a strategy no search runs, and the stage only checks the committed program. A strategy asks a language model, set
    by ``OPENAI_BASE_URL``, ``OPENAI_MODEL`` and ``OPENAI_API_KEY``. ``best_of_n``: independent answers. ``conversation``: each
    prompt has all earlier answers and their evaluations. ``hybrid``: a conversation in which each turn is the best of several
    answers.
    """

    strategy: Literal["best_of_n", "conversation", "hybrid"] | None = None
    calls: PositiveInt | None = None
    tokens: PositiveInt | None = None
    seconds: PositiveFloat | None = None  # with this limit, two searches may differ
    seed: int = 0

    def check(self) -> None:
        limited = (self.calls, self.tokens, self.seconds) != (None, None, None)
        if limited != (self.strategy is not None):
            raise UserError("a strategy needs a limit (calls, tokens or seconds), and a limit needs a strategy")


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
