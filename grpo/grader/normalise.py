r"""Canonical spelling of answers.

Normalisation must not change the meaning of an answer. So spaces between digits stay (``1 3/8`` is not ``13/8``), commas are
removed only if they are well-formed thousands separators outside brackets (``(58,500)`` is a pair), and text is never dropped.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from pathlib import Path

_SPELLING = tomllib.loads(Path(__file__).with_name("spelling.toml").read_text(encoding="utf-8"))
_CHARACTERS = str.maketrans({sign: latex for signs, latex in _SPELLING["characters"].items() for sign in signs})
_GREEK = _SPELLING["greek"].split()
_CHARACTERS |= {ord(letter): f"\\{name} " for letter, name in zip(_GREEK[::2], _GREEK[1::2], strict=True)}
_COMMANDS = {name: meaning for meaning, names in _SPELLING["commands"].items() for name in names.split()}
_COMMAND = re.compile(r"\\(?:left|right) ?\.|\\([A-Za-z]+) ?")
# Patterns that begin with a command are for LaTeX only.
_RULES = [
    (re.compile(pattern), replacement, re.match(r"\\\\[^?]", pattern) is not None)
    for pattern, replacement in _SPELLING["rules"]
]
_CODE = [(re.compile(pattern), replacement) for pattern, replacement in _SPELLING["code"]]
# Full-width ASCII of East Asian keyboards; ＼ stays, as it does not begin a command.
_HALF_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5E) if code != 0xFF3C} | {0xFF04: r"\$"}
# Mathematical bold, italic and other letters and digits, which models write instead of LaTeX, and fractions as one character.
_STYLED = re.compile("[\U0001d400-\U0001d7ff]")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_LEVEL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")

# Delimiters around a whole answer: the same on both sides, or opening and closing.
_WRAPPERS = [
    *((mark, mark) for mark in (r"\$", "$$", "$", "**", "__", "*", "_", "`", '"', "'")), (r"\(", r"\)"), (r"\[", r"\]"),
]  # fmt: skip
_WHOLE_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}")
_INLINE_MATH = re.compile(r"(?<![\\\w$])\$(?!\$)((?:[^$\\]|\\.)+?)(?<!\s)\$(?![\w$])")
_BRACKETED_MATH = re.compile(r"(?<![\\\w.)\]])\\[(\[]((?:(?!\\[()\[\]]).)+)\\[)\]](?![\w\\]|\.\d)")
_HEADING = re.compile(r"^#{1,6} +")
_ENVIRONMENT = re.compile(
    r"\\begin ?\{(?:align(?:ed)?|gather(?:ed)?|split|equation|multline|eqnarray|center|displaymath)\*?\}"
    r"((?:(?!\\begin|\\end).)*)\\end ?\{\w+\*?\}"
    r"|(?:\\begin ?\{[dr]?cases\}|\\\{ ?\\begin ?\{array\} ?(?:\{[lcr|]*\})?)"
    r"((?:(?!\\begin|\\end)[^&])*)\\end ?\{\w+\}(?! ?\\\})"
)
_TEXT_MACRO = re.compile(
    r"\\(?:text(?:normal|rm|bf|it|sf|tt)?|mbox|hbox|math(?:rm|it|sf|tt)|(?:mathbf|bm|boldsymbol)(?! ?\{ ?[A-Za-z] ?\})"
    r"|operatorname\*?|emph) ?\{ ?|(?<!\^\{)\\underline ?\{ ?"  # x^{\underline{2}} is x(x-1)
)
_WHOLE_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_AND = re.compile(r"\s*,?\s*\\text\{\s*,?\s*and\s*\}\s*|\s*,?\s+and\s+|,\s*and\s+|\s*\\land(?![A-Za-z])\s*")
_OR = re.compile(r"\s*,?\s*\\text\{\s*,?\s*or\s*\}\s*|\s*,?\s+or\s+|,\s*or\s+|(?<=[)\]])or(?=[(\[])|\s*\\lor(?![A-Za-z])\s*")
_LOGIC = re.compile(r"\\(?:land|lor)(?![A-Za-z])")
_NAMED = re.compile(r"\s*([A-Za-z])(?:_\w+|_\{\w+\})? ?=")
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![A-Za-z])")
# U is a union between two intervals or sets, else a letter.
_UNION = re.compile(r"(?<=[)\]}])\s*(?:\\text\{\s*(?:U|union)\s*\}|U|u|union)\s*(?=[(\[]|\\\{)")
_INTERVAL_OR_SET = re.compile(r"(?:[A-Za-z]\s*\\in\s*)?[(\[][^()\[\]]*,[^()\[\]]*[)\]]|\\\{.*\\\}")
_PERCENT = re.compile(r" ?(?<![A-Za-z\\])(?:pct\.?|per ?cent(?:age)?)(?![A-Za-z])")
_DELIMITER = re.compile(r"(?<!\\)(?:\\[()\[\]]|\$\$?)")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?!,\d)")
_SPACED_THOUSANDS = re.compile(r"([+-]?(?:\\?\$)?)([1-9]\d{0,2}(?: \d{3})+)(?![ \d/]*[\d/]|[ ]*\\frac)")
_ANGULAR = re.compile(r"(?:sin|cos|tan|cot|sec|csc|cis|\be)(?![A-Za-z])")
_DEGREE = re.compile(r" ?(?:\{ ?\})?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))(?: ?\\text\{ ?([CF])\}| ?([CF])(?![A-Za-z]))?")
_UNIT_LETTER = re.compile(r"^([+-]?[\d.,/]+) (m|g|s|h|l|L|N|J|W|V|A|m/s)(\^[23])?$")
_PARENTHESIS = re.compile(r"((?:\\?\$)?[+-]?[\d.,/]*\d) ?\(([A-Za-z][A-Za-z -]*)\)")
_DOUBLED = re.compile(r"(?<!\\)\\\\(?=[A-Za-z]{2})")
_BLANK_LINES = re.compile(r"\n\s*\n")
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2}|\$\$|\\[\[\]]|\\(?:text|begin)|(?:^|\n)\s*[=&<>+]")
_SPACE = re.compile(r"\s+")
# Spaces with a meaning stay: between letters, between digits, before a digit, and before a word.
_LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])|(?<=[0-9]) (?=[A-Za-z](?![A-Za-z]))")
_SIMPLE = re.compile(r"[+-]?\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}")


def normalise(text: str) -> str:
    r"""Return the canonical spelling of an answer; answers with the same spelling are equal.

    Removes layout (``\left``, ``\!``, ``$…$``, outer ``\text{}``, final full stop), converts Unicode signs and ``\dfrac`` to
    their LaTeX equivalents, and converts ``\text{ and }`` and ``\text{ or }`` to commas, or beside inequalities to ``\land``
    and ``\lor``. Never raises.
    """
    if _SIMPLE.fullmatch(text) and text.isascii():
        return text
    if not text.isascii():
        text = _unicode_to_latex(text)
    if len(lines := _BLANK_LINES.split(text.strip())) > 1 and not _PROSE.search(text):
        text = ", ".join(lines)
    # White space is collapsed before and after, as patterns with several \s* take cubic time on long runs of it.
    text = _DOUBLED.sub(r"\\", text) if "\\\\" in text and "\\begin" not in text else text  # as JSON writes a backslash
    text = _unwrap(without_markup(_SPACE.sub(" ", text)))
    is_latex = "\\" in text
    if is_latex:
        text = _TEXT_MACRO.sub(r"\\text{", text)
        text = _COMMAND.sub(lambda match: _COMMANDS.get(match[1] or "left", match[0]), text)
        text = _ENVIRONMENT.sub(lambda match: _joined_rows(match[1] or match[2] or ""), text)
        if "\\\\" in text and "\\begin" not in text:
            text = re.sub(r" ?,? ?\\\\ ?(?=[^ ])", ", ", text)
    if "(" in text or "j" in text or "I" in text:
        text = _code_to_latex(text)
        is_latex = is_latex or "\\" in text
    if "pct" in text or "cent" in text:
        text = _PERCENT.sub(" percent", text)
    for pattern, replacement, needs_latex in _RULES:
        if is_latex or not needs_latex:
            text = pattern.sub(replacement, text)
            is_latex = is_latex or "\\" in text
    if "\\circ" in text and not _ANGULAR.search(text):
        text = _DEGREE.sub(lambda match: f"\\text{{degree {match[1] or match[2] or ''}".rstrip() + "}", text)
    text = _PARENTHESIS.sub(r"\1\\text{ \2}", text) if text.endswith(")") else text
    text = _unwrap(text.rstrip(" \t\n.,;:"))
    pieces = _UNION.split(text) if "U" in text or "u" in text else []
    if len(pieces) > 1 and all(_INTERVAL_OR_SET.fullmatch(piece.strip()) for piece in pieces):
        text = "\\cup ".join(pieces)
    if not re.search(r"[(\[]|\\\{", text):
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
        text = _SPACED_THOUSANDS.sub(lambda match: match[1] + match[2].replace(" ", ""), text, count=1) if " " in text else text
    text = _connectives(_SPACE.sub(" ", text))
    text = _UNIT_LETTER.sub(r"\1\\text{\2}\3", text)
    text = _LOOSE_SPACE.sub("", text.strip())
    return text.rstrip(".,;")


def half_width(text: str) -> str:
    """Convert full-width digits, letters and signs to ASCII; digits of other scripts stay."""
    return text if text.isascii() else text.translate(_HALF_WIDTH)


def without_stray_delimiters(text: str) -> str:
    r"""Remove remains of broken mathematics: a backslash at the end, ``\(`` without its end, ``$9.\]``.

    A ``$`` before or after a number is money.
    """
    text = text.strip()
    if text.endswith("\\"):
        text = text.removesuffix("\\").removesuffix("\\").rstrip()
    marks = list(_DELIMITER.finditer(text)) if "$" in text or "\\" in text else []
    if not 1 <= len(marks) <= 2:
        return text
    first, last = marks[0], marks[-1]
    opens = first.group() in {r"\(", r"\[", "$", "$$"} and text[: first.start()].strip() == ""
    closes = last.group() in {r"\)", r"\]", "$", "$$"} and text[last.end() :].strip(" .,;") == ""
    if len(marks) == 2:
        pair = first.group() + last.group()
        broken = opens and closes and pair not in {r"\(\)", r"\[\]", "$$", "$$$$"}
        return text[first.end() : last.start()].strip() if broken else text
    if opens and (first.group() != "$" or not re.match(r"\s*[\d.]", text[first.end() :])):
        return text[first.end() :].strip()
    if closes and not opens:
        body = text[: last.start()].strip()
        return body + r"\$" if last.group() == "$" and re.fullmatch(r"[+-]?[\d.,]*\d", body) else body
    return text


def without_markup(text: str) -> str:
    """Remove heading marks and delimiters of mathematics inside a text."""
    text = _HEADING.sub("", text)
    if "\\(" in text or "\\[" in text:
        text = _BRACKETED_MATH.sub(r"\1", text)
    return _INLINE_MATH.sub(r"\1", text) if "$" in text else text


def unwrap_text(text: str) -> str:
    r"""Replace every ``\text{x}`` of a normalised text by x."""
    return _WHOLE_TEXT.sub(r"\1", text).strip() if "\\text" in text else text


def _unicode_to_latex(text: str) -> str:
    text = _VULGAR.sub(lambda match: r"\frac{" + unicodedata.normalize("NFKC", match[0]).replace("⁄", "}{") + "}", text)
    text = _STYLED.sub(lambda match: unicodedata.normalize("NFKC", match.group()), text)
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match.group().translate(_LEVEL) + "}", text)
    text = _SUBSCRIPT.sub(lambda match: "_{" + match.group().translate(_LEVEL) + "}", text)
    return text.translate(_CHARACTERS)


def _code_to_latex(text: str) -> str:
    """Convert calls and constants of Python and sympy."""
    for pattern, replacement in _CODE:
        text = pattern.sub(replacement, text)
    return text[7:-1] if text.startswith("Matrix([[") and text.endswith("])") else text


def _joined_rows(rows: str) -> str:
    """Rows of equations as a list; a row that begins with a sign of relation continues the one before."""
    rows = re.sub(r"\\\\\s*(?=[=<>]|\\(?:le|ge|approx))", "", rows.replace("&", ""))
    return ", ".join(row.strip() for row in rows.split("\\\\") if row.strip())


def _connectives(text: str) -> str:
    """Make "and" and "or" commas; or signs, beside inequalities, in logic, and between values of different names."""
    if not ("and" in text or "or" in text):
        return text
    signs = RELATION.search(text) is not None or ("=" not in text and _LOGIC.search(text) is not None)
    text = _AND.sub(r"\\land " if signs else ",", text)
    pieces = _OR.split(text)
    names = {match[1] for piece in pieces if (match := _NAMED.match(piece))}
    return ("\\lor " if signs or len(names) > 1 else ",").join(pieces)


def _unwrap(text: str) -> str:
    r"""Strip white space and delimiters that enclose the whole answer."""
    while True:
        text = before = text.strip()
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            encloses = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing)
            if encloses and opening not in (inner if len(opening) > 1 else inner.replace(r"\$", "")) and inner[-1] != "\\":
                text = inner.strip()
                break
        if text.startswith("\\"):
            whole = _WHOLE_TEXT.fullmatch(text) or _WHOLE_BOX.fullmatch(text)
            if whole:
                text = whole.group(1)
        if text == before:
            return text
