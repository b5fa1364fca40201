"""The Jinja templates that write Markdown, with the filters that format numbers in them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.common.safe_text import MARKDOWN
from grpo.reporting.labels import decimals, interval

LONGEST = 400  # characters of a reason, a measurement or a response


@cache
def templates() -> Environment:
    """The environment of the report's templates; an undefined name is an error."""
    environment = Environment(
        loader=PackageLoader("grpo.reporting"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= MARKDOWN | {
        "interval": interval,
        "decimals": decimals,
        "bounded": bounded,
        "plain": plain,
        "said": said,
    }
    environment.filters["quoted"] = lambda text: "\n".join(f"> {line}".rstrip() for line in text.split("\n"))
    return environment


def render(template: str, **values: Any) -> str:
    """Fill a template."""
    return templates().get_template(template).render(**values)


def bounded(text: object, longest: int = LONGEST) -> str:
    """A text's beginning, on one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def said(text: object, longest: int = LONGEST) -> str:
    """A text as part of a line: bounded, and without a link, a picture, code, HTML or the end of a cell."""
    return re.sub(r"([\\`\[\]<|])", r"\\\1", bounded(text, longest))


def plain(text: object) -> str:
    """A text for the title of a link or picture, without characters that could end it."""
    return bounded(text).replace("\\", "/").translate({ord(one): None for one in '"`<>[]|'})
