"""Random answers rewritten in random ways: what is the same number, set or polynomial is equal, and nothing else is.

Truth comes from fractions and integers in this file, never from the grader.
"""

import math
import os
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from grpo.grader.process import is_equal
from grpo.tasks.rewards import question_only_reward_fn, r1_zero_reward_fn

EVERY = 1 if os.environ.get("ALL_EXAMPLES") == "1" else 3  # by default a third of the examples
many = settings(max_examples=150 // EVERY, derandomize=True, database=None, deadline=None)
some = settings(max_examples=80 // EVERY, derandomize=True, database=None, deadline=None)

integers = st.integers(-10_000, 10_000)
small = st.integers(-12, 12)
naturals = st.integers(1, 60)
fractions = st.builds(Fraction, st.integers(-400, 400), st.integers(1, 90))
decimals = st.builds(lambda digits, places: Fraction(digits, 10**places), st.integers(-(10**7), 10**7), st.integers(0, 5))
seeds = st.integers(0, 2**32)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    is_equal("x+1", "1+x")


def equal(answer: str, truth: str) -> bool:
    verdict = is_equal(answer, truth)
    assert not verdict.timed_out, (answer, truth)
    return verdict.equal


def check(answer: str, truth: str, expected: bool) -> None:
    """Both directions, and through both reward functions."""
    assert equal(answer, truth) is expected, (answer, truth)
    assert equal(truth, answer) is expected, (truth, answer)
    reward = float(expected)
    assert r1_zero_reward_fn(f"so </think> <answer> {answer} </answer>", truth)["reward"] == reward, (answer, truth)
    assert question_only_reward_fn(rf"so \boxed{{{answer}}}.", truth)["reward"] == reward, (answer, truth)


def terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def decimal(value: Fraction, extra_zeros: int = 0) -> str:
    """The finite decimal of ``value``, by long division."""
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    digits = str(abs(int(value * 10**places))).rjust(places + 1, "0")
    point = digits[: len(digits) - places] + ("." + digits[len(digits) - places :] if places else "")
    zeros = "0" * extra_zeros if places else ("." + "0" * extra_zeros if extra_zeros else "")
    return ("-" if value < 0 else "") + point + zeros


def repeating(value: Fraction) -> str:
    r"""``value`` with its period under ``\overline``, by long division."""
    whole, rest = divmod(abs(value.numerator), value.denominator)
    digits, seen = "", {}
    while rest and rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, value.denominator)
        digits += str(digit)
    sign = "-" if value < 0 else ""
    if not rest:
        return f"{sign}{whole}.{digits or '0'}"
    return rf"{sign}{whole}.{digits[: seen[rest]]}\overline{{{digits[seen[rest] :]}}}"


def mixed(value: Fraction, form: str) -> str:
    whole, rest = divmod(abs(value.numerator), value.denominator)
    return ("-" if value < 0 else "") + form.format(whole, rest, value.denominator)


def spellings(value: Fraction, pick: random.Random) -> list[str]:
    """Ways to write ``value`` that need no convention about units or percentages."""
    top, bottom = value.numerator, value.denominator
    factor = pick.randint(2, 9)
    sign, size = ("-" if top < 0 else ""), abs(top)
    found = [
        rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{top}}}{{{bottom}}}", rf"\tfrac{{{top}}}{{{bottom}}}", f"{top}/{bottom}",
        rf"{sign}\frac{{{size}}}{{{bottom}}}", rf"\frac{{{top * factor}}}{{{bottom * factor}}}",
        f"{top * factor}/{bottom * factor}",
        rf"\frac{{{-top}}}{{{-bottom}}}", rf"{sign}\frac {{{size}}} {{{bottom}}}", rf"{sign} {size}/{bottom}",
        rf"{sign}\cfrac{{{size}}}{{{bottom}}}",
    ]  # fmt: skip
    if bottom == 1:
        found += [str(top), f"{top}.", f"{top}.0", f"{top}.00", f"{top:,}", f"{top:,}".replace(",", r",\!"), f"({top})"]
        found += [f"{sign}0{size}", f"{top:,}".replace(",", "{,}"), f"{sign}{{{size}}}"]
    if terminates(value):
        found += [decimal(value), decimal(value, 2)]
        if abs(value) < 1 and value:
            found.append(decimal(value).replace("0.", ".", 1))
        found.append(decimal(value / 100) + r"\times 10^2")
        found.append(decimal(value * 1000) + r" \cdot 10^{-3}")
        found.append(decimal(value * 10) + "e-1")
    elif bottom < 60:
        found.append(repeating(value))
    if bottom > 1 and abs(value) > 1:
        found += [mixed(value, r"{}\frac{{{}}}{{{}}}"), mixed(value, "{} {}/{}"), mixed(value, r"{} \dfrac{{{}}}{{{}}}")]
    if size < 10 and bottom < 10:
        found += [rf"{sign}\frac{size}{bottom}", rf"{sign}\frac {size} {bottom}"]
    return found


