r"""Canonical spelling of answers.

Normalisation must not change the meaning of an answer. So spaces between digits stay (``1 3/8`` is not ``13/8``), commas are
removed only if they are well-formed thousands separators outside brackets (``(58,500)`` is a pair), and text is never dropped.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from grpo.grader.split import top_level

_SYMBOLS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "⁄": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "º": r"^\circ ", "≤": r"\le ", "≥": r"\ge ",
    "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ",
    "≈": r"\approx ", "∅": r"\emptyset ", "∨": r"\lor ", "∧": r"\land ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "⟨": "(", "⟩": ")", "∴": "", "…": r"\ldots ", "，": ",", "％": "%", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "∖": r"\setminus ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "∶": ":", "′": "'", "″": '"',
    "“": '"', "”": '"',
    **dict.fromkeys("✓✔✅☑■□▪∎◼◻", ""), "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
    "‘": "'", "’": "'",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2007": " ", "\u200b": "", "\ufeff": "",
    **{sign: rf"\frac{{{a}}}{{{b}}}" for sign, a, b in (
        ("½", 1, 2), ("⅓", 1, 3), ("⅔", 2, 3), ("¼", 1, 4), ("¾", 3, 4), ("⅕", 1, 5), ("⅖", 2, 5), ("⅗", 3, 5), ("⅘", 4, 5),
        ("⅙", 1, 6), ("⅚", 5, 6), ("⅐", 1, 7), ("⅑", 1, 9), ("⅒", 1, 10), ("⅛", 1, 8), ("⅜", 3, 8), ("⅝", 5, 8), ("⅞", 7, 8),
    )},
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ",
    "ρ": r"\rho ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega ", "Δ": r"\Delta ",
}  # fmt: skip
_SYMBOL = re.compile("|".join(map(re.escape, _SYMBOLS)))
# Full-width ASCII of East Asian keyboards; ＼ stays, as it does not begin a command.
_HALF_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5E) if code != 0xFF3C} | {0xFF04: r"\$"}
# Mathematical bold, italic and other letters and digits, which models write instead of LaTeX.
_STYLED = re.compile("[\U0001d400-\U0001d7ff]")
_AREA = re.compile(r"(?<=\d) ?(mm|cm|dm|m|km|ft|in|yd)([²³])(?![A-Za-z\d])")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_LEVEL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")

# Delimiters around a whole answer: the same on both sides, or opening and closing.
_WRAPPERS = [
    *((mark, mark) for mark in (r"\$", "$$", "$", "**", "__", "*", "_", "`", '"', "'")),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
]
_WHOLE_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}")
_INLINE_MATH = re.compile(r"(?<![\\\w$])\$(?!\$)((?:[^$\\]|\\.)+?)(?<!\s)\$(?![\w$])")
_BRACKETED_MATH = re.compile(r"(?<![\\\w.)\]])\\[(\[]((?:(?!\\[()\[\]]).)+)\\[)\]](?![\w\\]|\.\d)")
_INLINE_BOLD = re.compile(r"(?<![\w)}*])\*\*(?=[^\s*])([^*]+)\*\*(?![\w*])")
_HEADING = re.compile(r"^#{1,6} +")
_TEXT_MACRO = re.compile(
    r"\\(?:text(?:normal|rm|bf|it|sf|tt)?|mbox|hbox|math(?:rm|it|sf|tt)|(?:mathbf|bm|boldsymbol)(?! ?\{ ?[A-Za-z] ?\})|operatorname\*?|emph|underline)\s*\{\s*"
)
_WHOLE_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_AND = re.compile(r"\s*,?\s*\\text\{\s*,?\s*and\s*\}\s*|\s*,?\s+and\s+|,\s*and\s+|\s*\\(?:land|wedge)(?![A-Za-z])\s*")
_OR = re.compile(
    r"\s*,?\s*\\text\{\s*,?\s*or\s*\}\s*|\s*,?\s+or\s+|,\s*or\s+|(?<=[)\]])or(?=[(\[])|\s*\\(?:lor|vee)(?![A-Za-z])\s*"
)
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![A-Za-z])")
# U is a union between two intervals or sets, else a letter.
_UNION = re.compile(r"(?<=[)\]}])\s*(?:\\text\{\s*(?:U|union)\s*\}|U|u|union)\s*(?=[(\[]|\\\{)")
_INTERVAL_OR_SET = re.compile(r"(?:[A-Za-z]\s*\\in\s*)?[(\[][^()\[\]]*,[^()\[\]]*[)\]]|\\\{.*\\\}")
_PERCENT = re.compile(r"\s*(?<![A-Za-z\\])(?:pct\.?|per ?cent(?:age)?)(?![A-Za-z])")
_DELIMITER = re.compile(r"(?<!\\)(?:\\[()\[\]]|\$\$?)")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?!,\d)")
_THIN_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:\\,|\\;|\\:|\\ )\d{3})+(?!\d)")
_SPACED_THOUSANDS = re.compile(r"([+-]?(?:\\?\$)?)([1-9]\d{0,2}(?: \d{3})+)(?![ \d/]*[\d/]|[ ]*\\frac)")
_ANGULAR = re.compile(r"(?:sin|cos|tan|cot|sec|csc|cis|\be)(?![A-Za-z])")
_DEGREE = re.compile(r" ?(?:\{ ?\})?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))(?: ?\\text\{ ?([CF])\}| ?([CF])(?![A-Za-z]))?")
_UNIT_LETTER = re.compile(r"^([+-]?[\d.,/]+) (m|g|s|h|l|L|N|J|W|V|m/s)(\^[23])?$")
_FENCE = re.compile(r"\s*```[a-z]*\s*([^`]*)```\s*")
_LINE = re.compile(r"(?:\$?\\?[A-Za-z](?:_\{?\w\}?)?|[A-Z][a-z]+) ?[=:](?!=)[^=:\n]+|[^A-Za-z=\n]+")
_CIRCLED = re.compile(r"[①-⑳](?:[\s,、]*[①-⑳])*")
_PARENTHESIS = re.compile(r"((?:\\?\$)?[+-]?[\d.,/]*\d) ?\(([A-Za-z][A-Za-z -]*)\)")
_FUNCTIONS = r"a(?:rc|r)?(?:sin|cos|tan|tg)h?|sinh?|cosh?|tanh?|cot|csc|c?tg|ln|log|exp|cis"
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega"

_CODE = {
    "Matrix": lambda inner: (
        inner if inner.startswith("[[") else "[" + ",".join(f"[{cell}]" for cell in inner[1:-1].split(",")) + "]"
    ),
    "array": lambda inner: inner,
    "FiniteSet": lambda inner: rf"\{{{inner}\}}",
    "set": lambda inner: rf"\{{{inner.strip('[]')}\}}",
    "Interval": lambda inner: "(["[inner[:3] != "-oo"] + inner + ")]"[inner[-2:] != "oo"],
    "Interval.open": lambda inner: "(" + inner + ")",
    "Rational": lambda inner: r"\frac{" + inner.replace(",", "}{") + "}",
    "Fraction": lambda inner: r"\frac{" + inner.replace(",", "}{") + "}",
    "binomial": lambda inner: r"\binom{" + inner.replace(",", "}{") + "}",
    "Abs": lambda inner: "|" + inner + "|",
}
_CALL = re.compile(
    rf"(?:np\.|sympy\.|sp\.)?(?<![A-Za-z\\])({'|'.join(map(re.escape, sorted(_CODE, reverse=True)))})\(([^()]*)\)"
)
_CODE_IMAGINARY = re.compile(r"(?<=[\d*])(?:(?<=\d)j|(?<=\*)I)(?![A-Za-z\d])")
_MATRIX = r"(?:[pbB]matrix|smallmatrix|matrix|array)"
# (pattern, replacement), applied in this order.
_RULES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\left ?\.|\\right ?\.|\\(?:tag|label)\*? ?\{[^{}]*\}|\\(?:nonumber|notag|hfill)(?![A-Za-z])", ""),
    (
        r"\\begin ?\{(?:aligned|align|gathered|gather|split|equation|multline|eqnarray|center|displaymath)\*?\}"
        r"((?:(?!\\begin|\\end).)*)\\end ?\{\w+\*?\}",
        lambda match: _one_line(match[1]),
    ),
    (
        r"\\(?:left|right|middle|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits|mathstrut|tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|checkmark|blacksquare|square|qed)"
        r"(?![A-Za-z])\s*",
        "",
    ),
    (r"\\text\{((?:\\text\{)+)([^{}]*)\}+$", r"\\text{\2}"),
    (r"\\colon(?![A-Za-z])", ":"),
    (r"(?<=[\d ])\\mu ?([mgsl])(?![A-Za-z])", r"\\text{u\1}"),
    (r"(\\text\{ ?)\\mu ?([mgsl])(?![A-Za-z])", r"\1u\2"),
    (r"(?<![A-Za-z0-9_\\])([a-z])(\d) ?=(?!=)", r"\1_\2="),
    (r"(?<![=<>])(?:=/=|=\\=|=!=|!==?|/=(?!=)|<>|~=|¬=)", r"\\ne "),
    (r"={2,3}|:=", "="),
    (r"(?<![\d.,'])[1-9]\d{0,2}(?:'\d{3})+(?![\d'])", lambda match: match[0].replace("'", "")),
    (r"\+ ?/ ?-|^\+-(?=\d)", r"\\pm "),
    (
        r"\\(?:hat|vec|mathbf|bm|boldsymbol) ?(?:\{ ?(?:\\(?:mathbf|text|bm) ?)?\{?|\\)([ijk])(?:math)? ?\}{0,2}(?![A-Za-z])",
        r"\\hat{\1}",
    ),
    (
        r"\\math(?:bf|it|sf) ?\{ ?([A-Za-z]) ?\}|\\(?:bm|boldsymbol) ?\{ ?([A-Za-z]) ?\}",
        lambda match: rf"\vec{{{match[1] or match[2]}}}",
    ),
    (r"\\text\{ ?([abcdefijknopqrtuvwxyz]) ?\}", r"\1 "),  # upright letters that are no units
    (rf"\\text\{{ ?({_FUNCTIONS}) ?\}}", r"\\\1 "),
    (rf"(?<![A-Za-z\\])({_GREEK})(?![A-Za-z])", r"\\\1"),
    (r"\\root ?\{?(\w)\}? ?\\of", r"\\sqrt[\1]"),
    (r"\\(?:mathbf|mathit|bm|boldsymbol|ensuremath|underline|text) ?\{(?=[^{}]*[\\\d][^{}]*\{)", "{"),
    (
        r"\\frac ?\{ ?d(\^\{?[23]\}?)? ?([a-z]) ?\}\{ ?d ?x(?:\^\{?[23]\}?)? ?\}|\bd([yfgh])/dx\b",
        lambda match: _derivative(match),
    ),
    (r"(?<![A-Za-z])(Dr|Mr|Mrs|Ms|Prof|St|Mt|Jr|Sr)\.(?= ?[A-Z])", r"\1"),
    (r"\\(?:bf|it|rm|sf|tt)(?![A-Za-z])\s*|\\(?:color|textcolor)\s*\{[A-Za-z]+\}\s*", ""),
    (r"\{?\s*([0-9A-Za-z]+)\s*\\choose(?![A-Za-z])\s*([0-9A-Za-z]+)\s*\}?", r"{\\binom{\1}{\2}}"),
    (r"\\(?:[dtcs]|nice)frac(?![A-Za-z])", r"\\frac"),
    (r"(?<=\d)\s*(?:,|\{,\})\s*\\!\s*(?=\d{3}(?!\d))", ""),
    (r"\s*\\!\s*", ""),
    (r"\{,\}", ","),
    (r"^~", r"\\sim "),
    (r"(?<!\\)\\[;:, >]|~|\\q?quad(?![A-Za-z])|\\[hv]space\s*\{[^{}]*\}|\\phantom\s*(?:\{[^{}]*\}|-)", " "),
    (r"\\(?:leq|leqslant)(?![A-Za-z])|<=|=<", r"\\le "),
    (r"\\(?:geq|geqslant)(?![A-Za-z])|>=", r"\\ge "),
    (r"\\neq(?![A-Za-z])|!=|\\not\s*=", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\(?:lbrace|lbrack)(?![A-Za-z])", lambda match: r"\{" if "brace" in match[0] else "["),
    (r"\\(?:rbrace|rbrack)(?![A-Za-z])", lambda match: r"\}" if "brace" in match[0] else "]"),
    (r"\\langle(?![A-Za-z])\s*", "("),
    (r"\s*\\rangle(?![A-Za-z])", ")"),
    (r"\\(?:dots|cdots|dotsc|dotsb)(?![A-Za-z])|\.\.\.", r"\\ldots "),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r"\\bigcup(?![A-Za-z])", r"\\cup "),
    (r"\\(?:R|reals|Reals)(?![A-Za-z])", r"\\mathbb{R}"),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"\\(?:bar|dot)\s*(\d|\{\d+\})", lambda match: "\\overline{" + match[1].strip("{}") + "}"),
    (r"\\overline\s*(\d)", r"\\overline{\1}"),
    (
        r"^(?:(?:\\(?:implies|Rightarrow|Longrightarrow|rightarrow|to|therefore)(?![A-Za-z])|=(?!=)|=>|\\approx(?![A-Za-z])(?=\s*[+-]?\d*\.\d))\s*)+",
        "",
    ),
    (r"\\?%", r"\\%"),
    (r"\\(?:textdollar|mathdollar)(?![A-Za-z])\s*|\\text\{\s*\\?\$\s*\}\s*", r"\\$"),
    (r"^([A-J])\)$|^\[([A-J])\]$", r"\1\2"),
    (r"(?<![0-9A-Za-z\\_^{])i(\d+)(?![\d.^])", r"\1i"),
    (r"\\degree(?![A-Za-z])|\^\s*\{?\\text\{o\}\}?", r"^\\circ "),
    (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"√", r"\\sqrt"),
    (r"(?<![A-Za-z\\])(pi|infinity|infty|inf|oo)(?![A-Za-z])", lambda match: r"\pi" if match[1] == "pi" else r"\infty"),
    (r"\\frac\s*([0-9A-Za-z])", r"\\frac{\1}"),
    (r"\\frac\s*(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}"),
    (r"\\frac\s*(\{[^{}]*\})\s*(?=\{)", r"\\frac\1"),
    (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
    (rf"\\begin\s*\{{{_MATRIX}\}}(?:\s*\{{[lcr|]*\}})?", r"\\begin{matrix}"),
    (rf"(?:\\\\)?\s*\\end\s*\{{{_MATRIX}\}}", r"\\end{matrix}"),
    (r"\\\{ ?\\begin\{matrix\}((?:(?!\\begin).)*)\\end\{matrix\}(?! ?\\\})", r"\\begin{cases}\1\\end{cases}"),
    (r"([_^])\s*\{\s*([0-9A-Za-z])\s*\}(?!\d)", r"\1\2"),
]
_REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in _RULES]
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
    # White space is collapsed before and after, as patterns with several \s* take cubic time on long runs of it.
    text = _unwrap(without_markup(_SPACE.sub(" ", _in_one_line(text))))
    if "\\" in text:
        text = _THIN_THOUSANDS.sub(lambda match: re.sub(r"\\[,;: ]", "", match.group()), text)
        text = _TEXT_MACRO.sub(r"\\text{", text)
    if "(" in text:
        text = _CALL.sub(lambda match: _CODE[match[1]](match[2].replace(" ", "")), text)
    text = _CODE_IMAGINARY.sub("i", text)
    if "\\\\" in text and "\\begin" not in text:
        text = re.sub(r" ?,? ?\\\\ ?(?=[^ ])", ", ", text)
    if "pct" in text or "cent" in text:
        text = _PERCENT.sub(" percent", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if "\\circ" in text and not _ANGULAR.search(text):
        text = _DEGREE.sub(
            lambda match: "\\text{degree" + (" " + (match[1] or match[2]) if match[1] or match[2] else "") + "}", text
        )
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

    Removes only delimiters at the two ends, or one that is opened in the middle and not closed. A ``$`` before or after a
    number is money.
    """
    text = text.strip()
    if text.endswith("\\"):
        text = text.removesuffix("\\").removesuffix("\\").rstrip()
    found = list(_DELIMITER.finditer(text)) if "$" in text or "\\" in text else []
    if not 1 <= len(found) <= 2:
        return text
    first, last = found[0], found[-1]
    opens = first.group() in {r"\(", r"\[", "$", "$$"} and text[: first.start()].strip() == ""
    closes = last.group() in {r"\)", r"\]", "$", "$$"} and text[last.end() :].strip(" .,;") == ""
    if len(found) == 2:
        pair = first.group() + last.group()
        broken = opens and closes and pair not in {r"\(\)", r"\[\]", "$$", "$$$$"}
        return text[first.end() : last.start()].strip() if broken else text
    if opens and (first.group() != "$" or not re.match(r"\s*[\d.]", text[first.end() :])):
        return text[first.end() :].strip()
    if closes and not opens:
        body = text[: last.start()].strip()
        return body + r"\$" if last.group() == "$" and re.fullmatch(r"[+-]?[\d.,]*\d", body) else body
    if first.group() in {r"\(", r"\["} and text[first.start() - 1] == " ":
        return text[: first.start()] + text[first.end() :].strip()
    return text


