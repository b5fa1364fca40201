r"""Parser of mathematical expressions, in LaTeX or as typed in code, to a tree of tuples.

It reads numbers, letters, ``+ - * / ^ !``, fractions, roots, binomials, elementary functions, ``\pi``, ``e``, ``i``, degrees,
finite sums and products. Any other text is :class:`Unreadable` as a whole. ``1/2x`` is read from left to right,
``2\frac{1}{3}`` is a mixed number, ``n!!`` a double factorial. A digit after a bracket or an exponent multiplies; after a
letter it does so only as a power (``n2^k``); after a number it is not allowed.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

from grpo.grader.quantity import exact_value
from grpo.grader.words import is_word

Node = tuple[Any, ...]
r"""``("num", Fraction)``, ``("var", name)``, ``("const", name)``, or an operation's name and its operands."""

_MAX_TOKENS = 400
_MAX_DEPTH = 30
_LARGEST_DEGREE = 20

# Longer names first: arcsin before sin.
_WORDS = (
    "arcsinh|arccosh|arctanh|arcsin|arccos|arctan|sinh|cosh|tanh|sqrt|cbrt|sin|cos|tan|cot|sec|csc|log|ln|lg|exp|abs|cis|pi"
)
_CODE = r"a(?:sinh|cosh|tanh|sin|cos|tan)(?=\()"  # a sin x is a product
_FUNCTIONS = frozenset(_WORDS.split("|")) - {"pi"}
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi varphi chi "
    "psi omega hbar Gamma Delta Theta Lambda Sigma Phi Psi Omega ell"
)
GREEK = frozenset(_GREEK_NAMES.split())
_COMMAND_TOKENS = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "lbrack": "[",
    "rbrack": "]", "tbinom": "binom", "dbinom": "binom", "asin": "arcsin", "acos": "arccos", "atan": "arctan", "tg": "tan",
    "ctg": "cot", "arctg": "arctan", "cosec": "csc", "arsinh": "arcsinh", "arcosh": "arccosh", "artanh": "arctanh",
    "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
}  # fmt: skip
_TOKEN = re.compile(
    r"\s*(?:(?P<repeating>\d*\.\d*\\overline\{\d+\})|(?P<number>\d+\.\d+|\.\d+|\d+(?:\.(?![\d(.]))?)|\\(?P<command>[A-Za-z]+)"
    rf"|(?P<word>{_CODE}|{_WORDS})|(?P<letter>[A-Za-z]'{{0,3}})|(?P<sign>\*\*|[-+*/^!_|()\[\]{{}}=,]))"
)
_JOINED = re.compile(rf"({_WORDS})([a-zA-Z])")
_RUN = re.compile(rf"(?<![A-Za-z\\])(?!{_CODE}|(?:[A-Za-z]{{0,2}}(?:{_WORDS}))+[A-Za-z]{{0,2}}(?![A-Za-z]))[A-Za-z]{{2,}}")
# f and g, and a letter before a bracket with only a number or another letter, are functions: I(0), T(n).
_APPLIED = re.compile(
    r"((?:[A-Za-z]'{0,3}|\\[A-Za-z]+)(?:_(?:\w|\{\w+\}))?)(?:\^\{(?:-1|\(\w\))\})?"
    r"\((?!\1\))(?:-?[\d./]+|\\frac\{\d+\}\{\d+\}|[A-Za-z]|\\[a-z]+|[A-Za-z],[A-Za-z])\)"
)
_DERIVATIVE = re.compile(r"\{[\[(]\w+[\])]\}")
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "|": "|"}
_ROUNDED = {"\\lfloor": "floor", "\\lceil": "ceil", "|": "abs"}
_MINUS_ONE: Node = ("neg", ("num", Fraction(1)))


class Unreadable(Exception):
    """A text that this module cannot read as an expression."""


@lru_cache(maxsize=4096)
def parse(text: str) -> Node | None:
    """Parse a normalised text; None if it cannot be read."""
    try:
        parser = _Parser(_tokens(text), {"f", "g"}.union(re.sub("[{}]", "", name) for name in _APPLIED.findall(text)))
        tree = parser.sum_()
        return tree if parser.peek() == "" else None
    except (Unreadable, RecursionError):
        return None


