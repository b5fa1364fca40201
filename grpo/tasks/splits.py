"""Separation of training and validation questions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from grpo.common.errors import UserError
from grpo.common.records import Problem

_LAYOUT = re.compile(r"(?<!\\)\\[,!]|\s+")
_SHOWN = 5


def separate(
    train: list[Problem],
    validation: list[Problem],
    drop_overlap: bool,
    remedy: str = "Set `drop_overlap: true`",
    also: Sequence[Problem] = (),
) -> tuple[list[Problem], list[Problem], list[str]]:
    r"""Check that ids are unique and that the two splits share no question.

    Questions are compared without white space, ``\,``, ``\!`` and case, in which copies of a question often differ.

    Args:
        drop_overlap: remove shared questions from ``train`` instead of refusing them.
        remedy: how to have them removed, for the message.
        also: problems of further evaluation sets, whose questions are held out too.

    Returns:
        train, validation, and the ids that were removed from train.

    Raises:
        UserError: an id occurs twice, the splits share a question and ``drop_overlap`` is false, or nothing is left
            to train on.
    """
    twice = [id_ for id_, count in Counter(problem.id for problem in (*train, *validation)).items() if count > 1]
    if twice:
        raise UserError(f"ids occur more than once: {_first(twice)}. Make them unique in the source files.")
    held_out = {layout_free(problem.question) for problem in (*validation, *also)}
    shared = [problem.id for problem in train if layout_free(problem.question) in held_out]
    if shared and not drop_overlap:
        where = f"the validation set{' or in evaluation.also' * bool(also)}"
        raise UserError(
            f"{len(shared)} questions of the training set are also in {where}: {_first(shared)}. "
            f"{remedy} to leave them out of training, or remove them from one of the source files."
        )
    dropped = set(shared)
    kept = [problem for problem in train if problem.id not in dropped]
    if not kept:
        raise UserError("every training question is also a validation question. Is the same data given for both splits?")
    return kept, validation, shared


def layout_free(question: str) -> str:
    """Normalize a text by removing layout and case, in which copies often differ."""
    return _LAYOUT.sub("", question).casefold()


def _first(ids: list[str]) -> str:
    return ", ".join(ids[:_SHOWN]) + (f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else "")