def without_markup(text: str) -> str:
    """Remove heading marks, bold marks, and delimiters of mathematics inside a text."""
    text = _HEADING.sub("", text)
    if "**" in text:
        text = _INLINE_BOLD.sub(r"\1", text)
    if "\\(" in text or "\\[" in text:
        text = _BRACKETED_MATH.sub(r"\1", text)
    return _INLINE_MATH.sub(r"\1", text) if "$" in text else text


def unwrap_text(text: str) -> str:
    r"""Replace every ``\text{x}`` of a normalised text by x."""
    return _WHOLE_TEXT.sub(r"\1", text).strip() if "\\text" in text else text


def _unicode_to_latex(text: str) -> str:
    text = _CIRCLED.sub(lambda match: ",".join(re.findall(r"\d+", unicodedata.normalize("NFKC", " ".join(match[0])))), text)
    text = _STYLED.sub(lambda match: unicodedata.normalize("NFKC", match.group()), text)
    text = _AREA.sub(lambda match: rf"\text{{ {match[1]}}}^{match[2].translate(_LEVEL)}", text)
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match.group().translate(_LEVEL) + "}", text)
    text = _SUBSCRIPT.sub(lambda match: "_{" + match.group().translate(_LEVEL) + "}", text)
    return _SYMBOL.sub(lambda match: _SYMBOLS[match.group()], text)


