"""Jinja templates hold the report's sentences; Python hands them numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.reporting.trends import Measure
from grpo.results.findings import Interval


def templates(autoescape: bool = False) -> Environment:
    """Those of the report; nothing may be missing in them."""
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


def said(template: str, **numbers: Any) -> list[str]:
    """A template's paragraphs, each on one line, without empty ones; a template may break a line before a comma."""
    paragraphs = templates().get_template(template).render(**numbers).split("\n\n")
    return [line for paragraph in paragraphs if (line := squeezed(paragraph))]


def squeezed(text: str) -> str:
    """A text on one line, without spaces before punctuation."""
    return re.sub(r" ([,.;:)])", r"\1", " ".join(text.split()))


def interval(estimate: Interval | Mapping[str, float]) -> str:
    """``0.712 (0.690 to 0.734)``; the value alone where the interval is a point, which says nothing of chance."""
    value, low, high = (
        estimate[k] if isinstance(estimate, Mapping) else getattr(estimate, k) for k in ("value", "low", "high")
    )
    return decimals(value) if low == high else f"{decimals(value)} ({decimals(low)} to {decimals(high)})"


def decimals(value: float | None, digits: int = 3) -> str:
    """A number with so many digits after the point, never ``-0.000``; empty for None."""
    return "" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def shown(value: float, measure: Measure) -> str:
    """A value of a metric, with its digits."""
    return f"{value:{measure.shown}}"


def names(of: Sequence[str]) -> str:
    """``a, b and c``."""
    *first, last = of or [""]
    return f"{', '.join(first)} and {last}" if first else last
