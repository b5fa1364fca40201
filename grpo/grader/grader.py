r"""Decision whether an answer equals the ground truth: parse first, words last.

Both are normalised and read as mathematics: numbers, lists, tuples, intervals, equations, matrices, and quantities with
units. Numbers are compared as exact fractions, and nothing else decides them; other expressions by their values
(:mod:`grpo.grader.numeric`). Texts that are no mathematics are compared as words. Only LaTeX that this cannot read goes to
computer algebra (:mod:`grpo.grader.symbolic`).

Conventions:

- Units count only if both sides state one, as does the modulus of ``2 \pmod{7}``; two units of the same kind are converted.
- ``2\frac{1}{2}`` is a mixed number. A decimal equals only its exact value. A percentage equals its number and its fraction.
- A bare comma list equals a set, in any order; elements in braces count once; the order of a tuple counts. {5} may answer 5,
  but as an element of a set it is another one. Named values equal a bare list in the order of the text or of the names.
- A number in base b equals only the same digits, with the same base or with none; in base 10 also the plain number.
- An inequality of x, ``f(x)`` or ``|z|`` may answer an interval. Overlapping conditions joined by commas must hold together.
- The sides of ``a \approx b`` must agree in the digits of b; then a counts. Of ``x \approx b``, b counts.
- Letters are a product, and their case counts, unless they are a word. A letter before a bracket with a number or another
  letter is a function, before a sum a factor.
- Variables are real, but natural in factorials, binomials and bounds of sums (n, m and k also in floors).
- Equations are equal up to a factor, with denominators cleared.
- The order counts in products of matrices with an inverse, and in vector products.

A chain of equalities counts only if all its sides equal the truth: ``6(7) = 42`` is right for 42, ``7 = 8`` not for 8. Steps of
work around an answer are not read. Several boxes joined by "and" are a list.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain

from grpo.common.errors import UserError
from grpo.grader.compare import Comparison, NeedsAlgebra, T
from grpo.grader.expression import parse
from grpo.grader.extract import without_boxes
from grpo.grader.normalise import half_width, normalise, without_stray_delimiters
from grpo.grader.quantity import exact_value, split_unit
from grpo.grader.symbolic import parses, symbolically_equal
from grpo.grader.values import Effort
from grpo.grader.words import based, choice, restated, sentence_value, spelt_out

MAX_ANSWER_LENGTH = 2000  # characters; a longer answer is equal only if identical
_CHEAP_EFFORT = 4_000.0
_FULL_EFFORT = 150_000.0
_READING_EFFORT = 20_000.0

_LOG = logging.getLogger(__name__)

_INTEGER = re.compile(r"-?[0-9]{1,300}")
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2}")
_SYMBOLS = frozenset((r"\infty", r"-\infty", r"+\infty", r"\emptyset", r"\ldots", r"\mathbb{R}", r"\mathbb{Z}", r"\{\}"))
_GEOMETRIC = re.compile(r"\\(?:overline|overleftrightarrow|triangle|angle|overrightarrow|odot)(?![A-Za-z])|\\pmod\{\d+\}")
_PROSE = re.compile(r"[A-Za-z][A-Za-z0-9 ,.'-]*")


def cheap_verdict(answer: str, truth: str) -> bool | None:
    r"""Whether ``answer`` equals ``truth`` (both without ``\boxed{}``); None if only computer algebra can decide.

    Exact and deterministic, and takes at most a few milliseconds for any strings. Imports no computer algebra and never raises.
    An empty answer equals nothing.
    """
    try:
        return _verdict(answer, truth, None, _CHEAP_EFFORT)
    except NeedsAlgebra:
        return None


def full_verdict(answer: str, truth: str) -> bool:
    """Decide with computer algebra, which has no limit of time or memory: call it in a process that may be killed."""
    return _verdict(answer, truth, symbolically_equal, _FULL_EFFORT)


def is_equivalent(answer: str, ground_truth: str) -> bool:
    """Decide by :func:`cheap_verdict`, else by :func:`full_verdict` in this process, without a time limit; for tests."""
    verdict = cheap_verdict(answer, ground_truth)
    return full_verdict(answer, ground_truth) if verdict is None else verdict


def check_ground_truth(ground_truth: str) -> None:
    """Check that answers can be compared with this ground truth.

    Raises UserError if it is empty, too long or unreadable, or its braces do not match.
    """
    if _INTEGER.fullmatch(ground_truth):
        return
    normal = _normal_truth(half_width(ground_truth[:MAX_ANSWER_LENGTH]))
    if not any(character.isalnum() for character in normal):
        raise UserError(f"the ground truth {ground_truth!r} is empty. Correct it or remove the row.")
    if len(ground_truth) > MAX_ANSWER_LENGTH:
        raise UserError(f"the ground truth has {len(ground_truth)} characters. It must be a short answer; remove the row.")
    bare = re.sub(r"\\.", "", ground_truth)
    if bare.count("{") != bare.count("}"):
        raise UserError(f"the braces of the ground truth {ground_truth!r} do not match. Correct it or remove the row.")
    # Functions by cases are not read: they equal their own spelling.
    if "cases}" not in normal and not _Reading(None, Effort(_READING_EFFORT)).same(normal, normal):
        raise UserError(f"the ground truth {ground_truth!r} cannot be read as an answer. Correct it or remove the row.")


class _Reading(Comparison):
    """Comparison of a ground truth with itself that is true if numbers, words, lists, relations and expressions can be read."""

    def spelt_alike(self, answer: str, truth: str) -> bool:
        return False

    def assignments(self, answer: str, truth: str) -> bool | None:
        return None

    def in_any_order(self, left: list[T], right: list[T], equal: Callable[[T, T], bool]) -> bool:
        return all(equal(part, part) for part in left)

    def expression(self, answer: str, truth: str) -> bool:
        if exact_value(answer) is not None or answer in _SYMBOLS or _PROSE.fullmatch(answer):
            return True
        bare = _GEOMETRIC.sub("", answer).replace("\\equiv", "-")
        if parse(answer) is not None or (bare != answer and self.within(2).same(bare, bare)):
            return True
        return self.by_algebra(answer, truth)

    def by_algebra(self, answer: str, truth: str) -> bool:
        return parses(answer)


def _verdict(answer: str, truth: str, algebra: Callable[[str, str], bool] | None, effort: float) -> bool:
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(truth):
        return int(answer) == int(truth)
    if len(answer) > MAX_ANSWER_LENGTH or len(truth) > MAX_ANSWER_LENGTH:
        return answer.strip() == truth.strip() != ""
    if answer == truth and any(map(str.isdigit, answer)):
        return True
    try:
        return any(True for _ in _equal_readings(answer, truth, Comparison(algebra, Effort(effort))))
    except Exception:
        # One odd answer must not end a run of many hours; the log shows the defect.
        _LOG.warning("could not compare %r with %r: counted as wrong", answer, truth, exc_info=True)
        return False


def equal_readings(answer: str, truth: str) -> list[str]:
    """The readings (normalised) of an answer that equal the truth, without computer algebra."""
    readings: list[str] = []
    with contextlib.suppress(NeedsAlgebra):
        readings.extend(_equal_readings(answer, truth, Comparison(None, Effort(_CHEAP_EFFORT))))
    return readings


def _equal_readings(answer: str, truth: str, comparison: Comparison) -> Iterator[str]:
    """Yield the readings of an answer that equal the truth: as it is, its sentence's value, its conclusion, its choice.

    Raises NeedsAlgebra: after all other readings, if only computer algebra can decide one.
    """
    answer, truth = without_stray_delimiters(without_boxes(half_width(answer))), half_width(truth)
    normal_truth = _normal_truth(truth)
    value = sentence_value(answer)
    readings = [answer] if value is None else [value, answer]
    chosen = choice(value or answer)
    true_choice = choice(truth)
    if chosen and true_choice and chosen[1] and true_choice[1]:  # (C) 13 does not answer (C) 12
        readings = [chosen[1]] if chosen[0] == true_choice[0] else []
    elif chosen:
        readings = [*chosen, *readings]
    if true_choice:
        by_letter = (chosen is not None and not chosen[1]) or len(normalise(answer).strip("()")) == 1
        normal_truth = true_choice[0] if by_letter else normalise(true_choice[1])
    if re.search(r"\d,\d", answer) and based(normal_truth):
        return  # 58,500 is a decimal number
    open_question = False
    is_worded = _WORD.search(answer) or "(" in answer
    in_words = (text for source in (answer, value or "") for text in restated(source)) if is_worded else ()
    for reading in chain(dict.fromkeys(readings), in_words):
        normal = normalise(reading)
        try:
            if comparison.same(normal, normal_truth):
                yield normal
        except NeedsAlgebra:
            open_question = True
    if open_question:
        raise NeedsAlgebra


@lru_cache(maxsize=4096)
def _normal_truth(truth: str) -> str:
    """The normalised truth: the mathematics in a sentence such as "Solution is: $x=4$", and number words as digits."""
    stated = sentence_value(truth) if _WORD.search(truth) else None
    if stated and not truth.lstrip("$ ").startswith(stated.lstrip("$ ")) and (not _WORD.search(stated) or stated.istitle()):
        return normalise(stated)
    spelt = spelt_out(truth)
    in_digits = spelt and exact_value(split_unit(normalise(spelt))[0]) is not None
    return normalise(spelt if spelt and in_digits else truth)