@many
@given(value=st.one_of(fractions, decimals, integers.map(Fraction)), seed=seeds)
def test_spellings_of_one_number_are_equal(value: Fraction, seed: int) -> None:
    pick = random.Random(seed)
    answer, truth = pick.choice(spellings(value, pick)), pick.choice(spellings(value, pick))
    check(answer, truth, True)


@many
@given(value=st.one_of(fractions, decimals), seed=seeds)
def test_a_number_changed_a_little_is_another(value: Fraction, seed: int) -> None:
    pick = random.Random(seed)
    top, bottom = value.numerator, value.denominator
    others = [value + 1, -value, value + Fraction(1, 10**9), Fraction(top + 1, bottom), Fraction(top, bottom + 1)]
    others += [value * 10, 1 - value]
    other = pick.choice([other for other in others if other != value])
    check(pick.choice(spellings(other, pick)), pick.choice(spellings(value, pick)), False)


@many
@given(value=fractions)
def test_rounded_decimals_are_not_the_fraction(value: Fraction) -> None:
    assume(not terminates(value))
    for places in (2, 5, 12, 30):
        rounded = Fraction(round(value * 10**places), 10**places)
        check(decimal(rounded), rf"\frac{{{value.numerator}}}{{{value.denominator}}}", False)


@many
@given(percent=st.integers(1, 9999), places=st.integers(0, 2), seed=seeds)
def test_a_percentage_is_a_number_of_hundredths(percent: int, places: int, seed: int) -> None:
    pick = random.Random(seed)
    value = Fraction(percent, 10**places)
    text = decimal(value)
    answer = pick.choice(
        [rf"{text}\%", f"{text}%", rf"${text}\%$", f"{text} percent", rf"{text} \%", rf"{text}\text{{ percent}}"]
    )
    assert equal(answer, rf"{text}\%")
    assert equal(decimal(value / 100), rf"{text}\%")
    assert equal(rf"\frac{{{value.numerator}}}{{{100 * value.denominator}}}", rf"{text}\%")
    assert equal(rf"{text}\%", decimal(value / 100))
    for wrong in (value * 10, value + 1, value / 100, value * 100):
        assert not equal(rf"{decimal(wrong)}\%", rf"{text}\%")
    assert not equal(decimal(value / 10), rf"{text}\%")


def joined(values: list[Fraction], pick: random.Random, opening: str, closing: str) -> str:
    separator = pick.choice([",", ", ", " , ", r",\ ", r",\,"])
    spelt = [pick.choice([text for text in spellings(value, pick) if "," not in text and " " not in text]) for value in values]
    if re.search(r"\d,\d{3}(?!\d)", separator.join(spelt)):  # 2/1,100e-1 may be read as 2/1100e-1
        separator = ", "
    return opening + separator.join(spelt) + closing


