"""The sections of params.yaml other than the methods' hyperparameters (:mod:`grpo.study.methods`), typed and checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from grpo.study.methods import Section, Share
from grpo.tasks.sft_dataset import HubTraces, JsonlTraces, TaskTraces

MAIN = "main"  # the task that is evaluated zero-shot, and that experiments have unless they say otherwise

# --------------------------------------------------------------------------------------------------------------- model


# cpu: the model is so small that its runs sample and train on the CPU, whatever `engine` and `learner` say.
Device = Literal["cpu"] | None


class PretrainedHere(Section):
    """A small model of Qwen2's architecture that the ``model`` stage pretrains on its task's documents.

    ``documents`` goes to the task: see :meth:`grpo.tasks.task.Task.documents`.
    """

    source: Literal["pretrain"]
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = True  # the model's head is its embedding
    steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    seed: int
    documents: dict[str, Any] = Field(default_factory=dict)
    device: Device = None

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
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
    device: Device = None


class LocalModel(Section):
    """A folder in Hugging Face format."""

    source: Literal["local"]
    path: str
    device: Device = None


class RandomModel(Section):
    """Random weights, with the architecture, the vocabulary and the tokenizer of another model: to try a study without it.

    Of the other model no weights are downloaded. Where sizes are null, they are its own.
    """

    source: Literal["random"]
    like: Annotated[HubModel | LocalModel, Field(discriminator="source")]
    hidden_size: Annotated[int, Field(ge=32, multiple_of=32)] | None = None  # heads of 16 then
    num_hidden_layers: PositiveInt | None = None
    seed: int = 0
    device: Device = None


Model = Annotated[PretrainedHere | HubModel | LocalModel | RandomModel, Field(discriminator="source")]

# ------------------------------------------------------------------------------------------------ examples to fine-tune on


class SampledTraces(Section):
    """Solutions of the training questions that a teacher samples through the study's engine, right and wrong ones."""

    source: Literal["sampled"]
    prompt: str  # the format that the traces have
    model: Annotated[HubModel | LocalModel, Field(discriminator="source")]  # the teacher
    asked_in: str  # the format in which it is asked
    questions: PositiveInt | None = None  # the first so many training questions; null: all
    samples: PositiveInt = 1  # of each
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_tokens: PositiveInt = 1024
    seed: int = 0


SftDataset = Annotated[TaskTraces | JsonlTraces | HubTraces | SampledTraces, Field(discriminator="source")]

# ------------------------------------------------------------------------------------------------- engine, learner, run


class EngineSettings(Section):
    """Where completions are sampled."""

    name: Literal["transformers", "vllm"]
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_batch_size: PositiveInt = 1024
    sleep_level: Literal[0, 2] = 0  # 2: vLLM gives its memory back while a learner on the same GPU trains

    @model_validator(mode="after")
    def _runs_there(self) -> Self:
        if self.sleep_level and self.device == "cpu":
            raise ValueError(f"sleep_level {self.sleep_level}: vLLM can only sleep on a GPU: set it to 0, or device to cuda:0")
        if self.name == "vllm" and self.device not in {"cpu", "cuda", "cuda:0"}:
            raise ValueError(
                f"device {self.device!r}: vLLM takes the first GPU it sees: set it to cuda:0, and learner.device to cuda:1 for "
                "a GPU each"
            )
        return self


class LearnerSettings(Section):
    """Where gradients are computed, how a batch is cut, and what is done for speed and memory. All give the same gradient.

    With a budget of tokens, responses to a prompt share one copy of it in packed rows without padding; or, without
    ``packing``, as many of about one length go together as keep to the budget when they are padded. With null, microbatches
    are padded and have ``train_batch_size / gradient_accumulation_steps`` responses. Weights and gradients are kept in float32
    whatever ``dtype`` the model computes in.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_tokens_per_microbatch: PositiveInt | None = None
    packing: bool = True
    gradient_checkpointing: bool = False
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    offload_reference: bool = False  # the starting weights of KL wait in the CPU's memory
    compile: bool = False  # torch.compile: 10 to 15% faster on CPU, after 5 to 20 s of compiling
    # Train a run together, as torchrun starts them, each on its share of the questions: one GPU each, or cores of the CPU.
    processes: PositiveInt = 1
    fully_shard: bool = False  # each of them holds its share of weights, gradients and moments only, for models beyond one GPU

    @model_validator(mode="after")
    def _one_gpu_each(self) -> LearnerSettings:
        if self.processes > 1 and self.device not in {"cpu", "cuda"}:
            raise ValueError(f"device {self.device!r} names one GPU for {self.processes} processes: use device cuda")
        return self

    @model_validator(mode="after")
    def _can_be_sharded(self) -> LearnerSettings:
        wrong = {
            "processes is 1: set it to 2 or more": self.processes == 1,
            "compile is on: set it to false": self.compile,
            "optimizer is adamw_8bit: set it to adamw": self.optimizer != "adamw",
            "offload_reference is on: set it to false, as the starting weights are sharded too": self.offload_reference,
        }
        if self.fully_shard and any(wrong.values()):
            raise ValueError(f"fully_shard: {'; '.join(text for text, found in wrong.items() if found)}")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_off(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Runs that are not sharded are recorded, and distinguished from others, as before any were."""
        values: dict[str, Any] = values_of(self)
        return {key: value for key, value in values.items() if key != "fully_shard" or value}


