"""What a task is: its problems, the formats they can be put in, and how an answer is verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

from grpo.common.errors import UserError
from grpo.common.imports import call_with, import_object, is_import_path
from grpo.common.records import Problem, Rollout

PLACEHOLDER = "{question}"
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
LIMIT = "max_prompt_tokens"  # what an entry of ``tasks:`` may have beside what the task itself takes
OWN_REWARDS = ("format_reward", "answer_reward")  # of a task; a weighted sum of rewards may name them beside import paths


def whole_response(response: str) -> str | None:
    """The response itself, unless it is blank."""
    return response if response.strip() else None


@dataclass(frozen=True)
class Format:
    """How a question is put, and how an answer is read.

    Attributes:
        template: the prompt, byte for byte, with ``{question}`` where the question belongs.
        stop: strings that end a response; the string itself stays part of it.
        read: the answer that a response gives; None: it has not the form that the prompt asks for.
        chat: put the prompt as a user's message through the chat template of the model's tokenizer.
        system: with ``chat``, a system message before it; empty: none.
        options: with ``chat``, what else the chat template takes, such as Qwen3's ``{"enable_thinking": False}``.
    """

    template: str
    stop: tuple[str, ...] = ()
    read: Callable[[str], str | None] = whole_response
    chat: bool = False
    system: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if PLACEHOLDER not in self.template:
            raise UserError(
                f"the template {self.template!r} does not contain {PLACEHOLDER}. Put it where the question belongs."
            )

    def prompt(self, question: str) -> str:
        """The template with ``{question}`` replaced. Other braces, in either text, stay as they are; nothing is appended."""
        return self.template.replace(PLACEHOLDER, question)

    def question_of(self, prompt: str) -> str | None:
        """The question in a prompt; None where the prompt has another form."""
        before, *between = self.template.split(PLACEHOLDER)
        length, rest = divmod(len(prompt) - len(before) - sum(map(len, between)), len(between))
        question = prompt[len(before) : len(before) + max(0, length)]
        return question if not rest and self.prompt(question) == prompt else None

    def encode(self, tokenizer: Any, prompt: str) -> tuple[int, ...]:
        """The token ids with which the model is asked. A question is text: ``<|im_end|>`` in it ends no turn.

        Args:
            tokenizer: as :class:`grpo.models.tokenizer.Tokenizer`.
            prompt: as :meth:`prompt` gives it.

        Raises:
            UserError: a chat, and the tokenizer has no chat template.
        """
        question = self.question_of(prompt)
        template = None if question is None else self.prompt(tokenizer.without_added_tokens(question))
        if not self.chat:
            ids: tuple[int, ...] = tokenizer.prompt_ids(prompt, template)
            return ids
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked, blanked = ([*system, {"role": "user", "content": text}] for text in (prompt, template or prompt))
        ids = tokenizer.chat_ids(asked, blanked, **self.options)
        return ids

    def encode_response(self, tokenizer: Any, response: str) -> tuple[int, ...]:
        """The token ids of a response to train on, with its end: a stop string, or the token that ends a text or a turn."""
        ids = tuple(tokenizer(response, add_special_tokens=False)["input_ids"])
        if response.endswith(self.stop) or (ids and ids[-1] in tokenizer.stop_token_ids):
            return ids
        turn = tokenizer.end_of_turn_id if self.chat else None
        return (*ids, tokenizer.eos_token_id if turn is None else turn)


@dataclass(frozen=True)
class ScoredBatch:
    """What :meth:`Task.score` returns.

    Attributes:
        rewards: of each response ``format_reward``, ``answer_reward`` and ``reward``, each from 0 to 1.
        out_of_time: for each response whether its answer could not be verified in time, and so counts as wrong.
    """

    rewards: list[dict[str, float]]
    out_of_time: list[bool]

    @property
    def timed_out(self) -> int:
        """How many answers ran out of time."""
        return sum(self.out_of_time)


ScoreFn = Callable[[Sequence[Problem], Sequence[str]], ScoredBatch]
"""Rewards many responses at once, given the problem of each: :meth:`Task.score`, bound to a format."""


class Task:
    """Problems with answers that can be verified. Subclass it for a task of your own.

    What follows ``use:`` in params.yaml goes to the constructor as keyword arguments, checked against their annotations. It is
    called whenever params.yaml is read, so it only keeps its arguments; data is read by :meth:`problems`.
    """

    formats: ClassVar[Mapping[str, Format]] = {}
    stands_for: ClassVar[str] = ""  # the task whose published claims a study of this one is judged by, such as math
    drop_overlap: bool = False  # training questions that are also validation questions are left out, not refused
    max_prompt_tokens: int | None = None  # of its entry in params.yaml: longer prompts are left out; None: there is no limit
    params_key: str = "tasks.NAME"  # its entry in params.yaml, for messages; make_task says which it is
    own_code: tuple[str, ...] = ()  # import paths of what it calls, such as a verifier: results depend on it

    def problems(self, split: Split) -> list[Problem]:
        """The problems of a split, the same at each call; ids are unique across splits."""
        raise NotImplementedError

    def skipped(self, split: Split) -> list[str]:
        """The rows of its source that :meth:`problems` left out: where each stands and why."""
        return []

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """How right each answer is, from 0 to 1; NaN: it could not be judged in time, and counts as 0.

        All the answers of a batch come at once, so that a slow verifier can judge them side by side.
        """
        raise NotImplementedError

    def measures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """What else a validation measures of responses, by name."""
        return {}

    def training_measures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """What else is logged of a step's rollouts, by name: the same names at each step."""
        return {}

    def documents(self, seed: int, **options: Any) -> Iterator[tuple[str, str]]:
        """An endless stream of (prompt, response) to pretrain a small model on, without any validation question.

        Args:
            seed: of the model.
            options: ``documents:`` of the model in params.yaml.
        """
        raise UserError(
            f"{type(self).__name__} has no documents, so no model can be pretrained for it: give its model the source hub or "
            "local, or define documents()."
        )

    def pieces(self, text: str) -> list[str]:
        """``text`` cut into what the tokenizer of a small model is trained on."""
        return [text]

    def prompts_and_answers(self, problems: Sequence[Problem]) -> list[tuple[str, str]]:
        """Each problem's prompt with a right response, for files that others read; none where nobody asks for them."""
        return []

    def traces(self, format: str, **options: Any) -> list[tuple[Problem, str]]:
        """Training problems with responses to fine-tune on, for sft_datasets with ``source: task``.

        Args:
            format: the one in which the problems are put.
            options: what else the entry of ``sft_datasets:`` says.
        """
        raise UserError(
            f"{type(self).__name__} has no traces of its own: use source jsonl or hub, or leave its entry in sft_datasets out."
        )

    def rewrite(self, response: str, asked_in: str, format: str) -> str | None:
        """A response to a question put in one format as it stands in another, for sft_datasets with ``source: sampled``.

        Where an answer in ``format`` is the whole response, it is the answer that was read.

        Returns:
            None where it gives no answer.

        Raises:
            UserError: the task does not say how.
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
        """Read each response's answer and verify all answers at once: the only place where rewards are made.

        The form is right where an answer can be read; ``answer_reward`` and ``reward`` are what :meth:`verify` gives it.

        Raises:
            UserError: no such format, or :meth:`verify` gives something else than a number from 0 to 1 for each answer.
        """
        read = find_format(self, format).read
        answers = [read(response) for response in responses]
        put = [(answer, problem) for answer, problem in zip(answers, problems, strict=True) if answer is not None]
        scores = self.verify([answer for answer, _ in put], [problem for _, problem in put])
        if len(scores) != len(put) or not all(math.isnan(score) or 0 <= score <= 1 for score in scores):
            raise UserError(
                f"{type(self).__name__}.verify: expected a number from 0 to 1, or NaN, for each of {len(put)} answers, but got "
                f"{len(scores)} values: {scores[:8]!r}."
            )
        remaining = iter(scores)
        found = [0.0 if answer is None else float(next(remaining)) for answer in answers]
        out_of_time = [math.isnan(score) for score in found]
        right = [0.0 if late else score for score, late in zip(found, out_of_time, strict=True)]
        return ScoredBatch([rewards(answer is not None, r) for answer, r in zip(answers, right, strict=True)], out_of_time)


def rewards(form: bool, right: float) -> dict[str, float]:
    """The three rewards, by the handouts' keys."""
    return {"format_reward": float(form), "answer_reward": float(right), "reward": float(right)}