@many
@given(values=st.lists(st.one_of(small.map(Fraction), fractions), min_size=2, max_size=5), seed=seeds, change=st.integers(0, 3))
def test_tuples_are_equal_place_by_place(values: list[Fraction], seed: int, change: int) -> None:
    pick = random.Random(seed)
    others = list(values)
    if change == 1:
        pick.shuffle(others)
    elif change == 2:
        others[pick.randrange(len(others))] += pick.choice([1, -1, Fraction(1, 7)])
    elif change == 3:
        others.append(values[0])
    opening, closing = pick.choice([("(", ")"), (r"\left(", r"\right)"), (r"\left( ", r" \right)"), (r"\bigl(", r"\bigr)")])
    check(joined(others, pick, opening, closing), joined(values, pick, "(", ")"), others == values)


@many
@given(
    values=st.lists(st.one_of(small.map(Fraction), fractions), min_size=2, max_size=6, unique=True),
    seed=seeds,
    change=st.integers(0, 2),
)
@example(values=[Fraction(x) for x in (0, 1, -1, 2, -2)], seed=170, change=0)
def test_sets_and_lists_are_equal_in_any_order(values: list[Fraction], seed: int, change: int) -> None:
    pick = random.Random(seed)
    others = list(values)
    pick.shuffle(others)
    if change == 1:
        others[0] += pick.choice([1, -1, Fraction(1, 7)])
    elif change == 2 and len(values) > 2:  # of two, one may be left, which is no list
        others.pop()
    brackets = [("", ""), (r"\{", r"\}"), (r"\left\{", r"\right\}"), (r"\{ ", r" \}"), (r"\lbrace ", r" \rbrace")]
    check(
        joined(others, pick, *pick.choice(brackets)), joined(values, pick, *pick.choice(brackets)), set(others) == set(values)
    )


@many
@given(low=small, length=naturals, brackets=st.tuples(st.sampled_from("(["), st.sampled_from(")]")), seed=seeds)
def test_intervals_are_inequalities(low: int, length: int, brackets: tuple[str, str], seed: int) -> None:
    pick = random.Random(seed)
    high = low + Fraction(length, 2)
    signs = ["<" if brackets[0] == "(" else r" \le ", "<" if brackets[1] == ")" else r" \leq "]
    ends = pick.choice(spellings(high, pick)[:6])
    truth = f"{brackets[0]}{low},{high.numerator}/{high.denominator}{brackets[1]}"
    same = [
        f"{low}{signs[0]}x{signs[1]}{ends}", rf"x \in {brackets[0]}{low}, {ends}{brackets[1]}",
        rf"\left{brackets[0]} {low}, {ends} \right{brackets[1]}", rf"\left{brackets[0]}{low},\, {ends}\right{brackets[1]}",
        f"{ends}{signs[1].replace('<', '>').replace('le', 'ge')}x{signs[0].replace('<', '>').replace('le', 'ge')}{low}",
    ]  # fmt: skip
    check(pick.choice(same), truth, True)
    flipped = {"(": "[", "[": "(", ")": "]", "]": ")"}
    flipped_sign = r" \le " if signs[0] == "<" else "<"
    different = [
        f"{flipped[brackets[0]]}{low},{ends}{brackets[1]}", f"{brackets[0]}{low},{ends}{flipped[brackets[1]]}",
        f"{brackets[0]}{low - 1},{ends}{brackets[1]}", rf"x{signs[1]}{ends}", f"{low}<y<{low + 100}",
        rf"{brackets[0]}{low},{ends}{brackets[1]} \cup (1000,1001)", rf"({low},\infty)",
        f"{low}{flipped_sign}x{signs[1]}{ends}", rf"\{{{low},{ends}\}}",
    ]  # fmt: skip
    check(pick.choice(different), truth, False)


