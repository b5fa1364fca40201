"""The report's Jinja templates, the filters that format numbers in them, and Markdown tables from rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt

from grpo.common.safe_text import MARKDOWN
from grpo.reporting.charts import readable, style, with_readable_names
from grpo.results.findings import Interval


@cache
def templates(autoescape: bool = False) -> Environment:
    """The environment of the report's templates; an undefined name is an error."""
    environment = Environment(
        loader=PackageLoader("grpo.reporting"),
        undefined=StrictUndefined,
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= MARKDOWN | {"interval": interval, "names": names, "decimals": decimals, "squeezed": squeezed}
    environment.filters |= {"readable": readable, "named": with_readable_names, "swatch": lambda place: style(place).color}
    environment.filters["markdown"] = MarkdownIt("commonmark", {"html": False}).disable("image").renderInline
    environment.filters["shown"] = lambda value, measure: f"{value:{measure.shown}}"
    return environment


def render(template: str, **values: Any) -> str:
    """Fill a template."""
    return templates().get_template(template).render(**values)


def paragraphs(template: str, **values: Any) -> list[str]:
    """Fill a template and split it into paragraphs, each on one line; line breaks before punctuation leave no space."""
    return [line for paragraph in render(template, **values).split("\n\n") if (line := squeezed(paragraph))]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that ends with a line break; a ``|`` in a cell is escaped."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]]) + "\n"


def paragraph(template: str, **values: Any) -> str:
    """Fill a template that is one paragraph, as :func:`paragraphs` does."""
    (text,) = paragraphs(template, **values)
    return text


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A Markdown table of rows with the same columns, which are its heads."""
    rows = list(rows)
    return markdown_table(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])


def squeezed(text: str) -> str:
    """Join a text to one line, without spaces before punctuation."""
    return re.sub(r" ([,.;:)])", r"\1", " ".join(text.split()))


def interval(estimate: Interval | Mapping[str, float]) -> str:
    """Format as ``0.712 (0.690 to 0.734)``; only the value if the interval is a point."""
    of = estimate if isinstance(estimate, Mapping) else vars(estimate)
    value = decimals(of["value"])
    return value if of["low"] == of["high"] else f"{value} ({decimals(of['low'])} to {decimals(of['high'])})"


def decimals(value: float | None, digits: int = 3) -> str:
    """Format a number with so many decimals, never as ``-0.000``; None as an empty text."""
    return "" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def names(of: Sequence[str]) -> str:
    """Join names to ``a, b and c``."""
    *first, last = of or [""]
    return f"{', '.join(first)} and {last}" if first else last
