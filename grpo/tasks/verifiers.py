"""A task from a taskset of Prime Intellect's ``verifiers`` (0.4): its prompts are the questions, its rewards the verifier.

The reward must depend on one response to one prompt: a taskset with tools, a sandbox, user turns or its own environment is
refused. https://github.com/PrimeIntellect-ai/verifiers
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo.common.errors import UserError, reason
from grpo.common.imports import import_object, is_import_path, require_extra, source_of
from grpo.common.records import Problem, whole
from grpo.tasks.task import SPLITS, Format, Settings, Split, Task

INSTALL = "pip install -e '.[verifiers]'"


class Part(Settings):
    """The tasks of a split.

    Attributes:
        config: configuration of the taskset in this split, such as ``{split: test}``.
        select: selection of its tasks, by the keys of ``SelectConfig``: ``include``, ``exclude``, ``shuffle``, ``skip``,
            ``limit``.
    """

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
        code = self.environment if is_import_path(self.environment) else f"{_module(self.environment)}:Taskset"
        source_of(code)
        self.own_code = (code,)

    def problems(self, split: Split) -> list[Problem]:
        """See :meth:`Task.problems`; ids are indices of tasks, ground truths their ``answer``, or JSON of their other fields.

        Raises:
            UserError: ``verifiers`` is not installed, the taskset refuses its settings, or a task needs more than one response
                to one prompt.
        """
        found = [_problem(split, task) for task in self._load(split)]
        if not found:
            raise UserError(f"{self._where}: the {split} split is empty. Check `config` and `{split}`.")
        return found

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """Score each answer by the taskset's rewards: their weighted sum divided by the sum of the positive weights.

        An answer with all rewards scores 1; NaN if scoring exceeds the task's time limit.

        Raises:
            UserError: the taskset has changed since the problems were made, or a score is not from 0 to 1.
        """
        for problem in problems:
            if self._tasks.get(problem) is None:
                raise UserError(
                    f"{self._where}: problem {problem.id} is not what it was when the dataset was made. Run the stage again: "
                    f"`dvc repro -f -s dataset@{self.params_key.removeprefix('tasks.')}`."
                )

        async def score_all() -> list[float]:
            scores = (_score(self._tasks[problem], answer) for problem, answer in zip(problems, answers, strict=True))
            return await asyncio.gather(*scores)

        return asyncio.run(score_all())

    @cached_property
    def _tasks(self) -> dict[Problem, Any]:
        return {_problem(split, task): task for split in SPLITS for task in self._load(split)}

    @property
    def _where(self) -> str:
        return f"{self.params_key}: {self.environment}"

    def _load(self, split: Split) -> Iterator[Any]:
        """Yield the checked tasks of a split."""
        vf = _library()
        for task in self._taskset(vf, split):
            if wrong := _needs_more_than_a_response(vf, task):
                raise UserError(f"{self._where}: {wrong}: not one response to one prompt. Train on it with prime-rl instead.")
            yield task

    def _taskset(self, vf: Any, split: Split) -> Any:
        part, where = getattr(self, split), f"{self._where}: {split}"
        kind: Any = import_object(self.environment) if is_import_path(self.environment) else _installed(vf, self.environment)
        if not (isinstance(kind, type) and issubclass(kind, vf.Taskset)):
            raise UserError(f"{self._where}: is no subclass of verifiers.v1.Taskset.")
        from verifiers.v1.utils.generic import concrete_type

        settings = concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
        try:
            config = settings.model_validate({**self.config, **part.config})
            taskset = kind(config).select(vf.SelectConfig.model_validate(part.select))
        except ValueError as error:  # pydantic's too
            wrong = " ".join(str(error).split())
            raise UserError(f"{where}: {wrong}. Correct `config` or `{split}`.") from error
        if taskset.toolsets(config):
            raise UserError(f"{where}: has tools: not one response to one prompt. Train on it with prime-rl instead.")
        if not taskset.bounded:
            raise UserError(f"{where}: has no end. Say how many: `{split}: {{select: {{limit: N}}}}`.")
        return taskset


def _library() -> Any:
    require_extra("verifiers", "verifiers", "use: verifiers:")
    try:
        import verifiers.v1
    except ImportError as error:  # an older release
        raise UserError(f"use: verifiers: needs verifiers 0.4 ({reason(error)}). {INSTALL}") from error
    return verifiers.v1


def _module(environment: str) -> str:
    """Module of a taskset's id, as in ``verifiers``: ``owner/my-taskset@1.0`` is ``my_taskset``."""
    return environment.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def _installed(vf: Any, environment: str) -> Any:
    """Find the class that an installed taskset exports."""
    from verifiers.v1.utils.loaders import environment_class, taskset_class

    where = f"use: verifiers: {environment}"
    try:
        kind, played_by = taskset_class(environment), environment_class(environment)
    except (AttributeError, TypeError, ValueError) as error:  # of what its package exports
        raise UserError(f"{where}: {reason(error)}. Name its class: MODULE:NAME.") from error
    if played_by is not vf.SingleAgentEnv:
        raise UserError(f"{where}: has its own environment, {played_by.__name__}, which needs more than single responses.")
    return kind


