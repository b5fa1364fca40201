"""The task interface: problems, prompt formats, and verification of answers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, final

from pydantic import BaseModel, ConfigDict, Field

from grpo.common.errors import UserError, own_errors
from grpo.common.imports import call_with, import_object, is_import_path
from grpo.common.records import TOOL_CALL, Problem, Rollout, whole
from grpo.tasks.environment import ANY_TASK_TAKES, Environment, find_environment

PLACEHOLDER = "{question}"
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
LIMIT = "max_prompt_tokens"  # a key that any entry of ``tasks:`` may have besides the task's own arguments
OWN_REWARDS = ("format_reward", "answer_reward")  # a task's rewards
SHIPPED_REWARDS = (*OWN_REWARDS, "random_reward", "majority_reward")  # short names that `reward` takes (grpo.tasks.rewards)

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Settings(BaseModel):
    """Base class of settings in params.yaml. Unknown keys are refused, and types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def whole_response(response: str) -> str | None:
    """Read the whole response as the answer; None if it is blank."""
    return response if response.strip() else None


@dataclass(frozen=True)
class Format:
    """Format of a task: builds the prompt of a question, and reads the answer of a response.

    Attributes:
        template: the prompt, byte for byte, with the placeholder ``{question}``.
        stop: strings that end a response, which keeps the string.
        read: reads the answer of a response; None if the response does not have the form that the prompt requires.
        chat: send the prompt as a user message through the chat template of the model's tokenizer.
        system: with ``chat``, a system message before the prompt; empty for none.
        options: with ``chat``, further variables of the chat template, such as Qwen3's ``{"enable_thinking": False}``.
        environment: what answers between the turns of an episode, from the task's entry; None: a response is one turn.
    """

    template: str
    stop: tuple[str, ...] = ()
    read: Callable[[str], str | None] = whole_response
    chat: bool = False
    system: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    environment: Environment | None = None

    def __post_init__(self) -> None:
        if PLACEHOLDER not in self.template:
            raise UserError(
                f"the template {self.template!r} does not contain {PLACEHOLDER}. Put it where the question belongs."
            )

    def prompt(self, question: str) -> str:
        """Insert the question into the template; other braces stay unchanged, and nothing is appended."""
        return self.template.replace(PLACEHOLDER, question)

    def prompt_of(self, problem: Problem) -> str:
        """The prompt of a problem, with what its environment says at the beginning."""
        return self.prompt(problem.question + (self.environment.opening(problem) if self.environment else ""))

    def question_of(self, prompt: str) -> str | None:
        """Extract the question from a prompt; None if the prompt does not match the template."""
        before, *between = self.template.split(PLACEHOLDER)
        length, rest = divmod(len(prompt) - len(before) - sum(map(len, between)), len(between))
        question = prompt[len(before) : len(before) + max(0, length)]
        return question if not rest and self.prompt(question) == prompt else None

    def encode(self, tokenizer: Any, prompt: str) -> tuple[int, ...]:
        """Encode a prompt. The question is encoded as plain text, so ``<|im_end|>`` in it does not end a turn.

        Raises UserError: the format is a chat, and the tokenizer has no chat template, or one without the environment's tools;
        or the prompt has no tokens. ``tokenizer``: a :class:`grpo.models.tokenizer.Tokenizer`. ``prompt``: from :meth:`prompt`.
        """
        return self.encode_all(tokenizer, [prompt])[0]

    def encode_all(self, tokenizer: Any, prompts: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode prompts as :meth:`encode` does."""
        questions = [self.question_of(prompt) for prompt in prompts]
        safe = [p if q is None else self.prompt(tokenizer.as_text(q)) for p, q in zip(prompts, questions, strict=True)]
        if self.chat:
            system = [{"role": "system", "content": self.system}] if self.system else []
            chats = [[*system, {"role": "user", "content": prompt}] for prompt in safe]
            tools = self.environment.tools if self.environment else []
            options = {**self.options, **({"tools": self.environment.schemas} if self.environment and tools else {})}
            encoded = [tokenizer.chat_ids(chat, **options) for chat in chats]
            if hidden := [name for ids in encoded[:1] for name in tools if name not in tokenizer.decode(ids)]:
                raise UserError(
                    f"environment: the model's chat template leaves out the tools {', '.join(hidden)}. Use a model that was "
                    "trained for tools, name them in the format's system message, or use a format that is no chat."
                )
        else:
            encoded = [tokenizer.prompt_ids(prompt) for prompt in safe]
        for prompt, question, ids in zip(prompts, questions, encoded, strict=True):
            if not ids:
                raise UserError(
                    f"prompt: the question {prompt if question is None else question!r} makes a prompt without tokens, after "
                    "which no model can go on. Leave the question out, or use a format with a text around it."
                )
        return encoded

    def encode_response(self, tokenizer: Any, response: str) -> tuple[int, ...]:
        """Encode a training response with its end: a stop string, or else the token that ends a text or a turn."""
        ids = tuple(tokenizer(response, add_special_tokens=False)["input_ids"])
        if response.endswith(self.stop) or (ids and ids[-1] in tokenizer.stop_token_ids):
            return ids
        turn = tokenizer.end_of_turn_id if self.chat else None
        return (*ids, tokenizer.eos_token_id if turn is None else turn)


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of a batch of responses.

    Attributes:
        rewards: ``format_reward``, ``answer_reward`` and ``reward`` of each response, each from 0 to 1.
        out_of_time: for each response, whether verification ran out of time, which counts as wrong.
    """

    rewards: list[dict[str, float]]
    out_of_time: list[bool]


class Task:
    """Base class of tasks: problems with answers that can be verified. Subclass it for a task of your own.

    The keys beside ``use:`` in params.yaml are the constructor's keyword arguments, checked against their annotations. The
    constructor runs whenever params.yaml is read, so it only keeps its arguments; :meth:`problems` reads data.
    """

    formats: ClassVar[Mapping[str, Format]] = {}
    stands_for: ClassVar[str] = ""  # a task, such as math, whose published claims apply to this one
    drop_overlap: bool = False  # leave out training questions that are also validation questions
    max_prompt_tokens: int | None = None  # leave out longer prompts; None for no limit; set in params.yaml
    params_key: str = "tasks.NAME"  # its key in params.yaml, for messages; set by make_task
    reward_columns: tuple[str, ...] = ()  # names of the further values of its problems, which reward functions get
    own_code: tuple[str, ...] = ()  # import paths of code that results depend on, such as a verifier
    packages: tuple[str, ...] = ()  # installed packages whose versions results depend on; constraints.txt must pin them
    own_files: tuple[str, ...] = ()  # files that problems, traces or documents are read from; stages depend on them

    def problems(self, split: Split) -> list[Problem]:
        """The problems of a split, equal in each call; ids are unique across splits."""
        raise NotImplementedError

    def skipped(self, split: Split) -> list[str]:
        """The rows that :meth:`problems`, which is called before, left out: place and reason of each."""
        return []

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """Score each answer from 0 to 1; NaN if verification ran out of time, which counts as 0.

        A call has all answers of a batch, so that a slow verifier can work on them in parallel.
        """
        raise NotImplementedError

    def measures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Further metrics of an evaluation, by name."""
        return {}

    def training_measures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Further metrics of a training step's rollouts, by name; the names are equal in all steps."""
        return {}

    def documents(self, seed: int, **options: Any) -> Iterator[tuple[str, str]]:
        """Yield (prompt, response) pairs without end, to pretrain a small model on; none has a validation question.

        ``seed``: of the model. ``options``: ``documents:`` of the model in params.yaml.
        """
        raise UserError(
            f"{type(self).__name__} has no documents, so no model can be pretrained for it: give its model the source hub or "
            "local, or define documents()."
        )

    def pieces(self, text: str) -> list[str]:
        """Split ``text`` into the pieces that the tokenizer of a small model is trained on."""
        return [text]

    def prompts_and_answers(self, problems: Sequence[Problem]) -> list[tuple[str, str]]:
        """Each problem's prompt with a right response, for the files of a handout's data set; empty without such files."""
        return []

    def traces(self, format: str, **options: Any) -> list[tuple[Problem, str]]:
        """Training problems with responses to fine-tune on, for sft_datasets with ``source: task``.

        ``format``: name of the format of the responses. ``options``: further keys of the entry in ``sft_datasets:``.
        """
        raise UserError(
            f"{type(self).__name__} has no traces of its own: use source jsonl or hub, or leave its entry in sft_datasets out."
        )

    def rewrite(self, response: str, asked_in: str, format: str) -> str | None:
        """Rewrite a response from the format ``asked_in`` to ``format``, for sft_datasets with ``source: sampled``.

        This works if ``format`` reads the whole response as the answer; other tasks override it. Returns the new response; None
        if the response gives no answer. Raises UserError if the task does not define this rewrite.
        """
        if self.formats[format].read is not whole_response:
            raise UserError(
                f"{type(self).__name__} does not say how a response in the format {asked_in} stands in {format}. "
                f"Ask in {format} itself, or define `rewrite`."
            )
        answer = self.formats[asked_in].read(response)
        return None if answer is None else f" {answer.strip()}"

    @final
    def score(self, format: str, problems: Sequence[Problem], responses: Sequence[str]) -> ScoredBatch:
        """Read the answer of each response, and verify all answers in one call. All task rewards come from here.

        ``format_reward`` is 1 if an answer can be read; ``answer_reward`` and ``reward`` are the score of :meth:`verify`.
        Raises UserError if there is no such format, or :meth:`verify` does not return a number from 0 to 1 (or NaN) for each
        answer.
        """
        read = find_format(self, format).read
        with own_errors(self.params_key):
            answers = [read(response) for response in responses]
            given = [(answer, problem) for answer, problem in zip(answers, problems, strict=True) if answer is not None]
            scores = self.verify([answer for answer, _ in given], [problem for _, problem in given])
        scores = [whole(score) for score in scores]
        if len(scores) != len(given) or not all(math.isnan(score) or 0 <= score <= 1 for score in scores):
            raise UserError(
                f"{type(self).__name__}.verify: expected a number from 0 to 1, or NaN, for each of {len(given)} answers, got "
                f"{len(scores)} values: {scores[:8]!r}."
            )
        remaining = iter(scores)
        all_scores = [0.0 if answer is None else next(remaining) for answer in answers]
        out_of_time = [math.isnan(score) for score in all_scores]
        right = [0.0 if late else score for score, late in zip(all_scores, out_of_time, strict=True)]
        return ScoredBatch([rewards(answer is not None, r) for answer, r in zip(answers, right, strict=True)], out_of_time)


def rewards(form: bool, right: float) -> dict[str, float]:
    """The three rewards under the handouts' keys."""
    return {"format_reward": float(form), "answer_reward": float(right), "reward": float(right)}


def find_format(task: Task, name: str) -> Format:
    """Find a task's format by name. Raises UserError if the task has no such format."""
    if name not in task.formats:
        raise UserError(f"prompt {name}: no such format (known of {type(task).__name__}: {', '.join(task.formats) or 'none'}).")
    return task.formats[name]


TASKS = {
    "arithmetic": "grpo.tasks.arithmetic:Arithmetic",
    "math": "grpo.tasks.downloaded:Math",
    "gsm8k": "grpo.tasks.downloaded:Gsm8k",
    "keyword": "grpo.tasks.keyword_inclusion:Keyword",
    "dataset": "grpo.tasks.dataset:Dataset",
}


def make_task(settings: Mapping[str, Any], where: str = Task.params_key) -> Task:
    """Make the task of an entry of ``tasks:``.

    Raises UserError if there is no such task or environment, or they do not take these arguments.

    Args:
        settings: ``use`` (a name in :data:`TASKS` or an import path), the constructor's keyword arguments, and
            ``max_prompt_tokens``, and those of an environment (:mod:`grpo.tasks.environment`).
        where: key of the entry in params.yaml, such as ``tasks.main``.
    """
    name = settings.get("use")
    if not isinstance(name, str) or (name not in TASKS and not is_import_path(name)):
        raise UserError(f"{where}.use: expected one of {', '.join(TASKS)}, or an import path MODULE:NAME, but it is {name!r}.")
    kind = import_object(TASKS.get(name, name))
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise UserError(f"{where}.use: {name} is no subclass of grpo.tasks.Task. Derive it from that.")
    limit = settings.get(LIMIT)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UserError(f"{where}.{LIMIT}: expected a whole number above 0, or null, but it is {limit!r}.")
    takes = inspect.signature(kind).parameters  # a task may have an argument of such a name, as a taskset of verifiers has
    of_environment = {key: settings[key] for key in ANY_TASK_TAKES if key in settings and key not in takes}
    own = {key: value for key, value in settings.items() if key not in ("use", LIMIT, *of_environment)}
    task: Task = call_with(kind, own, where)
    further: dict[str, Any] = {"params_key": where, LIMIT: limit}
    if (environment := find_environment(of_environment, where)) is not None:
        further["formats"] = {name: in_environment(format, environment) for name, format in task.formats.items()}
        further["own_code"] = (*task.own_code, environment.environment)
    for name, value in further.items():
        object.__setattr__(task, name, value)  # a task may be a frozen dataclass
    return task


def in_environment(format: Format, environment: Environment) -> Format:
    """A format for episodes; in a text that is no chat, a call of a tool ends a turn."""
    calls = () if format.chat or environment.speaks else (TOOL_CALL[1],)
    return replace(format, environment=environment, stop=(*format.stop, *calls))
