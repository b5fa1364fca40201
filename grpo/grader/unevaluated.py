r"""Detection of answers that equal the truth without answering: unevaluated arithmetic, and copies from the question.

If the truth is a number, ``123*456``, ``2+2``, ``\frac{3\cdot 4}{2}`` and ``\sum_{k=1}^{10}k`` are unevaluated. Powers, roots,
fractions, factorials, binomials, functions and their multiples (``2^3\cdot 3``, ``2\pi``) are evaluated. For any truth, an
expression that stands in the question is a copy, unless the truth has the same spelling.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from grpo.grader.expression import Node, operands, parse, variables
from grpo.grader.grader import equal_readings
from grpo.grader.normalise import normalise, unwrap_text
from grpo.grader.quantity import exact_value, split_unit
from grpo.grader.split import parts_of, split_equations
from grpo.grader.words import number_word

_OPERATOR = re.compile(r"[-+*/^!<>=|√·×⋅∙÷−⁄²³]|\\[A-Za-z]|(?<=[\d)])\(")
_TIMES = re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|\*")
_MAX_COPIED = 300
_PLAIN = frozenset(("num", "div", "neg"))


def counts_as_answer(answer: str, truth: str, question: str = "") -> bool:
    """Whether an answer that equals the truth is evaluated and not copied from the question."""
    if not _OPERATOR.search(answer.lstrip("+-")):
        return True
    if question and stands_in_question(answer, truth, question):
        return False
    if not all(_is_number(part) for part in parts_of(normalise(truth))[1]):
        return True
    readings = equal_readings(answer, truth)
    return not readings or any(not is_left_to_do(reading) for reading in readings)


def is_left_to_do(reading: str) -> bool:
    """Whether a number (normalised), or one of several, is unevaluated arithmetic of plain numbers."""
    return any(_work_remains(part) for part in parts_of(reading)[1])


def stands_in_question(answer: str, truth: str, question: str) -> bool:
    """Whether an expression (not a plain number) is copied from the question; the spelling of the truth is allowed."""
    text, true_text = _spelling(normalise(answer)), _spelling(normalise(truth))
    name, _, value = text.rpartition("=")
    body = split_unit(text if _OPERATOR.search(name) else value)[0].lstrip("+-")
    if len(text) > _MAX_COPIED or not _OPERATOR.search(body) or text == true_text or _is_in_lowest_terms(body):
        return False
    before = r"(?<![0-9A-Za-z.])" if text[0].isalnum() else ""
    whole = rf"{before}(?<![-+*/^{{(\[]){re.escape(text)}(?![0-9A-Za-z]|\.\d|[-+*/^}})\]!])"
    return re.search(whole, _formulas(question)) is not None


def _work_remains(text: str) -> bool:
    """Whether no side of a chain of equalities is evaluated."""
    sides = [unwrap_text(split_unit(side)[0]) for side in split_equations(text)]
    if any(exact_value(side) is not None for side in sides):
        return False
    trees = [parse(side) for side in sides]
    numbers = [tree for tree in trees if tree is not None and not variables(tree)]
    return bool(numbers) and all(_has_work(tree) for tree in numbers)


def _has_work(tree: Node) -> bool:
    if tree[0] in {"add", "series"} or (tree[0] == "mul" and all(map(_is_plain, operands(tree)))):
        return True
    return any(map(_has_work, operands(tree)))


def _is_plain(tree: Node) -> bool:
    return tree[0] in _PLAIN and all(map(_is_plain, operands(tree)))


def _is_number(text: str) -> bool:
    body = unwrap_text(split_unit(split_equations(text)[-1])[0])
    return exact_value(body) is not None or number_word(body) is not None


def _is_in_lowest_terms(text: str) -> bool:
    match = re.fullmatch(r"(?:\d+ ?)?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<!\d)(\d+)/(\d+))", text)
    if not match:
        return False
    upper, lower = (int(part) for part in match.groups() if part)
    return lower > 1 and Fraction(upper, lower).denominator == lower


@lru_cache(maxsize=1024)
def _formulas(question: str) -> str:
    """A question with its texts and formulas normalised separately."""
    pieces = re.split(r"(?<!\\)\$+|\\[()\[\]]|\s{2,}|\n", question)
    return " ; ".join(_spelling(normalise(piece)) for piece in pieces if piece.strip())


def _spelling(text: str) -> str:
    return re.sub(r" *([^\w ]) *", r"\1", _TIMES.sub("*", text).replace("\\dbinom", "\\binom").replace("\\tbinom", "\\binom"))
