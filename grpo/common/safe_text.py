"""Show texts of models and strangers as text, in Markdown, on a page and on a terminal, and addresses without their secrets."""

from __future__ import annotations

import re
from urllib.parse import unquote

_PLAIN = re.compile(r"[\w .,;/()+=%-]+")  # cannot begin a picture, a link, a heading, code or HTML within a line
HIDDEN = "***"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = re.compile(r"(?:[\w.-]*|\[[\dA-Fa-f:.]+\])(?::\d*)?")
_IN_TEXT = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]++://[^\s'\"<>()]+")  # linear: no second start within a word


def fenced(text: str) -> str:
    """A text of several lines as a block of code, which no run of backticks in the text can end."""
    fence = "`" * max(4, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def code(text: object) -> str:
    """A short text as code within a line; a line break becomes ``␤``. In a table, ``|`` has still to be escaped."""
    shown = "".join(one if one.isprintable() else "␤" if one == "\n" else " " for one in str(text)).replace("`", "'")
    shown = shown.replace("\\|", "\\ |")  # else a table's escape for the bar would be taken for one of the backslash
    return f"`{shown.strip()}`" if shown.strip() else "(empty)"


def short(text: object) -> str:
    """A name or a reason within a line: as it is if it is plain, else as :func:`code`."""
    return str(text) if _PLAIN.fullmatch(str(text)) else code(text)


def on_terminal(text: object) -> str:
    """A text without characters that a terminal takes as commands, such as escape codes; line breaks and tabs stay."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in str(text))


MARKDOWN = {"fenced": fenced, "code": code, "short": short, "cell": lambda text: str(text).replace("|", "\\|")}
"""Filters of Jinja templates that write Markdown."""


def without_password(uri: str) -> str:
    """Drop user, password, query and fragment from a URI.

    A password may hold ``@``, ``/``, ``:`` or a space, so the user ends at the last ``@``. ``***`` replaces what may be a part
    of a password.
    """
    scheme, separator, rest = uri.partition("://")
    if not _SCHEME.fullmatch(scheme):
        scheme, separator, rest = "", "", uri
    if separator and rest.startswith("/"):  # a file, which has no user; SQLAlchemy takes # for a part of its name
        return scheme + separator + re.split("[?]" if scheme.startswith("sqlite") else "[?#]", rest)[0]
    user, _, shown = rest.rpartition("@")
    shown = re.split("[?#]", shown)[0]
    hosts = shown.partition("/")[0].split(",")
    # With ? before @, it is open whether the query or the password has the other.
    unclear = re.search("[?#]", user) or not all(map(_HOST.fullmatch, hosts))
    return scheme + separator + (HIDDEN if unclear else shown)


def hide_secrets(text: str, uri: str = "") -> str:
    """Drop the secrets of URIs within a text.

    Args:
        uri: known to be in use; pieces of its secrets are hidden too, as libraries show parts of a URI that they cannot read.
    """
    rest = uri.partition("://")[2]
    before, _, after = rest.rpartition("@")
    query = "&".join(re.split("[?#]", after)[1:])
    values = [pair.rpartition("=")[2] for pair in query.split("&")]
    secrets = {piece for value in (before, *values) for piece in (value, unquote(value), *re.split(r"[@/:?#&=\s]", value))}
    if rest.startswith("/"):
        secrets = set()
    for secret in sorted((secret for secret in secrets if len(secret) > 2), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _IN_TEXT.sub(lambda found: without_password(found[0]), text)