@some
@given(ends=st.lists(small, min_size=4, max_size=6, unique=True), seed=seeds)
def test_unions_are_equal_in_any_order(ends: list[int], seed: int) -> None:
    pick = random.Random(seed)
    ends = sorted(ends)[: len(ends) // 2 * 2]
    pieces = [pick.choice("([") + f"{a},{b}" + pick.choice(")]") for a, b in zip(ends[::2], ends[1::2], strict=True)]
    truth = r" \cup ".join(pieces)
    others = pick.sample(pieces, len(pieces))
    check(pick.choice([r"\cup", r" \cup ", "∪"]).join(others), truth, True)
    check(r"\cup".join(others[1:]), truth, False)
    others[0] = others[0].replace(",", ",1", 1) if ",-" not in others[0] else others[0].replace(",-", ",-1", 1)
    check(r"\cup".join(others), truth, False)


@some
@given(rows=st.integers(1, 3), columns=st.integers(1, 3), seed=seeds)
def test_matrices_are_equal_cell_by_cell(rows: int, columns: int, seed: int) -> None:
    pick = random.Random(seed)
    assume(rows * columns > 1)
    cells = [[Fraction(pick.randint(-30, 30), pick.randint(1, 9)) for _ in range(columns)] for _ in range(rows)]

    def spelt(values: list[list[Fraction]], kind: str) -> str:
        texts = [[pick.choice(spellings(value, pick)[:6]) for value in row] for row in values]
        return rf"\begin{{{kind}}}" + r" \\ ".join(" & ".join(row) for row in texts) + rf"\end{{{kind}}}"

    truth = spelt(cells, "pmatrix")
    check(spelt(cells, pick.choice(["pmatrix", "bmatrix"])), truth, True)
    changed = [list(row) for row in cells]
    changed[pick.randrange(rows)][pick.randrange(columns)] += 1
    check(spelt(changed, "pmatrix"), truth, False)
    if rows != columns:
        check(spelt([list(column) for column in zip(*cells, strict=True)], "pmatrix"), truth, False)


def expanded(roots: list[int], lead: int) -> list[int]:
    """Coefficients of lead * (x - roots[0]) * ..., the constant first."""
    coefficients = [lead]
    for root in roots:
        shifted = [0, *coefficients]
        coefficients = [a - root * b for a, b in zip(shifted, [*coefficients, 0], strict=True)]
    return coefficients


def polynomial(coefficients: list[int], pick: random.Random | None = None) -> str:
    """Its terms from the highest power down, or in any order."""
    terms = []
    for power, coefficient in reversed(list(enumerate(coefficients))):
        if coefficient:
            size = "" if abs(coefficient) == 1 and power else str(abs(coefficient))
            letter = "" if power == 0 else "x" if power == 1 else f"x^{power}"
            terms.append(("-" if coefficient < 0 else "+") + size + letter)
    if pick:
        pick.shuffle(terms)
    return "".join(terms).removeprefix("+") or "0"


def factored(roots: list[int], lead: int, pick: random.Random) -> str:
    factors = []
    for root in pick.sample(roots, len(roots)):
        factors.append("x" if root == 0 else f"(x{-root:+d})")
    # An x in front of a bracket is read as a product, and one behind it as well.
    body = "".join(factors)
    return body if lead == 1 else f"-{body}" if lead == -1 else f"{lead}{body}"


@many
@given(roots=st.lists(small, min_size=1, max_size=4), lead=st.sampled_from([1, -1, 2, 3, -5]), seed=seeds)
def test_polynomials_are_their_factors(roots: list[int], lead: int, seed: int) -> None:
    pick = random.Random(seed)
    coefficients = expanded(roots, lead)
    product = factored(roots, lead, pick)
    check(product, polynomial(coefficients), True)
    check(polynomial(coefficients, pick), polynomial(coefficients), True)
    changed = list(coefficients)
    changed[pick.randrange(len(changed))] += pick.choice([1, -1])
    check(product, polynomial(changed), False)
    check(polynomial(changed, pick), polynomial(coefficients), False)


def surds(a: int, b: int, c: int) -> list[str]:
    r"""Spellings of a + b\sqrt{c}."""
    size, root, sign = "" if abs(b) == 1 else str(abs(b)), rf"\sqrt{{{c}}}", "-" if b < 0 else "+"
    return [
        f"{a}{sign}{size}{root}", f"{'-' if b < 0 else ''}{size}{root}{a:+d}", f"{a} {sign} {size} {root}",
        rf"{a}{sign}\sqrt{{{b * b * c}}}", rf"{a} {sign} {abs(b)} \cdot {root}", f"{a}{sign}{abs(b)}*sqrt({c})",
        f"{a}{sign}{size}√{c}", rf"\frac{{{2 * a}{sign}{2 * abs(b)}{root}}}{{2}}", rf"{a}{sign}{abs(b)} \cdot {c}^{{1/2}}",
        f"-({-a}{'+' if b < 0 else '-'}{size}{root})",
    ]  # fmt: skip


@many
@given(
    a=small.filter(bool),
    b=small.filter(bool),
    c=st.sampled_from([2, 3, 5, 6, 7, 10, 11, 13]),
    form=st.integers(0, 9),
    other=st.integers(0, 9),
    change=st.sampled_from([(0, 0, 0), (1, 0, 0), (0, 2, 0), (0, 0, 4), (-1, 1, 0)]),
)
def test_surds(a: int, b: int, c: int, form: int, other: int, change: tuple[int, int, int]) -> None:
    changed = (a + change[0], b + change[1], c + change[2])
    assume(changed[0] and changed[1])
    # c and c + 4 are never squares, and never the same square-free part; so distinct triples are distinct numbers.
    assume(not change[2] or (math.isqrt(changed[2]) ** 2 != changed[2] and changed[2] != 4 * c))
    check(surds(*changed)[form], surds(a, b, c)[other], change == (0, 0, 0))


_TABLES = YAML(typ="safe", pure=True).load(Path(__file__).with_name("tables") / "values.yaml")
WRAPPERS, REWRITES, VALUES, GROUPS = (_TABLES[name] for name in ("wrappers", "rewrites", "values", "groups"))
_CLOSING = {r"\left(": r"\right)", r"\bigl(": r"\bigr)", r"\left[": r"\right]", r"\left\{": r"\right\}"}


def wrapped(text: str, how: int) -> str:
    """``text`` in the wrapper or with the rewrite of this number: what cannot change its meaning."""
    if how < len(WRAPPERS):
        return WRAPPERS[how].replace("@", text)
    old, new = REWRITES[how - len(WRAPPERS)]
    if new not in _CLOSING:
        return text if old == "x" and "\\" in text else text.replace(old, new)
    # Every opening bracket needs its own kind of closing one, which a half-open interval does not have.
    closing = {"(": ")", "[": "]", r"\{": r"\}"}[old]
    return text.replace(old, new).replace(closing, _CLOSING[new]) if text.count(old) == text.count(closing) else text


WAYS = range(len(WRAPPERS) + len(REWRITES))


@settings(max_examples=800, derandomize=True, database=None, deadline=None)
@given(
    answer=st.sampled_from(VALUES),
    truth=st.sampled_from(VALUES),
    wrapper=st.sampled_from(range(len(WRAPPERS))),
    rewrite=st.sampled_from(range(len(WRAPPERS), len(WAYS))),
)
def test_wrappers_change_no_verdict(answer: str, truth: str, wrapper: int, rewrite: int) -> None:
    text = wrapped(wrapped(answer, rewrite), wrapper)
    assert equal(text, truth) is equal(answer, truth), (text, answer, truth)


# Conventions that depend on which side is the truth: a unit that only one side states, percentages, x = 5, chains.
_ONE_WAY = {r"25\%", r"60^\circ", r"5\text{ cm}", r"\$5", "x=5"}


def test_plain_values_are_equal_within_their_group_only() -> None:
    group: dict[str, Any] = {value: value for value in VALUES}
    for number, values in enumerate(GROUPS):
        group.update(dict.fromkeys(values, number))
    plain = [value for value in VALUES if value not in _ONE_WAY]
    for answer in plain:
        for truth in plain:
            assert equal(answer, truth) is (group[answer] == group[truth]), (answer, truth)
