r"""Detection of answers that equal the truth without answering: unevaluated arithmetic, and copies from the question.

If the truth is a number, ``123*456``, ``2+2``, ``\frac{3\cdot 4}{2}`` and ``\sum_{k=1}^{10}k`` are unevaluated. Powers, roots,
fractions, factorials, binomials, functions and their multiples (``2^3\cdot 3``, ``2\pi``) are evaluated. For any truth, an
expression that stands in the question is a copy, unless the truth has the same spelling.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

from grpo.grader.expression import Node, is_rational, operands, parse, variables
from grpo.grader.grader import MAX_ANSWER_LENGTH, equal_readings
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
    if len(answer) > MAX_ANSWER_LENGTH or not _OPERATOR.search(answer.lstrip("+-")):
        return True
    if question and stands_in_question(answer, truth, question):
        return False
    readings = equal_readings(answer, truth)
    if not readings:
        return True
    normal_truth = normalise(truth)
    if all(_is_number(part) for part in parts_of(normal_truth)[1]):
        return any(not is_left_to_do(reading) for reading in readings)
    return min(map(_work_in, readings)) <= _work_in(normal_truth)


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
    return tree[0] in {"add", "series"} or _multiplies(tree) or any(map(_has_work, operands(tree)))


def _multiplies(tree: Node) -> bool:
    return tree[0] == "mul" and all(map(_is_plain, operands(tree)))


def _work_in(text: str) -> int:
    """The operations that a list of expressions leaves to do; of a chain of equalities, the side with the fewest counts."""
    trees = [[parse(unwrap_text(split_unit(side)[0])) for side in split_equations(part)] for part in parts_of(text)[1]]
    return sum(min(_operations(tree) if tree else 0 for tree in sides) for sides in trees)


def _operations(tree: Node) -> int:
    """How often a tree adds like terms, multiplies numbers or roots, or multiplies or raises sums of numbers."""
    found = sum(map(_operations, operands(tree))) if tree[0] != "add" else 0
    if tree[0] == "add":
        terms = list(_terms(tree))
        alike = Counter(_kind(term) for term in terms)
        repeated = alike.total() - len(alike) if is_rational(tree) or not variables(tree) else 0
        return found + sum(map(_operations, terms)) + repeated
    if variables(tree):
        return found
    factors = operands(tree)
    if tree[0] == "pow":
        return found + bool(factors[0][0] == "add" and factors[1][0] == "num")
    if tree[0] == "div":
        return found + bool(factors[1][0] == "add" and "('const', 'i')" in repr(factors[1]))
    if tree[0] != "mul":
        return found
    sums = [factor[0] == "add" for factor in factors]
    return found + bool(
        _multiplies(tree)
        or all(sums)
        or all(factor[0] == "root" and _is_plain(factor[1]) for factor in factors)
        or (any(sums) and ("const", "i") in factors)
    )


def _terms(tree: Node) -> Iterator[Node]:
    for part in operands(tree):
        inner = part[1] if part[0] == "neg" else part
        yield from _terms(inner) if inner[0] == "add" else (inner,)


def _kind(term: Node) -> str:
    r"""A term without its numeric factors: the same for ``2\sqrt{2}`` and ``\frac{\sqrt{8}}{3}``."""
    factors: list[str] = []
    rest = [term]
    while rest:
        part = rest.pop()
        if part[0] in {"mul", "neg"}:
            rest += operands(part)
        elif part[0] == "div" and _is_plain(part[2]):
            rest.append(part[1])
        elif part[0] == "root" and part[1][0] == part[2][0] == "num" and part[2][1] == 2:
            factors.append(f"root {_square_free(part[1][1])}")
        elif not _is_plain(part):
            factors.append(repr(part))
    return " ".join(sorted(factors))


def _square_free(number: Fraction) -> Fraction:
    for root in range(min(int(number) + 1, 100), 1, -1):
        if number % root**2 == 0:
            return _square_free(number / root**2)
    return number


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
