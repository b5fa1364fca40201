"""Environments: what answers a policy between the turns of an episode, by tools that it calls or in words.

An environment is a class in the convention of TRL's ``environment_factory``, so that one written for TRL works unchanged:

- ``reset(**row)`` begins an episode and may return text that is put after the question. The row has the problem's
  ``question``, ``ground_truth``, ``level``, ``subject`` and columns, and ``seed`` if the method names it.
- Every other public method is a tool: its type hints and docstring are its schema. Or, without tools, ``step(text)`` answers
  a turn; None ends the episode.
- ``get_reward()``, from 0 to 1, if there is one, is the reward of the episode; else the task verifies the last turn.

Methods may be ``async def``. All methods of an episode run in one thread, with one event loop (:mod:`grpo.tasks.threads`).
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import PositiveFloat, PositiveInt

from grpo.common.errors import UserError, library_errors, own_errors, text_of
from grpo.common.imports import call_with, import_object
from grpo.common.records import Problem, is_number, whole
from grpo.tasks.threads import finished

CHARACTERS_PER_TOKEN = 100  # more is cut off before it is encoded


class Answer(NamedTuple):
    """What an environment wrote after a turn.

    Attributes:
        messages: each with ``role`` and ``content``, those of tools also with ``name``; empty: the episode is over.
        failures: number of calls that ended in an error.
    """

    messages: list[dict[str, str]]
    failures: int = 0


@dataclass(frozen=True)
class Environment:
    """An environment and its limits: the keys of a task's entry in params.yaml.

    Raises UserError if the class has no ``reset``, or neither tools nor ``step``.

    Attributes:
        environment: import path of the class.
        max_turns: most turns of the policy in an episode.
        max_observation_tokens: most tokens that the environment adds after a turn; its text is cut to fit.
        tool_seconds: time limit of each turn's calls.
    """

    environment: str
    max_turns: PositiveInt = 8
    max_observation_tokens: PositiveInt = 256
    tool_seconds: PositiveFloat = 10.0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, type) or not callable(getattr(self.kind, "reset", None)):
            raise UserError(f"environment: {self.environment} is no class with a method `reset(**row)`. Write one.")
        if not self.tools and not self.speaks:
            raise UserError(f"environment: {self.environment} has neither a tool nor `step(self, text)`. Give it one of them.")

    @cached_property
    def kind(self) -> Any:
        return import_object(self.environment)

    @cached_property
    def _public(self) -> list[str]:
        own = inspect.getmembers(self.kind, lambda value: callable(value) and not isinstance(value, type))
        return [name for name, _ in own if not name.startswith("_") and name not in ("reset", "get_reward")]

    @cached_property
    def speaks(self) -> bool:
        """Whether it answers in words: its only public method is ``step(self, text)``."""
        return self._public == ["step"] and [*inspect.signature(self.kind.step).parameters][1:] == ["text"]

    @cached_property
    def tools(self) -> list[str]:
        """Names of its tools, in alphabetical order."""
        return [] if self.speaks else self._public

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of its tools, from their hints and docstrings.

        Raises UserError if a tool has no docstring, or an argument no type hint.
        """
        from transformers.utils import get_json_schema  # slow to import

        with library_errors(lambda why: f"environment: {self.environment}: a tool needs type hints and a docstring: {why}"):
            return [get_json_schema(getattr(self.kind, name)) for name in self.tools]

    @property
    def most_observation_tokens(self) -> int:
        """Most tokens that it adds to an episode."""
        return (self.max_turns - 1) * self.max_observation_tokens

    def opening(self, problem: Problem) -> str:
        """The text after a problem's question; an environment begins once for it, however often the prompt is built."""
        if problem.id not in self._openings:
            self._openings[problem.id] = self.begin(problem, 0)[1]
        return self._openings[problem.id]

    @cached_property
    def _openings(self) -> dict[str, str]:
        return {}

    def begin(self, problem: Problem, seed: int) -> tuple[Any, str]:
        """Begin an episode.

        ``seed``: of this episode, for environments that draw at random. Returns its own instance of the class, and the text
        after the question. Raises UserError: ``reset`` does not return text or None, or raises an error.
        """
        row = {name: getattr(problem, name) for name in ("question", "ground_truth", "level", "subject")}
        row |= copy.deepcopy(problem.columns)  # an environment may change them in place
        takes = inspect.signature(self.kind.reset).parameters
        if "seed" in takes:
            row["seed"] = seed
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
            row = {name: value for name, value in row.items() if name in takes}
        instance = self._call("()", self.kind)
        text = self._call(".reset", instance.reset, **row)
        if text is not None and not isinstance(text, str):
            raise UserError(f"environment: {self.environment}.reset returned {text!r}. Return text or None.")
        return instance, printable(text or "")

    def _text(self, written: object) -> str:
        """What the environment wrote, within a length that is quick to encode."""
        return printable(str(written)[: CHARACTERS_PER_TOKEN * self.max_observation_tokens])

    def answer(self, instance: Any, text: str, calls: Sequence[Any]) -> Answer:
        """Answer a turn: the result of each call as a message, or what ``step`` says to the text."""
        if self.speaks:
            said = self._call(".step", instance.step, text)
            return Answer([] if said is None else [{"role": "user", "content": self._text(said)}])
        results = [self._result(instance, call) for call in calls]
        return Answer(
            [{"role": "tool", "name": name, "content": self._text(text)} for name, text, _ in results],
            sum(failed for *_, failed in results),
        )

    @property
    def rewards(self) -> bool:
        """Whether it gives the reward of an episode."""
        return callable(getattr(self.kind, "get_reward", None))

    def reward(self, instance: Any) -> float:
        """The episode's reward, if it gives one. Raises UserError if it is not from 0 to 1."""
        given = self._call(".get_reward", instance.get_reward)
        reward = whole(given) if is_number(given) else math.nan
        if not 0.0 <= reward <= 1.0:
            raise UserError(f"environment: {self.environment}.get_reward returned {given!r}. Return a number from 0 to 1.")
        return reward

    def _result(self, instance: Any, call: Any) -> tuple[str, str, bool]:
        """Name of the tool, its answer as text, and whether the call failed."""
        name = call.get("name") if isinstance(call, Mapping) else None
        if name not in self.tools:
            known = f"there are the tools {', '.join(self.tools)}"
            return "unknown", f"error: {f'no tool {name!r}' if isinstance(name, str) else 'no call in JSON'}; {known}", True
        arguments = call.get("arguments") or {}
        with suppress(ValueError, RecursionError):  # OpenAI's interface writes them as a text
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, Mapping):
            return name, f"error: arguments is no JSON object with the arguments of {name}", True
        try:
            return name, str(finished(getattr(instance, name)(**arguments))), False
        except BaseException as error:  # also an exit, or a PanicException of Rust's libraries
            return name, f"error: {text_of(error) or type(error).__name__}", True

    def _call(self, what: str, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Call a method whose errors are the study's own."""
        with own_errors(f"environment: {self.environment}{what}"):
            return finished(function(*values, **named))


ANY_TASK_TAKES = tuple(Environment.__dataclass_fields__)  # keys of any entry of ``tasks:``, besides the task's own arguments


def find_environment(settings: Mapping[str, Any], where: str) -> Environment | None:
    """Make the environment that an entry of ``tasks:`` names; None if it names none.

    Raises UserError: a limit without an environment, a value of the wrong type, or no such class.
    """
    given = {key: settings[key] for key in ANY_TASK_TAKES if settings.get(key) is not None}
    if not given:
        return None
    made: Environment = call_with(Environment, given, where)
    return made


def printable(text: str) -> str:
    """Text that can be encoded: half a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode()
