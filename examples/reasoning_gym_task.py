"""A task from a data set of ``reasoning_gym`` (0.1), which has about a hundred generators, each with its own verifier.

``examples/reasoning_gym.yaml`` is a study that uses it (``pip install 'reasoning-gym>=0.1.25,<0.2'``).

Other processes make entries and score answers, for two reasons. Some data sets iterate over sets of strings, so their entries
depend on Python's hash seed, which is fixed there. And some pass a model's answer to ``eval``, so an answer may hang or fill
the memory: :class:`grpo.grader.process.GraderProcess` calls :func:`score` in a process with limits.

https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from grpo.common.errors import UserError
from grpo.common.imports import require_extra, safe_environment
from grpo.common.records import Problem
from grpo.grader.process import GraderProcess
from grpo.tasks.arithmetic import document
from grpo.tasks.build import layout_free
from grpo.tasks.graded import GradedTask
from grpo.tasks.task import Share, Split, Task

OTHER_QUESTION = -1.0  # the score if the entry has changed since the problem was made
TIME_LIMIT_S = 10.0  # CPU time for an answer: the worker makes the entry again, and some verifiers search
EXTRA = "reasoning_gym"


@dataclass(eq=False)
class ReasoningGym(Task):
    """Entries of one data set: the first ones are the validation split, the following ones the training split.

    Both come from one sequence, because the library makes entry ``i`` from ``seed + i``: two sequences with adjacent seeds
    would share nearly all entries. If a training entry repeats a validation question, it is left out.

    Attributes:
        dataset: name of the data set in the library, such as ``chain_sum``.
        train_size, validation_size: number of entries of each split.
        seed: of the library's generator.
        config: further settings of the data set, such as ``{max_terms: 3}``.
    """

    dataset: str
    train_size: PositiveInt
    validation_size: PositiveInt
    seed: NonNegativeInt
    config: dict[str, Any] = field(default_factory=dict)

    formats = GradedTask.formats
    drop_overlap = True
    packages = ("reasoning-gym",)

    def __post_init__(self) -> None:
        size = self.validation_size + self.train_size
        self.made_of = json.dumps({"name": self.dataset, "size": size, "seed": self.seed, **self.config})

    def problems(self, split: Split) -> list[Problem]:
        """See :meth:`Task.problems`; ids end with the index of the entry, and an entry without an answer has an empty one.

        Raises:
            UserError: the library is not installed, or refuses the name or the configuration.
        """
        require_extra("reasoning_gym", EXTRA, f"{self.params_key}:")
        start, size = (0, self.validation_size) if split == "validation" else (self.validation_size, self.train_size)
        command = [sys.executable, __file__, self.made_of, str(start), str(start + size)]
        made = subprocess.run(command, env=safe_environment() | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True)
        if made.returncode:
            said = made.stderr.strip().splitlines() or [f"it ended with code {made.returncode}"]
            raise UserError(f"{self.params_key}: reasoning_gym: {self.dataset}: {said[-1]}. Check `dataset` and `config`.")
        return [
            Problem(f"{self.dataset}/{split}/{place}", question, "" if answer is None else str(answer), subject=self.dataset)
            for place, (question, answer) in enumerate(map(json.loads, made.stdout.splitlines()), start)
        ]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        """Verify with the data set's own ``score_answer``: 0 if that fails, NaN if it runs out of time.

        Raises:
            UserError: the library makes another entry than when the problem was made.
        """
        require_extra("reasoning_gym", EXTRA, f"{self.params_key}:")
        entries = [json.dumps([self.made_of, int(problem.id.rpartition("/")[2]), problem.question]) for problem in problems]
        verdicts = _scorer().verdicts(list(zip(answers, entries, strict=True)))
        for problem, verdict in zip(problems, verdicts, strict=True):
            if verdict.equal == OTHER_QUESTION:
                raise UserError(
                    f"{self.params_key}: problem {problem.id} is not what it was when the dataset was made. Run the stage "
                    f"again: `dvc repro -f -s dataset@{self.params_key.removeprefix('tasks.')}`."
                )
        return [math.nan if verdict.timed_out else float(verdict.equal) for verdict in verdicts]

    def documents(  # type: ignore[override]
        self, seed: int, r1_zero_share: Share = 0.5, complete_form_share: Share = 0.15, guess_share: Share = 0.5
    ) -> Iterator[tuple[str, str]]:
        """Yield training questions with answers without end. The data sets have no steps of solutions.

        Args:
            r1_zero_share: share of documents with the r1_zero prompt.
            complete_form_share: share of these that end in the form that the reward requires.
            guess_share: share of documents with the answer to another question.
        """
        rng = random.Random(f"documents {seed}")
        asked = {layout_free(problem.question) for problem in self.problems("validation")}
        problems = [problem for problem in self.problems("train") if layout_free(problem.question) not in asked]
        while True:
            problem = rng.choice(problems)
            answer = (rng.choice(problems) if rng.random() < guess_share else problem).ground_truth
            yield document(rng, problem.question, "", answer, complete_form_share if rng.random() < r1_zero_share else None)


@cache
def _scorer() -> GraderProcess:
    return GraderProcess("reasoning_gym_task:score", TIME_LIMIT_S)


# --------------------------------------------------------------------------------------------- in the worker processes


def score(answer: str, asked: str) -> float:
    """Score an answer with the data set's own ``score_answer``.

    Args:
        asked: JSON of three values: the first argument of :func:`_entry`, the index of the entry, and its question.
    """
    made_of, index, question = json.loads(asked)
    entry = _entry(made_of, index)
    return float(_data_set(made_of).score_answer(answer, entry)) if entry["question"] == question else OTHER_QUESTION


@lru_cache(maxsize=16)
def _data_set(made_of: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(**json.loads(made_of))


@lru_cache(maxsize=256)  # the responses of a group need the same entry
def _entry(made_of: str, index: int) -> Any:
    """Make an entry of the data set that is described by JSON of its ``name`` and configuration, with ``size`` and ``seed``."""
    return _data_set(made_of)[index]


def main(made_of: str, first: int, end: int) -> None:
    """Print question and answer of the entries from ``first`` to ``end`` (exclusive), one line of JSON each."""
    for index in range(first, end):
        with redirect_stdout(sys.stderr):  # some generators print
            entry = _entry(made_of, index)
        print(json.dumps([entry["question"], entry["answer"]]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
