"""A mixture of tasks: each has a share of the problems, and verifies its own answers. examples/mixture.yaml uses it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from typing import Annotated, Any

from pydantic import Field, PositiveFloat

from grpo.common.errors import UserError
from grpo.common.imports import call_with
from grpo.common.records import Problem, Rollout
from grpo.tasks.task import LIMIT, Settings, Split, Task, make_task


class Part(Settings, extra="allow"):
    """One task of a mixture: its weight, and ``use`` with the task's arguments."""

    use: str
    weight: PositiveFloat = 1.0


class Mixture(Task):
    """Problems of several tasks in proportion to their weights, in both splits, as many as the smallest task allows.

    Its formats are those that all of its tasks have. A problem's id begins with the name of its task, and the rewards of each
    task are logged besides those of the mixture.

    Args:
        tasks: the tasks, by name.
        drop_overlap: leave out training questions that are also validation questions of any task, instead of refusing them.

    Raises:
        UserError: a task cannot be made, or the tasks have no format in common.
    """

    def __init__(self, tasks: Annotated[dict[str, Part], Field(min_length=1)], drop_overlap: bool = False):
        self.weights = {name: part.weight for name, part in tasks.items()}
        self.parts = {name: make_task(part.model_dump(exclude={"weight"}), f"tasks.{name}") for name, part in tasks.items()}
        self.drop_overlap = drop_overlap or any(part.drop_overlap for part in self.parts.values())
        for name, key in product(tasks, (LIMIT, "environment")):
            if (tasks[name].model_extra or {}).get(key):
                raise UserError(f"tasks.{name}.{key}: give it to the mixture itself, beside `tasks`.")
        named = [f"{type(part).__module__}:{type(part).__name__}" for part in self.parts.values()]
        self.own_code = (*named, *(path for part in self.parts.values() for path in part.own_code))
        self.own_files = tuple(file for part in self.parts.values() for file in part.own_files)
        self.packages = tuple(dict.fromkeys(name for part in self.parts.values() for name in part.packages))
        self.reward_columns = tuple(dict.fromkeys(name for part in self.parts.values() for name in part.reward_columns))
        formats = [part.formats for part in self.parts.values()]
        self.formats = {  # type: ignore[misc]
            name: format for name, format in formats[0].items() if all(other.get(name) == format for other in formats)
        }
        if not self.formats:
            raise UserError("its tasks have no format in common. Leave one out.")

    def problems(self, split: Split) -> list[Problem]:
        """See :meth:`Task.problems`. Every prefix of the list has the tasks in nearly their shares."""
        found = {name: part.problems(split) for name, part in self.parts.items()}
        counts = shares({name: len(problems) for name, problems in found.items()}, self.weights)
        placed = [
            ((place + 0.5) / count, replace(problem, id=f"{name}/{problem.id}"))
            for name, count in counts.items()
            for place, problem in enumerate(found[name][:count])
        ]
        return [problem for _, problem in sorted(placed, key=lambda one: one[0])]

    def skipped(self, split: Split) -> list[str]:
        """See :meth:`Task.skipped`."""
        return [row for part in self.parts.values() for row in part.skipped(split)]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """Let each task verify its own answers, in one call."""
        scores = [0.0] * len(answers)
        for name, part in self.parts.items():
            places = [place for place, problem in enumerate(problems) if _part_of(problem) == name]
            asked = [replace(problems[place], id=problems[place].id.partition("/")[2]) for place in places]
            for place, score in zip(places, part.verify([answers[place] for place in places], asked), strict=True):
                scores[place] = score
        return scores

    def training_measures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Mean answer reward of each task; NaN for a task without rollouts."""
        rewards: dict[str, list[float]] = {name: [] for name in self.parts}
        for rollout in rollouts:
            rewards[_part_of(rollout.problem)].append(rollout.rewards["answer_reward"])
        return {f"{name}/answer_reward": sum(own) / len(own) if own else math.nan for name, own in rewards.items()}

    measures = training_measures

    def documents(self, seed: int, **options: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Draw documents of the tasks by their weights, without end.

        Args:
            options: arguments of each task's own ``documents``, by name of the task.
        """
        if unknown := sorted(options.keys() - self.parts.keys()):
            raise UserError(f"documents: {unknown[0]}: no such task (known: {', '.join(self.parts)}).")
        streams = {
            name: call_with(part.documents, {"seed": seed, **options.get(name, {})}, f"documents.{name}")
            for name, part in self.parts.items()
        }
        rng, names, weights = random.Random(f"mixture {seed}"), list(self.weights), list(self.weights.values())
        return (next(streams[rng.choices(names, weights=weights)[0]]) for _ in count())


def shares(sizes: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Largest numbers of problems that are in proportion to the weights and do not exceed the sizes."""
    scale = min(size / weights[name] for name, size in sizes.items())
    return {name: max(1, int(weight * scale + 1e-9)) for name, weight in weights.items()}


def _part_of(problem: Problem) -> str:
    return problem.id.partition("/")[0]
