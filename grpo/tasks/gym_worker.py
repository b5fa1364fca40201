"""The processes in which ``reasoning_gym`` makes entries and scores answers.

They are not the run's own process, for two reasons. Some data sets walk over sets of strings, so that their entries depend on
Python's hash seed, which is fixed here. And some pass what a model answered to ``eval``, so that an answer may hang or fill
the memory: :class:`grpo.grader.pool.GraderPool` calls :func:`score` in workers with limits.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from functools import lru_cache
from typing import Any

import reasoning_gym

OTHER_QUESTION = -1.0  # the score where an entry is not what it was when the problem was made


def score(answer: str, asked: str) -> float:
    """What the data set's own ``score_answer`` gives an answer.

    Args:
        asked: JSON of three values: the data set as :func:`data_set` takes it, the index of an entry, and its question.
    """
    made_of, index, question = json.loads(asked)
    entry = _entry(json.dumps(made_of), index)
    return float(data_set(json.dumps(made_of)).score_answer(answer, entry)) if entry["question"] == question else OTHER_QUESTION


@lru_cache(maxsize=16)
def data_set(made_of: str) -> Any:
    """A data set, by JSON of its ``name`` and of what its configuration takes, ``size`` and ``seed`` included."""
    return reasoning_gym.create_dataset(**json.loads(made_of))


@lru_cache(maxsize=256)  # the responses of a group ask for the same one
def _entry(made_of: str, index: int) -> Any:
    return data_set(made_of)[index]


def main(made_of: str, first: int, end: int) -> None:
    """Print the question and the answer of the entries from ``first`` to before ``end``, a line of JSON each."""
    lines = sys.stdout
    with redirect_stdout(sys.stderr):  # some generators print
        for index in range(first, end):
            entry = _entry(made_of, index)
            print(json.dumps([entry["question"], entry["answer"]]), file=lines)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