def _in_one_line(text: str) -> str:
    """A list of values or assignments with one a line, as a list; the content of a code fence."""
    if "```" in text and (fence := _FENCE.fullmatch(text)):
        text = fence[1]
    lines = [line.strip(" \t$,;.") for line in text.strip().split("\n")] if "\n" in text else []
    lines = [line for line in lines if line not in {"", r"\[", r"\]"}]
    if len(lines) == 1:
        return lines[0]
    if 2 <= len(lines) <= 12 and all(_LINE.fullmatch(line) and line.count("{") == line.count("}") for line in lines):
        return ", ".join(lines)
    return text


def _one_line(rows: str) -> str:
    r"""The rows of an ``aligned`` environment: a row that begins with a sign of relation continues the one before."""
    pieces = [row.replace("&", "").strip() for row in rows.split("\\\\")]
    text = ""
    for piece in filter(None, pieces):
        text += ("" if not text or piece[0] in "=<>" or piece.startswith(("\\le", "\\ge", "\\approx")) else ", ") + piece
    return text


def _derivative(match: re.Match[str]) -> str:
    name = match[2] or match[3]
    primes = "'" * int((match[1] or "1").strip("^{}"))
    return name + primes + ("(x)" if name in "fgh" else "")


def _connectives(text: str) -> str:
    if not ("and" in text or "or" in text or "edge" in text or "ee" in text):
        return text
    related = RELATION.search(text) is not None
    text = _AND.sub(r"\\land " if related else ",", text)
    return _OR.sub(r"\\lor " if related else ",", text)


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
        elif text.startswith("{"):
            text = _without_outer_braces(text)
        if text == before:
            return text


def _without_outer_braces(text: str) -> str:
    """Remove the braces of ``{{5}}``; a list keeps one pair, as it is a set."""
    escaped = re.sub(r"\\[{}]", "  ", text)
    leading = len(escaped) - len(escaped.lstrip("{"))
    trailing = len(escaped) - len(escaped.rstrip("}"))
    depth = enclosing = leading
    for character in escaped[leading : len(escaped) - trailing]:
        depth += (character == "{") - (character == "}")
        enclosing = min(enclosing, depth)
    enclosing = min(enclosing, trailing)
    inner = text[enclosing : len(text) - enclosing]
    return "{" + inner + "}" if enclosing and len(top_level(inner, ",;")) > 1 else inner
