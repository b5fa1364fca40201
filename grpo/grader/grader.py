r"""Does an answer equal the ground truth?

The answer and the truth are normalised, split into their parts (lists, tuples, intervals, unions, equations, matrices), and
the parts compared exactly as fractions wherever both are plain numbers: then nothing else has a say. Words, choice letters,
numbers with a base, times and ratios are compared as they are spelt. Other expressions are compared by their values
(:mod:`grpo.grader.numeric`). Only what that cannot read goes to computer algebra (:mod:`grpo.grader.symbolic`).

Conventions where taste is possible: units count only if both sides state one, and are converted where both measure the
same; ``2\frac{1}{2}`` is a mixed number; a bare comma list equals a set, in any order; a tuple's order counts; a number in
base b equals only the same digits, with the same base or with none stated; a percentage equals its number and its fraction;
an interval may be answered as an inequality, of x, ``f(x)`` or ``|z|``; of an answer ``a \approx b`` the exact side counts;
a decimal equals only what it equals exactly. Variables are real, but natural in factorials, binomials and bounds of sums (n, m
and k in floors too). Equations are equal up to a factor, with denominators cleared. In braces an element counts once. A general
solution may number its values otherwise if it says ``k \in \mathbb{Z}``; conditions joined by commas hold together where they
overlap. Of matrices with an inverse and of vector products the order counts.

Of work that is shown (:mod:`grpo.grader.working`): a chain of equalities counts only if all its sides equal the truth, as far
as they have a value: ``7 x 4 x 2 = 56`` is right for 56, ``7 x 4 x 2 = 57`` for nothing, ``7 = 8`` not for 8; in
``A = bh = 6(4) = 24`` the name and bh have none. A text counts for what it concludes at its end ("..., hence n = 41."), if its
steps do not contradict it or one another, and hold no word of denial or doubt. Several boxes joined by "and" are a list.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain

from grpo.common.errors import UserError
from grpo.grader.compare import Comparison, NeedsAlgebra
from grpo.grader.extract import without_boxes
from grpo.grader.normalise import half_width, normalise, unwrap_text, without_stray_delimiters
from grpo.grader.quantity import exact_value, split_unit
from grpo.grader.readable import is_readable
from grpo.grader.symbolic import symbolically_equal
from grpo.grader.values import Effort
from grpo.grader.words import choice, digits_without_base, restated, sentence_value, spelt_out
from grpo.grader.working import captioned, conclusion

MAX_ANSWER_LENGTH = 2000  # characters; above, only an identical answer is equal
_CHEAP_EFFORT = 4_000.0
_FULL_EFFORT = 150_000.0

_LOG = logging.getLogger(__name__)

_INTEGER = re.compile(r"-?[0-9]{1,300}")
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2}")
_BASE = re.compile(r"_|base")


def cheap_verdict(answer: str, truth: str) -> bool | None:
    r"""Whether ``answer`` states the same as ``truth`` (both without ``\boxed{}``), or None if only computer algebra can tell.

    Exact and deterministic, in at most a few milliseconds whatever the strings hold. Imports no computer algebra and never
    raises. An empty answer equals nothing.
    """
    try:
        return _verdict(answer, truth, None, _CHEAP_EFFORT)
    except NeedsAlgebra:
        return None


def full_verdict(answer: str, truth: str) -> bool:
    """The same with computer algebra, which knows no limit of time or memory: call it in a process that may be killed."""
    return _verdict(answer, truth, symbolically_equal, _FULL_EFFORT)


def is_equivalent(answer: str, ground_truth: str) -> bool:
    """:func:`cheap_verdict`, else :func:`full_verdict` here: for tests and worker processes, without a limit of time."""
    verdict = cheap_verdict(answer, ground_truth)
    return full_verdict(answer, ground_truth) if verdict is None else verdict


def check_ground_truth(ground_truth: str) -> None:
    """Check that an answer can be compared with this ground truth at all.

    Raises:
        UserError: it is empty or too long, its braces do not match, or nothing can read it.
    """
    if _INTEGER.fullmatch(ground_truth):
        return
    normal = _normal_truth(ground_truth[:MAX_ANSWER_LENGTH])
    if not any(character.isalnum() for character in normal):
        raise UserError(f"the ground truth {ground_truth!r} is empty. Correct it or remove the row.")
    if len(ground_truth) > MAX_ANSWER_LENGTH:
        raise UserError(f"the ground truth has {len(ground_truth)} characters. A short answer is needed; remove the row.")
    bare = re.sub(r"\\.", "", ground_truth)
    if bare.count("{") != bare.count("}"):
        raise UserError(f"the braces of the ground truth {ground_truth!r} do not match. Correct it or remove the row.")
    if not is_readable(normal):
        raise UserError(f"the ground truth {ground_truth!r} cannot be read as an answer. Correct it or remove the row.")


def _verdict(answer: str, truth: str, algebra: Callable[[str, str], bool] | None, effort: float) -> bool:
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(truth):
        return int(answer) == int(truth)
    if len(answer) > MAX_ANSWER_LENGTH or len(truth) > MAX_ANSWER_LENGTH:
        return answer.strip() == truth.strip() != ""
    try:
        return any(True for _ in _equal_readings(answer, truth, Comparison(algebra, Effort(effort))))
    except Exception:
        # A run of many hours must not end over one odd answer; the log keeps the defect visible.
        _LOG.warning("could not compare %r with %r: counted as wrong", answer, truth, exc_info=True)
        return False


def equal_readings(answer: str, truth: str) -> list[str]:
    """The readings (normalised) of an answer that equal the truth, as far as no computer algebra is needed."""
    readings = []
    with contextlib.suppress(NeedsAlgebra):
        for reading in _equal_readings(answer, truth, Comparison(None, Effort(_CHEAP_EFFORT))):
            readings.append(reading)
    return readings


def _equal_readings(answer: str, truth: str, comparison: Comparison) -> Iterator[str]:
    """Of the answer as it stands, what its sentence states or concludes, and the choice it names, what equals the truth.

    Raises:
        NeedsAlgebra: after all others, if only computer algebra can tell of one.
    """
    answer, truth = without_stray_delimiters(without_boxes(half_width(answer))), half_width(truth)
    normal_truth = _normal_truth(truth)
    value = sentence_value(answer)
    readings = [answer] if value is None else [value, answer]
    chosen = choice(value or answer)
    true_choice = choice(truth)
    if chosen:
        readings = [*(chosen if true_choice is None else chosen[:1]), *readings]
    if true_choice:
        by_letter = chosen is not None or len(normalise(answer).strip("()")) == 1
        normal_truth = true_choice[0] if by_letter else normalise(true_choice[1])
    open_question = False
    for reading in chain(dict.fromkeys(readings), _work(answer, comparison)):
        normal = normalise(reading)
        try:
            if comparison.same(normal, normal_truth):
                yield normal
        except NeedsAlgebra:
            open_question = True
        with_base = _BASE.search(normal + normal_truth) and "," not in answer + truth
        if with_base and digits_without_base(unwrap_text(normal), unwrap_text(normal_truth)):
            yield normal
    if open_question:
        raise NeedsAlgebra


@lru_cache(maxsize=4096)
def _normal_truth(truth: str) -> str:
    """The truth, normalised; of a sentence such as "Solution is: $x=4$" the mathematics that it states, and number words
    in digits."""
    stated = sentence_value(truth) if _WORD.search(truth) else None
    if stated and not truth.lstrip("$ ").startswith(stated.lstrip("$ ")) and not _WORD.search(stated):
        return normalise(stated)
    spelt = spelt_out(truth)
    in_digits = spelt and exact_value(split_unit(normalise(spelt))[0]) is not None
    return normalise(spelt if spelt and in_digits else truth)


def _work(answer: str, comparison: Comparison) -> Iterator[str]:
    """Other readings of words, what stands behind a caption, what a text concludes: only where nothing else was right."""
    if _WORD.search(answer):
        yield from restated(answer)
        value = sentence_value(answer)
        if value is not None:
            yield from restated(value)
        yield from filter(None, (captioned(answer), conclusion(answer, comparison.effort)))