def _needs_more_than_a_response(vf: Any, task: Any) -> str | None:
    """Say what a task needs besides one response to one prompt; None if nothing."""
    kind, data = type(task), task.data
    messages = data.prompt if isinstance(data.prompt, list) else []
    needs = {
        "runs in a container": kind.NEEDS_CONTAINER or data.image is not None,
        "has tools": kind.toolsets(task.config),
        "has a reward that looks into a sandbox": any(map(_needs_runtime, task.hooks("reward"))),
        "prepares or ends something in a sandbox": (kind.setup, kind.finalize) != (vf.Task.setup, vf.Task.finalize),
        "has no reward": not task.hooks("reward") and not task.config.judges,
        "has no prompt": not data.prompt,
        "has a prompt with more than text by system and user": any(
            message.role not in ("system", "user") or not isinstance(message.content, str) for message in messages
        ),
    }
    return next((f"task {data.idx} ({kind.__name__}) {what}" for what, it_does in needs.items() if it_does), None)


def _needs_runtime(reward: Any) -> bool:
    parameter = inspect.signature(reward).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _problem(split: Split, task: Any) -> Problem:
    data = task.data
    own = {name: value for name, value in data.model_dump(mode="json").items() if name not in _library().TaskData.model_fields}
    answer = own.get("answer")
    truth = str(answer) if isinstance(answer, str | int | float) else json.dumps(own, ensure_ascii=False)
    question = "\n\n".join(text for text in (data.system_prompt, data.prompt_text) if text)
    return Problem(f"{split}/{data.idx}", question, truth)


async def _score(task: Any, answer: str) -> float:
    trace = trace_of(task, answer)
    try:
        async with asyncio.timeout(task.data.timeout.scoring):
            await task.score(trace)
    except TimeoutError:
        return math.nan
    given = [reward for reward in trace.rewards.values() if reward is not None]
    most = sum(max(reward.weight, 0.0) for reward in given)
    share = whole(sum(reward.value for reward in given) / most) if most else math.nan
    if not 0.0 <= share <= 1.0:
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        raise UserError(
            f"use: verifiers: task {task.data.idx} ({type(task).__name__}) gives {scores}: {share:.3g} of the largest "
            "weighted sum, but 0 to 1 is expected. Let each reward be from 0 to 1, with a positive weight."
        )
    return share


def trace_of(task: Any, response: str) -> Any:
    """Build the trace that ``verifiers`` records of one response to a task's prompt."""
    vf = _library()
    from verifiers.v1.state import state_cls

    prompt = task.data.prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    if task.data.system_prompt:
        messages.insert(0, vf.SystemMessage(content=task.data.system_prompt))
    nodes = [vf.MessageNode(parent=i - 1 if i else None, message=message) for i, message in enumerate(messages)]
    nodes.append(vf.MessageNode(parent=len(nodes) - 1, message=vf.AssistantMessage(content=response), sampled=True))
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
    )
    trace.ok = True
    trace.stop("agent_completed")
    return trace