def variables(tree: Node) -> frozenset[str]:
    """Names of the free variables."""
    if tree[0] == "var":
        return frozenset((tree[1],))
    if tree[0] in {"num", "const", "term"}:
        return frozenset()
    if tree[0] == "unknown":  # f(2) is no number
        return frozenset((tree[1] + "()",)).union(*map(variables, tree[2:]))
    if tree[0] == "series":
        return variables(tree[3]) | variables(tree[4]) | (variables(tree[5]) - {tree[2]})
    letters: frozenset[str] = frozenset()
    for part in tree[1:]:
        if isinstance(part, tuple):
            letters |= variables(part)
    return letters


def is_constant(text: str) -> bool:
    """Whether a normalised text is an expression without variables."""
    tree = parse(text)
    return tree is not None and not variables(tree)


def operands(tree: Node) -> list[Node]:
    return [part for part in tree[1:] if isinstance(part, tuple)]


def cleared(tree: Node) -> tuple[Node, Counter[Node]]:
    """The numerator over the least common denominator, and the factors of that: ``xy-8`` and x for ``y-8/x``.

    ``x/x`` stays: it has no value at 0, where x times anything is 0.
    """
    kind, *parts = tree
    if kind not in {"add", "neg", "mul", "div"} or (kind == "div" and parts[1] in _factors(parts[0])):
        return tree, Counter()
    (left, below), (right, below_right) = map(cleared, (parts[0], parts[-1]))
    if kind == "neg":
        return ("neg", left), below
    if kind == "mul":
        return ("mul", left, right), below + below_right
    if kind == "div":
        return _times(left, below_right), below + Counter([right])
    common = below | below_right
    return ("add", _times(left, common - below), _times(right, common - below_right)), common


def _factors(tree: Node) -> list[Node]:
    parts = {"mul": tree[1:], "neg": tree[1:], "pow": tree[1:2]}.get(tree[0], ())
    return [tree, *(factor for part in parts for factor in _factors(part))]


def _times(tree: Node, factors: Counter[Node]) -> Node:
    return reduce(lambda product, factor: ("mul", product, factor), factors.elements(), tree)


def is_rational(tree: Node) -> bool:
    """Whether ``tree`` consists of numbers, variables, ``+ - * /`` and small whole powers."""
    kind, *parts = tree
    if kind == "pow":
        exponent = parts.pop()
        if exponent[0] != "num" or exponent[1] not in range(_LARGEST_DEGREE + 1):
            return False
    return kind in {"num", "var"} or (kind in {"add", "mul", "div", "neg", "pow"} and all(map(is_rational, parts)))


def _tokens(text: str) -> list[str]:
    """Split a text into tokens: numbers start with a digit or a point, commands with a backslash."""
    if any(is_word(run) for run in _RUN.findall(text)):
        raise Unreadable
    tokens: list[str] = []
    position, text = 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match or len(tokens) >= _MAX_TOKENS:
            raise Unreadable
        position = match.end()
        token = match[str(match.lastgroup)]
        if match.lastgroup == "command":
            token = _COMMAND_TOKENS.get(token, token)
            joined = _JOINED.fullmatch(token)
            if joined and token not in GREEK | _FUNCTIONS:  # \sinx
                tokens += ["\\" + joined[1], joined[2]]
            else:
                tokens.append(token if len(token) == 1 else "\\" + token)
        else:
            is_name = match.lastgroup == "word"
            tokens.append("\\" + _COMMAND_TOKENS.get(token, token) if is_name else token.replace("**", "^"))
    return tokens


