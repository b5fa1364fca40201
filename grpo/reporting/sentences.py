"""The Jinja templates that write Markdown, with the filters that format numbers in them."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.common.safe_text import MARKDOWN
from grpo.reporting.labels import decimals, interval


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
    environment.filters |= MARKDOWN | {"interval": interval, "decimals": decimals}
    return environment


def render(template: str, **values: Any) -> str:
    """Fill a template."""
    return templates().get_template(template).render(**values)
