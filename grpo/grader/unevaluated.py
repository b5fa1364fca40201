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
_TEXT = re.compile(r"\\text\{[^{}\d]*\}")  # units within a sum
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
    is_number = all(_is_number(part) for part in parts_of(normal_truth)[1])
    allowed = 0 if is_number else _work_in(normal_truth, False)
    return min(_work_in(reading, is_number) for reading in readings) <= allowed


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


def _work_in(text: str, all_sums: bool) -> int:
    """The operations that a list (normalised) leaves to do; of a chain of equalities, the evaluated side counts.

    ``all_sums``: count every sum, not only those of like terms; for answers to a number.
    """
    count = 0
    for part in parts_of(text)[1]:
        sides = [unwrap_text(_TEXT.sub("", split_unit(side)[0])) for side in split_equations(part)]
        trees = [parse(side) for side in sides if exact_value(side) is None]
        if len(trees) == len(sides):
            count += min(
                (_operations(tree, all_sums) for tree in trees if tree and not (all_sums and variables(tree))), default=0
            )
    return count


def _operations(tree: Node, all_sums: bool) -> int:
    """How often a tree adds, multiplies numbers or roots, or multiplies or raises sums of numbers."""
    factors = operands(tree)
    if tree[0] == "pow" and _is_plain(factors[0], "mul") and factors[1][0] == "num" and factors[1][1] > 1:
        return 0
    if tree[0] == "add":
        terms = list(_terms(tree))
        alike = Counter(map(_kind, terms))
        counts = all_sums or is_rational(tree) or not variables(tree)
        repeated = len(terms) - (1 if all_sums else len(alike)) if counts else 0
        return repeated + sum(_operations(term, all_sums) for term in terms)
    count: int = sum(_operations(factor, all_sums) for factor in factors) + (tree[0] == "series")
    sums = [factor[0] == "add" for factor in factors]
    if tree[0] == "mul" and all(map(_is_plain, factors)):
        return count + 1
    if variables(tree) or not any(sums):
        return count + bool(tree[0] == "mul" and all(factor[0] == "root" and _is_plain(factor[1]) for factor in factors))
    if tree[0] == "div":
        return count + bool(sums[1] and "('const', 'i')" in repr(factors[1]))
    if tree[0] == "pow":
        return count + bool(sums[0] and factors[1][0] == "num")
    return count + bool(tree[0] == "mul" and (all(sums) or ("const", "i") in factors))


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


def _is_plain(tree: Node, further: str = "") -> bool:
    return (tree[0] in _PLAIN or tree[0] == further) and all(_is_plain(part, further) for part in operands(tree))


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