class _Parser:
    """Recursive descent parser over tokens."""

    def __init__(self, tokens: list[str], functions: set[str]) -> None:
        self.tokens = [*tokens, ""]
        self.functions = functions
        self.at = 0
        self.depth = 0
        self.open_bars = 0
        self.raised_until = 0  # end of the last exponent
        self.subscripted_until = 0
        self.indices: set[str] = set()  # index letters of the enclosing sums and products

    def peek(self) -> str:
        return self.tokens[self.at]

    def take(self, expected: str = "") -> str:
        token = self.tokens[self.at]
        if token == "" or (expected and token != expected):
            raise Unreadable
        self.at += 1
        return token

    def sum_(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise Unreadable
        tree = self.product(signed=True)
        while self.peek() in {"+", "-"}:
            operator = self.take()
            right = self.product(signed=True)
            tree = ("add", tree, right if operator == "+" else ("neg", right))
        self.depth -= 1
        return tree

    def product(self, signed: bool = False) -> Node:
        tree = self.signed_factor() if signed else self.factor()
        while True:
            token = self.peek()
            if token in {"*", "/"}:
                self.take()
                right = self.signed_factor()
                tree = ("mul", tree, right) if token == "*" else ("div", tree, right)
            elif self.starts_factor(token):
                tree = ("mul", tree, self.factor())
            else:
                return tree

    def starts_factor(self, token: str) -> bool:
        """Whether ``token`` may follow a factor as an implicit product."""
        if token == "" or token in "+-*/^!_)]}=,":
            return False
        if token == "|":
            return not self.open_bars
        if token[0].isdigit() or token[0] == ".":
            if token.isdigit() and self.ends_before_digit():
                return True
            raise Unreadable
        return token not in {"\\rfloor", "\\rceil", "\\choose"}

    def ends_before_digit(self) -> bool:
        """Whether a number may follow here as an implicit factor: after 3!, (x+1), x^n, or as the power in n2^k."""
        before = self.tokens[self.at - 1]
        if self.raised_until == self.at:
            return self.tokens[self.at + 1] != "/"  # 2^3 3/4 may mean a mixed number
        if before in {"!", ")"}:
            return True
        if before == "}":
            return self.subscripted_until != self.at
        return before.isalpha() and before not in {"e", "i"} and self.tokens[self.at + 1] == "^"

    def signed_factor(self) -> Node:
        signs = [self.take() for _ in range(2) if self.peek() in {"+", "-"}]  # "--5" is clear, "---5" is not
        tree = self.factor()
        for _ in range(signs.count("-")):
            tree = ("neg", tree)
        return tree

    def factor(self) -> Node:
        return self.postfix(self.base())

    def postfix(self, tree: Node) -> Node:
        while self.peek() in {"^", "!"}:
            if self.take() == "!":
                is_double = self.peek() == "!" and self.take()
                tree = ("factorial2" if is_double else "factorial", tree)
            elif self.peek() == "\\circ" or self.tokens[self.at : self.at + 3] == ["{", "\\circ", "}"]:
                self.at += 1 if self.peek() == "\\circ" else 3
                tree = ("div", ("mul", tree, ("const", "pi")), ("num", Fraction(180)))
            elif tree[0] == "var" and _DERIVATIVE.fullmatch("".join(self.tokens[self.at : self.at + 5])):
                tree = ("var", f"{tree[1]}^({self.tokens[self.at + 2]})")
                self.at += 5
            else:
                tree = ("pow", tree, self.exponent())
                self.raised_until = self.at
        return tree

    def exponent(self) -> Node:
        sign = self.take() if self.peek() in {"+", "-"} else "+"
        digits = self.peek()
        if len(digits) == 2 and digits.isdigit() and "0" not in digits and self.tokens[self.at + 1] == "^":
            self.tokens[self.at : self.at + 1] = [digits[0], "*", digits[1]]  # 2^35^2 is (2^3)(5^2)
        tree = self.base()
        if self.peek() == "^":  # a^b^c is a^(b^c)
            tree = self.postfix(tree)
        return tree if sign == "+" else ("neg", tree)

    def base(self) -> Node:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return self.number(token)
        if token in _CLOSING:
            return self.group(token)
        if token[0].isalpha():
            return self.name(token)
        if token[0] != "\\":
            raise Unreadable
        return self.command(token[1:])

    def number(self, token: str) -> Node:
        value = exact_value(token)
        if value is None:
            raise Unreadable
        if self.peek() == "\\frac" and token.isdigit():
            parts = self.tokens[self.at + 1 : self.at + 7]
            if [*parts[0::3], *parts[2::3]] == ["{", "{", "}", "}"] and parts[1].isdigit() and parts[4].isdigit():
                self.at += 7
                upper, lower = int(parts[1]), int(parts[4])
                if not 0 < upper < lower:
                    raise Unreadable
                value += Fraction(upper, lower)
        return ("num", value)

    def name(self, letter: str) -> Node:
        if self.peek() == "_":
            return self.subscripted(letter)
        if letter in {"e", "i"} and letter not in self.indices:
            return ("const", letter)
        return self.applied(letter)

    def applied(self, name: str) -> Node:
        """A variable, or an unknown function with its arguments."""
        if name in self.functions and self.tokens[self.at : self.at + 2] == ["^", "{"]:  # f^{-1}(2), f^{(n)}(0)
            for length in (6, 7):
                raised = self.tokens[self.at : self.at + length]
                if raised[-2:] == ["}", "("] and raised[2:-2] in (["-", "1"], ["(", *raised[3:4], ")"]):
                    self.at += length - 1
                    name += "".join(raised[:-1])
        if (name.split("^")[0] not in self.functions) or self.peek() != "(":
            return ("var", name)
        self.take()
        arguments = [self.sum_()]
        while self.peek() == ",":
            self.take()
            arguments.append(self.sum_())
        self.take(")")
        return ("unknown", name, *arguments)

    def subscripted(self, name: str) -> Node:
        """A variable, or an unknown term of a sequence, as in a sum over a_k."""
        self.take("_")
        subscript = ""
        if self.peek() == "{":
            self.take()
            while self.peek() != "}":
                subscript += self.take()
        subscript = (subscript + self.take()).rstrip("}")
        self.subscripted_until = self.at
        full = name + "_" + subscript
        return ("term", full) if self.indices.intersection(subscript) else self.applied(full)

    def group(self, opening: str) -> Node:
        """Read the inside of brackets or bars, after the opening one."""
        bars, self.open_bars = self.open_bars, int(opening == "|")
        tree = self.sum_()
        if opening == "{" and self.peek() == "\\choose":
            self.take()
            tree = ("binomial", tree, self.sum_())
        self.take(_CLOSING[opening])
        self.open_bars = bars
        return (_ROUNDED[opening], tree) if opening in _ROUNDED else tree

    def braced(self) -> Node:
        r"""Read an operand of ``\frac``: in braces or, as in ``\frac12``, the next digit, letter or command."""
        if self.peek().isdigit():
            self.tokens[self.at : self.at + 1] = self.peek()
            return ("num", Fraction(self.take()))
        return self.base()

    def command(self, name: str) -> Node:
        if name == "frac":
            return ("div", self.braced(), self.braced())
        if name == "binom":
            return ("binomial", self.braced(), self.braced())
        if name == "sqrt":
            return self.root()
        if name == "vec":
            return self.braced()
        if name == "pi":
            return ("const", "pi")
        if name in _FUNCTIONS:
            return self.function(name)
        if name in GREEK:
            return self.subscripted("\\" + name) if self.peek() == "_" else self.applied("\\" + name)
        if "\\" + name in _CLOSING:
            return self.group("\\" + name)
        if name in {"sum", "prod"}:
            return self.series(name)
        raise Unreadable

    def root(self) -> Node:
        degree: Node = ("num", Fraction(2))
        if self.peek() == "[":
            self.take()
            degree = self.group("[")
        return ("root", self.base(), degree)

    def function(self, name: str) -> Node:
        power = log_base = None
        while self.peek() in {"^", "_"}:
            if self.take() == "^":
                power = self.exponent()
            elif name == "log":
                log_base = self.base()
            else:
                raise Unreadable
        argument = self.argument()
        if name == "cbrt":
            return ("root", argument, ("num", Fraction(3)))
        if power == _MINUS_ONE and log_base is None:
            if name not in {"sin", "cos", "tan", "sinh", "cosh", "tanh"}:
                raise Unreadable  # either 1/\sec x or the inverse function
            return ("arc" + name, argument)
        tree: Node = (name, argument) if log_base is None else ("div", ("ln", argument), ("ln", log_base))
        return tree if power is None else ("pow", tree, power)

    def argument(self) -> Node:
        r"""Read an argument: ``(x)``, ``{x}``, or without brackets, such as ``2x`` in ``\sin 2x \cos x``."""
        if self.peek() in {"(", "[", "{"}:
            return self.group(self.take())
        sign = self.take() if self.peek() == "-" else ""
        tree = self.factor()
        while self.starts_factor(self.peek()) and self.peek() != "(" and self.peek()[1:] not in _FUNCTIONS - {"sqrt"}:
            tree = ("mul", tree, self.factor())
        if self.peek() == "/" and tree[0] != "div":
            raise Unreadable  # \sin x/2 often means \sin(x/2)
        return ("neg", tree) if sign else tree

    def series(self, name: str) -> Node:
        self.take("_")
        self.take("{")
        index = self.take()
        if not (len(index) == 1 and index.isalpha()):
            raise Unreadable
        self.take("=")
        low = self.group("{")
        self.take("^")
        high = self.exponent()
        outer, self.indices = self.indices, self.indices | {index}
        body = self.product()
        self.indices = outer
        return ("series", name, index, low, high, body)
