"""The report's Jinja templates, and the filters that format numbers in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.reporting.trends import Measure
from grpo.results.findings import Interval


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
    environment.filters |= {"interval": interval, "names": names, "decimals": decimals, "squeezed": squeezed, "shown": shown}
    return environment


def paragraphs(template: str, **numbers: Any) -> list[str]:
    """Render a template to paragraphs, each on one line; line breaks before punctuation leave no space."""
    found = templates().get_template(template).render(**numbers).split("\n\n")
    return [line for paragraph in found if (line := squeezed(paragraph))]


def squeezed(text: str) -> str:
    """Join a text to one line, without spaces before punctuation."""
    return re.sub(r" ([,.;:)])", r"\1", " ".join(text.split()))


def interval(estimate: Interval | Mapping[str, float]) -> str:
    """Format as ``0.712 (0.690 to 0.734)``; only the value if the interval is a point."""
    value, low, high = (
        estimate[k] if isinstance(estimate, Mapping) else getattr(estimate, k) for k in ("value", "low", "high")
    )
    return decimals(value) if low == high else f"{decimals(value)} ({decimals(low)} to {decimals(high)})"


def decimals(value: float | None, digits: int = 3) -> str:
    """Format a number with so many decimals, never as ``-0.000``; None as an empty text."""
    return "" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def shown(value: float, measure: Measure) -> str:
    """Format a metric's value with its number of digits."""
    return f"{value:{measure.shown}}"


def names(of: Sequence[str]) -> str:
    """Join names to ``a, b and c``."""
    *first, last = of or [""]
    return f"{', '.join(first)} and {last}" if first else last