def find_format(task: Task, name: str) -> Format:
    """A task's format by its name.

    Raises:
        UserError: it has none of that name.
    """
    if name not in task.formats:
        raise UserError(f"prompt {name}: no such format (known of {type(task).__name__}: {', '.join(task.formats) or 'none'}).")
    return task.formats[name]


TASKS = {
    "arithmetic": "grpo.tasks.arithmetic:Arithmetic",
    "math": "grpo.tasks.math:Math",
    "gsm8k": "grpo.tasks.gsm8k:Gsm8k",
    "keyword": "grpo.tasks.keyword_inclusion:Keyword",
    "dataset": "grpo.tasks.dataset:Dataset",
    "verifiers": "grpo.tasks.verifiers:Verifiers",
    "mixture": "grpo.tasks.mixture:Mixture",
    "reasoning_gym": "grpo.tasks.reasoning_gym:ReasoningGym",
}


def make_task(settings: Mapping[str, Any], where: str = Task.params_key) -> Task:
    """The task that an entry of ``tasks:`` stands for.

    Args:
        settings: ``use``, a name in :data:`TASKS` or an import path, and the constructor's keyword arguments; and of any task
            ``max_prompt_tokens``.
        where: the entry's place in params.yaml, such as ``tasks.main``.

    Raises:
        UserError: no such task, or arguments that its constructor does not take.
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
    task: Task = call_with(kind, {key: value for key, value in settings.items() if key not in ("use", LIMIT)}, where)
    for name, value in (("params_key", where), (LIMIT, limit)):
        object.__setattr__(task, name, value)  # a task may be a frozen dataclass
    return task
