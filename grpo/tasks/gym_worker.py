"""Worker processes in which ``reasoning_gym`` makes entries and scores answers.

They are separate from the run's process for two reasons. Some data sets iterate over sets of strings, so their entries depend
on Python's hash seed, which is fixed here. And some pass a model's answer to ``eval``, so an answer may hang or fill the
memory: :class:`grpo.grader.pool.GraderPool` calls :func:`score` in workers with limits.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from functools import lru_cache
from typing import Any

import reasoning_gym

OTHER_QUESTION = -1.0  # the score if the entry has changed since the problem was made


def score(answer: str, asked: str) -> float:
    """Score an answer with the data set's own ``score_answer``.

    Args:
        asked: JSON of three values: the argument of :func:`data_set`, the index of an entry, and its question.
    """
    made_of, index, question = json.loads(asked)
    entry = _entry(json.dumps(made_of), index)
    return float(data_set(json.dumps(made_of)).score_answer(answer, entry)) if entry["question"] == question else OTHER_QUESTION


@lru_cache(maxsize=16)
def data_set(made_of: str) -> Any:
    """Create a data set from JSON of its ``name`` and its configuration, including ``size`` and ``seed``."""
    return reasoning_gym.create_dataset(**json.loads(made_of))


@lru_cache(maxsize=256)  # the responses of a group need the same entry
def _entry(made_of: str, index: int) -> Any:
    return data_set(made_of)[index]


def main(made_of: str, first: int, end: int) -> None:
    """Print question and answer of the entries from ``first`` to ``end`` (exclusive), one line of JSON each."""
    lines = sys.stdout
    with redirect_stdout(sys.stderr):  # some generators print
        for index in range(first, end):
            entry = _entry(made_of, index)
            print(json.dumps([entry["question"], entry["answer"]]), file=lines)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
