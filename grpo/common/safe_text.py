"""Show texts of models and strangers as text, in Markdown, on a page and on a terminal, and addresses without their secrets."""

from __future__ import annotations

import re

_PLAIN = re.compile(r"[\w .,;/()+=%-]+")  # cannot begin a picture, a link, a heading, code or HTML within a line
_IN_URI = re.compile(r"(://)[^\s/@:'\"<>]*:[^/@'\"<>\n]*@")  # user and password, which may hold a space
_NAMED = re.compile(r"(?i)\b(password|passwd|pwd|token|api_key|secret)=[^\s;&,'\"]+|\b(bearer) [^\s'\"]+")
_URI = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]++://[^\s'\"<>()]+")  # linear: no second start within a word


def fenced(text: str) -> str:
    """A text of several lines as a block of code, which no run of backticks in the text can end."""
    fence = "`" * max(4, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def code(text: object) -> str:
    """A short text as code within a line; a line break becomes ``␤``. In a table, ``|`` has still to be escaped."""
    shown = "".join(c if c.isprintable() else "␤" if c == "\n" else " " for c in str(text)).replace("`", "'")
    shown = shown.replace("\\|", "\\ |")  # else a table's escape for the bar would be taken for one of the backslash
    return f"`{shown.strip()}`" if shown.strip() else "(empty)"


def short(text: object) -> str:
    """A name or a reason within a line: as it is if it is plain, else as :func:`code`."""
    return str(text) if _PLAIN.fullmatch(str(text)) else code(text)


def on_terminal(text: object) -> str:
    """A text without characters that a terminal takes as commands, such as escape codes; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(text))


def in_figure(text: object) -> str:
    """A text for matplotlib, which would read ``$...$`` as mathematics."""
    return str(text).replace("$", r"\$")


MARKDOWN = {"fenced": fenced, "code": code, "short": short, "cell": lambda text: str(text).replace("|", "\\|")}
"""Filters of Jinja templates that write Markdown."""


def without_password(uri: str) -> str:
    """Drop user, password, query and fragment from a URI; ``***`` replaces what may be a part of a password."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        scheme, rest = "", uri
    user, _, host = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")  # a path has no user
    return scheme + separator + ("***" if re.search("[?#;]", user) else re.split("[?#;]", host)[0])


def hide_secrets(text: str) -> str:
    """Drop the secrets of URIs within a text, and what follows ``password=`` and its like."""
    text = _URI.sub(lambda match: without_password(match[0]), _IN_URI.sub(r"\1", text))
    return _NAMED.sub(lambda match: f"{match[1]}=***" if match[1] else f"{match[2]} ***", text)
