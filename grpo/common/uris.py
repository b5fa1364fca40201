"""Show URIs without their secrets."""

from __future__ import annotations

import re
from urllib.parse import unquote

HIDDEN = "***"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = re.compile(r"(?:[\w.-]*|\[[\dA-Fa-f:.]+\])(?::\d*)?")
_IN_TEXT = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]++://[^\s'\"<>()]+")  # linear: no second start within a word


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
