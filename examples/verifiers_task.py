"""A task from a taskset of Prime Intellect's ``verifiers`` (0.4): its prompts are the questions, its rewards the verifier.

Put this file into the study's folder; docs/extending.md has a study that uses it (``pip install 'verifiers>=0.4,<0.5'``).

The reward must depend on one response to one prompt: a taskset with tools, a sandbox, user turns or its own environment is
refused. https://github.com/PrimeIntellect-ai/verifiers
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo.common.errors import UserError, reason
from grpo.common.imports import import_object, is_import_path, require_extra, source_of
from grpo.common.records import Problem
from grpo.tasks.task import SPLITS, Format, Settings, Split, Task


class Part(Settings):
    """The tasks of a split: configuration of the taskset, and selection of its tasks by the keys of ``SelectConfig``."""

    config: dict[str, Any] = {}
    select: dict[str, Any] = {}


@dataclass(eq=False)
class Verifiers(Task):
    """The tasks of a taskset.

    Attributes:
        environment: id of an installed taskset, as in ``verifiers``, or import path of a ``Taskset``.
        train, validation: the tasks of each split.
        config: configuration of the taskset in both splits.
        drop_overlap: leave out training questions that are also validation questions, instead of refusing them.

    Raises:
        UserError: the module does not exist.
    """

    environment: str
    train: Part
    validation: Part
    config: dict[str, Any] = field(default_factory=dict)
    drop_overlap: bool = False

    formats = {"plain": Format("{question}")}

    def __post_init__(self) -> None:
        module = self.environment.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()  # of owner/my-taskset@1.0
        self.own_code = (self.environment if is_import_path(self.environment) else f"{module}:Taskset",)
        source_of(self.own_code[0])

    def problems(self, split: Split) -> list[Problem]:
        """See :meth:`Task.problems`; ids are indices of tasks, ground truths their ``answer``, or JSON of their other fields.

        Raises:
            UserError: ``verifiers`` is not installed, the taskset refuses its settings or is empty, or a task needs more than
                one response to one prompt.
        """
        return list(self._load(split))

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """Score each answer by the taskset's rewards: their weighted sum divided by the sum of the positive weights.

        NaN if scoring exceeds the task's time limit.

        Raises:
            UserError: the taskset has changed since the problems were made.
        """

        async def score_all() -> list[float]:
            scores = (self._score(answer, problem) for answer, problem in zip(answers, problems, strict=True))
            return await asyncio.gather(*scores)

        return asyncio.run(score_all())

    async def _score(self, answer: str, problem: Problem) -> float:
        if (task := self._tasks.get(problem)) is None:
            raise UserError(
                f"{self.params_key}: problem {problem.id} is not what it was when the dataset was made. Run the stage again: "
                f"`dvc repro -f -s dataset@{self.params_key.removeprefix('tasks.')}`."
            )
        trace = _trace(task, answer)
        try:
            async with asyncio.timeout(task.data.timeout.scoring):
                await task.score(trace)
        except TimeoutError:
            return math.nan
        most = sum(max(reward.weight, 0.0) for reward in trace.rewards.values() if reward is not None)
        return trace.reward / most if most else math.nan

    @cached_property
    def _tasks(self) -> dict[Problem, Any]:
        return {problem: task for split in SPLITS for problem, task in self._load(split).items()}

    def _load(self, split: Split) -> dict[Problem, Any]:
        """The tasks of a split by their problems."""
        require_extra("verifiers", "verifiers", f"{self.params_key}:")
        import verifiers.v1 as vf
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import environment_class, taskset_class

        part, where = getattr(self, split), f"{self.params_key}: {self.environment}: {split}"
        installed = not is_import_path(self.environment)
        kind: Any = taskset_class(self.environment) if installed else import_object(self.environment)
        try:
            settings = concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
            config = settings.model_validate({**self.config, **part.config})
            taskset = kind(config).select(vf.SelectConfig.model_validate(part.select))
        except (AttributeError, ValueError) as error:  # pydantic's too
            raise UserError(f"{where}: {reason(error)}. Correct `environment`, `config` or `{split}`.") from error
        if not taskset.bounded:
            raise UserError(f"{where}: has no end. Say how many: `{split}: {{select: {{limit: N}}}}`.")
        own_environment = installed and environment_class(self.environment) is not vf.SingleAgentEnv
        tasks = list(taskset)
        if not tasks:
            raise UserError(f"{where}: the split is empty. Check `config` and `{split}`.")
        if own_environment or taskset.toolsets(config) or any(map(_needs_more_than_a_response, tasks)):
            raise UserError(
                f"{where}: needs an environment, tools, a sandbox, or prompts with more than text by system and user, or has "
                "no reward: not one response to one prompt. Train on it with prime-rl instead."
            )
        return {_problem(split, task): task for task in tasks}


def _needs_more_than_a_response(task: Any) -> bool:
    """Whether a task needs tools, a sandbox, or more than text by system and user, or has no reward."""
    from verifiers.v1 import Task as Base

    kind, data = type(task), task.data
    runtimes = [inspect.signature(reward).parameters.get("runtime") for reward in task.hooks("reward")]
    in_sandbox = any(runtime is not None and runtime.default is inspect.Parameter.empty for runtime in runtimes)
    in_sandbox = in_sandbox or kind.NEEDS_CONTAINER or data.image is not None
    has_hooks = (kind.setup, kind.finalize) != (Base.setup, Base.finalize)
    messages = data.prompt if isinstance(data.prompt, list) else []
    is_text = bool(data.prompt) and all(m.role in ("system", "user") and isinstance(m.content, str) for m in messages)
    return in_sandbox or has_hooks or kind.toolsets(task.config) or not is_text or not (runtimes or task.config.judges)


def _problem(split: Split, task: Any) -> Problem:
    from verifiers.v1 import TaskData

    data = task.data
    own = {name: value for name, value in data.model_dump(mode="json").items() if name not in TaskData.model_fields}
    answer = own.get("answer")
    truth = str(answer) if isinstance(answer, str | int | float) else json.dumps(own, ensure_ascii=False)
    question = "\n\n".join(text for text in (data.system_prompt, data.prompt_text) if text)
    return Problem(f"{split}/{data.idx}", question, truth)


def _trace(task: Any, response: str) -> Any:
    """What the rewards of ``verifiers`` read: the record of a prompt with one response."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    prompt = task.data.prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    if task.data.system_prompt:
        messages.insert(0, vf.SystemMessage(content=task.data.system_prompt))
    messages.append(vf.AssistantMessage(content=response))
    nodes = [vf.MessageNode(parent=place - 1 if place else None, message=message) for place, message in enumerate(messages)]
    nodes[-1].sampled = True
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        ok=True,
    )
    trace.stop("agent_completed")
    return trace
