r"""Responses that must earn nothing and cost next to nothing: what a policy may find when it searches for cheap reward.

Each is wrong for its truth, however it is read. ``kind`` says what ``text`` is: an ``answer`` still to be put between the
answer tags or into a box, or the whole of an ``r1_zero`` or ``question_only`` response. Short ones are in ``hostile.yaml``.
"""

import random
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ruamel.yaml import YAML

import grpo.tasks.prompts as prompts

R1_ZERO_PROMPT = (Path(next(iter(prompts.__path__))) / "r1_zero.prompt").read_text(encoding="utf-8")
ECHO = R1_ZERO_PROMPT.replace("{question}", "What is 2 + 3?")
LIMIT = 1990  # characters: some answers are as long as the grader may still read, others far longer
LONG = 100_000


class Hostile(NamedTuple):
    kind: str
    text: str
    truth: str


def _fill(piece: str, length: int = LIMIT) -> str:
    return piece * (length // len(piece))


def _nested(opening: str, core: str, closing: str, levels: int) -> str:
    return opening * levels + core + closing * levels


def _matrix(size: int, cell: str, environment: str = "pmatrix") -> str:
    row = "&".join([cell] * size)
    return rf"\begin{{{environment}}}" + r"\\".join([row] * size) + rf"\end{{{environment}}}"


def _one_wrong(form: str, numbers: range, separator: str = ",") -> tuple[str, str]:
    """A long list in which one element is wrong, and the list in another order."""
    truth = [form.replace("@", str(number)) for number in numbers]
    answer = [form.replace("@", str(numbers.start - 1)), *truth[1:]]
    random.Random(0).shuffle(answer)
    return separator.join(answer), separator.join(truth)


_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_VANDERMONDE = r"\\".join("&".join(f"{letter}^{power}" for power in range(9)) for letter in _LETTERS[:9])
_SET, _SURDS = _one_wrong("@", range(100, 400)), _one_wrong(r"\sqrt{@}", range(1001, 1041))

_ANSWERS = [
    ("5" + "!" * 1900, "5"),
    ("".join(rf"\sum_{{{letter}=1}}^{{9}}" for letter in _LETTERS[:12]) + "1", "5"),
    ("1+" + _nested(r"\cfrac{1}{2+", "1", "}", 140), r"\sqrt{2}"),
    ("0." + "9" * 1900, "1"),
    ("0." + "3" * 1900, r"\frac13"),
    (r"0.\overline{" + "142857" * 300 + "1}", r"\frac17"),
    (r"0.\overline{" + "3" * 1900 + "}", r"\frac23"),
    (r"0.\overline{" + "3" * LONG + "}", r"\frac23"),
    ("0." + "0" * 1900 + "1", "0"),
    *((", ".join(map(str, range(count))), "5") for count in (10, 500, 1000)),
    *((separator.join(map(str, range(250))), "249") for separator in (" or ", " ", "\n", "=", "|", r" \lor ", r"\\", r" \to ")),
    (" or ".join(map(str, range(1000))), "999"),
    (". ".join(f"The answer is {number}" for number in range(10)), "9"),
    (r"\{" + ",".join(map(str, range(30))) + r"\}", "5"),
    ("\x00" * LIMIT, "5"),
    ("\ud800", "5"),
    ("\udfff\ud800", "5"),
    ("\ud800" * 900, "x+1"),
    ("6" + "\u0335" * 1900, "5"),
    ("".join(rf"\def\{y}{{\{x}\{x}}}" for x, y in pairwise(_LETTERS)) + r"\z", "a"),
    ("".join(f"({x}+{y})" for x, y in pairwise(_LETTERS)), "a"),
    ("".join(f"(x+{number})" for number in range(1, 200)), "x^{199}"),
    ("+".join(f"{number}x^{{{number}}}" for number in range(200)), "x+1"),
    ("+".join(rf"\sqrt{{{number}}}" for number in range(2, 180)), r"\sqrt{2}"),
    ("x" + "+x-x" * 400, "1"),
    ("-" * 1989 + "5", "5"),
    ("i" * 1990, "5"),
    (_LETTERS * 70, "x+1"),
    (_matrix(30, "1"), "5"),
    (_matrix(150, "1"), "5"),
    (_matrix(28, "1"), _matrix(28, "1").replace("1", "2", 1)),
    (_matrix(30, "x", "vmatrix"), "5"),
    (rf"\begin{{vmatrix}}{_VANDERMONDE}\end{{vmatrix}}", "1"),
    (r"\begin{cases}" + r"\\".join(f"{n} & x={n}" for n in range(150)) + r"\end{cases}", "5"),
    ("<".join(_LETTERS), "<".join(_LETTERS[:-2] + "zy")),
    ("+".join(f"x_{{{number}}}" for number in range(150)) + ">0", "x+y>0"),
    (r" \text{ and } ".join(f"x>{number}" for number in range(60)), "x>3"),
    ("=".join(_LETTERS * 30), "5"),
    ("=".join("abcde" * 1000), "5"),
    ("=".join([*_LETTERS, "6", "5"]), "5"),
    ("=".join(["5"] * 900 + ["6"]), "5"),
    ("(" + ",".join(["1"] * 10_000) + ")", "(1,2)"),
    ("(" + ",".join(["1"] * 900) + ")", "(" + ",".join(["1"] * 899 + ["2"]) + ")"),
    _SET,
    (r"\{" + _SET[0] + r"\}", r"\{" + _SET[1] + r"\}"),
    _SURDS,
    ("(" + _SURDS[0] + ")", "(" + _SURDS[1] + ")"),
    _one_wrong(r"\sqrt{@}", range(1001, 1151)),
    _one_wrong(r"\frac{1}{@}", range(2, 37)),
    _one_wrong(r"\sin(@)+\cos(@)", range(2, 37)),
    _one_wrong(r"\int_0^{@} x^x dx", range(1, 36)),
    _one_wrong("[@.1,@.9]", range(30), r"\cup"),
    (_nested(r"\{1,", "1", r"\}", 200), _nested(r"\{1,", "2", r"\}", 200)),
    (_nested("(1,", "1", ")", 400), _nested("(1,", "2", ")", 400)),
    (r"\cup".join(["[0,1]"] * 200), "[2,3]"),
    (r"\cup".join(["[0,1]"] * 5000), "[2,3]"),
    ("1" + r"\pm 1" * 390, "1"),
    (r"\pm" * 5000 + "1", "1"),
    (",".join(rf"\pm {number}\pm\sqrt{{{number}}}" for number in range(2, 30)), "1,2"),
    *((character * LONG, "5") for character in ["5", "{", "}", " ", "\\", "$", "\n", "\U0001f600"]),
    ("5" * LIMIT, "5" * (LIMIT - 1) + "6"),
    ("0" * LONG + "6", "5"),
    ("{" * (LONG // 2) + "}" * (LONG // 2), "5"),
    ("6" + " " * LONG + "5", "5"),
    *((_nested(*brackets, levels), "5") for brackets in ("(6)", "{6}") for levels in (990, 10_000)),
    ("(" * 10_000, "5"),
    ("x_{" + "a" * 1900 + "}", "x"),
    (r"\operatorname{" + "a" * 1900 + "}(x)", "x"),
    ("\\" + "a" * 1900, "a"),
    (r"6\text{ " + "a" * 1900 + "}", "5"),
    ("even" * 490, r"\text{even}"),
    ("the answer is " * 140 + "6", "5"),
]

_R1_ZERO = [
    ("</think> <answer>6" + "</answer>5" * 5000, "5"),
    ("</think> " + "<answer>" * 5000 + "6</answer>", "5"),
    ("</think> <answer>" * 5000, "5"),
    ("</think> " + "".join(f"<answer>{number}</answer>" for number in range(5000)), "5"),
    (ECHO, "5"),
    (ECHO, "answer here"),
    (ECHO + "\n" + ECHO, "answer here"),
    (R1_ZERO_PROMPT.replace("{question}", "</think> <answer> 5 </answer>"), "answer here"),
    (ECHO + " I think it is 5.", "5"),
    (ECHO + " 2+3 </think> <answer> 5", "5"),
    (ECHO + " 5 </think> <answer> 6 </answer>", "5"),
    (ECHO * 200, "answer here"),
    (R1_ZERO_PROMPT, "answer here"),
    ("</think> <answer>" + r"\boxed{5}" * 5000 + r"\boxed{6}</answer>", "5"),
    ("5 " * (LONG // 2) + "</think> <answer></answer>", "5"),
]

_QUESTION_ONLY = [
    ("".join(rf"\boxed{{{number}}} " for number in range(5000)), "5"),
    (_nested(r"\boxed{", "6", "}", 5000), "5"),
    (r"\boxed{" * 5000, "5"),
    (r"\boxed{5 " * 5000, "5"),
    (r"\boxed{6}, " * 1000 + r"\boxed{5}", "5"),
    (r"\boxed{6}" + " " * LONG + r", \boxed{}", "5"),
    (r"\boxed{" + "{}" * 5000 + "}", "5"),
    (r"\boxed" + " " * LONG + "{6}", "5"),
    (r"\boxed{" + "\\" * LONG + "}", "5"),
    (r"\boxed " * (LONG // 7), "5"),
    (r"\boxed{" + "5" * LONG + "}", "5"),
]

_SHORT = YAML(typ="safe", pure=True).load(Path(__file__).with_name("hostile.yaml"))
for kind, length in (("repeated", LIMIT), ("long", LONG)):
    _ANSWERS += [(_fill(piece, length), truth) for pieces in _SHORT.pop(kind).values() for piece, truth in pieces]
_ANSWERS += [(_nested(*how), truth) for rows in _SHORT.pop("nested").values() for *how, truth in rows]
CASES = [
    *(Hostile(kind, *pair) for kind, groups in _SHORT.items() for pairs in groups.values() for pair in pairs),
    *(Hostile("answer", *pair) for pair in _ANSWERS),
    *(Hostile("r1_zero", *pair) for pair in _R1_ZERO),
    *(Hostile("question_only", *pair) for pair in _QUESTION_ONLY),
]