class BestOfN(Section):
    """The ``best_of_n`` stage: ``samples`` completions of each problem, judged as if only N of them had been drawn.

    Without prompts it is left out: nothing is sampled, and the report says nothing of it.
    """

    problems: PositiveInt = Field(ge=2)
    prompts: list[str]
    samples: PositiveInt = 16
    n: list[PositiveInt] = Field(default=[1, 4, 8, 16], min_length=1)

    @model_validator(mode="after")
    def _enough_samples(self) -> BestOfN:
        if max(self.n) > self.samples:
            raise ValueError(f"n: {max(self.n)} cannot be chosen from samples ({self.samples}): raise samples or lower n")
        if sorted(set(self.n)) != self.n:
            raise ValueError(f"n: {self.n} must name each number once, in rising order")
        return self


class AlsoEvaluated(Section):
    """A further set on which the runs of the task ``main`` are evaluated: the first validation problems of a task of its own.

    ``use`` and what else it has stand for the task, as in an entry of ``tasks:``.
    """

    model_config = ConfigDict(extra="allow")

    use: str
    problems: PositiveInt
    every: PositiveInt | None = None  # at those evaluations whose step is a multiple, and the last; null: at each

    @property
    def task(self) -> dict[str, Any]:
        """The task's entry."""
        return self.model_dump(exclude={"problems", "every"})


class Evaluation(Section):
    """Validation during a run and zero-shot evaluation; sampling settings are the handout's."""

    every: PositiveInt | Annotated[list[PositiveInt], Field(min_length=1)]  # see grpo.study.methods.evaluation_steps
    problems: PositiveInt
    zero_shot_problems: PositiveInt
    zero_shot_prompts: list[str] = Field(min_length=1)
    best_of_n: BestOfN
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_tokens: PositiveInt = 1024
    seed: int = 0
    also: dict[str, AlsoEvaluated] = Field(default_factory=dict)  # further sets; winners go by the validation problems alone

    @model_validator(mode="after")
    def _sets_are_met(self) -> Evaluation:
        """A further set is evaluated at evaluations only."""
        every = self.every if isinstance(self.every, int) else self.every[-1]
        for name, also in self.also.items():
            if also.every is not None and also.every % every:
                raise ValueError(
                    f"evaluation.also.{name}.every: {also.every} is no multiple of evaluation.every ({every}): make it one"
                )
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_off(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Runs without further sets are recorded, and distinguished from others, as before there were any."""
        values: dict[str, Any] = values_of(self)
        return {key: value for key, value in values.items() if key != "also" or value}

    @field_validator("every")
    @classmethod
    def _rising(cls, every: int | list[int]) -> int | list[int]:
        if isinstance(every, list) and sorted(set(every)) != every:
            raise ValueError(f"{every} must name each step once, in rising order")
        return every


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


class KissingNumber(Section):
    """The search of the ``kissing_number`` stage: how programs are proposed, and when it ends (whichever limit is met first).

    A strategy other than ``mutation`` asks a language model: ``OPENAI_BASE_URL``, ``OPENAI_MODEL`` and ``OPENAI_API_KEY``
    say which. ``best_of_n``: independent answers. ``conversation``: each prompt holds all answers before and what the
    evaluator said of them. ``hybrid``: a conversation whose every turn is the best of several answers.
    """

    strategy: Literal["mutation", "best_of_n", "conversation", "hybrid"] = "mutation"
    calls: PositiveInt | None = None
    tokens: PositiveInt | None = None
    seconds: PositiveFloat | None = None  # with this limit, two searches need not be equal
    seed: int = 0

    @model_validator(mode="after")
    def _ends(self) -> KissingNumber:
        if self.calls is None and self.tokens is None and self.seconds is None:
            raise ValueError("needs a limit: calls, tokens or seconds")
        return self


Method = Literal["grpo", "sft", "expert_iteration"]
ReportPiece = Literal[
    "traces",
    "expert_iteration",
    "colocated",
    "staleness",
    "degenerate_answers",
    "samples",
    "wall_clock",
    "methods",
    "leaderboard",
]


class Experiment(Section):
    """A question asked of a method: its arms, and what they start from. One without arms is left out of the study.

    Attributes:
        title: what the report calls it, if not by its name.
        note: what a reader of its results must know, such as an arm that cannot differ by construction.
        method: how its runs are trained; also the section of params.yaml that its arms change.
        task: the entry of ``tasks`` that its runs are trained on.
        builds_on: the experiment before, whose winner's values, and all that were won before that, its runs start from.
        passes_on: what an experiment that builds on this one takes over: the ``winner``'s values, or only the ``ranking`` of
            its arms, of which an arm with ``off_policy_rank: K`` takes the K-th best.
        tie: who wins of arms that cannot be told from the leader: the ``first``, where the arms stand simplest first, or the
            ``leader``, where none is simpler, as with learning rates.
        off_policy_only: its winner's values hold for off-policy configurations only; on-policy ones keep their own.
        last_k: in the place of ``selection.last_k``.
        resources: the entry of ``resources`` that a scheduler reserves for a run, as dvc.yaml has it under ``meta``.
        report: what the report says of it beyond what it says of each; see :mod:`grpo.reporting.pieces`.
        arms: name -> what it changes in the configuration, simplest first.
    """

    title: str = ""
    note: str = ""
    method: Method = "grpo"
    task: str = MAIN
    builds_on: str | None = None
    passes_on: Literal["winner", "ranking"] = "winner"
    tie: Literal["first", "leader"] = "first"
    off_policy_only: bool = False
    last_k: PositiveInt | None = None
    resources: str = "train"
    report: list[ReportPiece] = Field(default_factory=list)
    arms: dict[str, dict[str, Any]]


class Resources(Section):
    """What a scheduler reserves for one stage of a kind. Changing these makes nothing stale."""

    gpus: NonNegativeInt
    cpus: PositiveInt
    mem_mb: PositiveInt
    runtime_min: PositiveInt
