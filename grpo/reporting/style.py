"""Style of each arm's curve (colour and dashes, the same in all figures) and readable names of arms."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Colours that colour-blind readers can distinguish (Okabe and Ito 2008); violet replaces their black, so that all can be read
# on light and dark backgrounds. From the ninth arm on, colours repeat with other dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A63C4", "#999999")
METHODS = {"grpo": COLOURS[0], "sft": COLOURS[1], "expert_iteration": COLOURS[2]}  # for figures that compare methods


@dataclass(frozen=True)
class Style:
    """Colour and line style of a curve, as matplotlib takes them."""

    color: str
    line: Any = "solid"


def style(place: int) -> Style:
    """The style of an experiment's arm by its place in params.yaml, from 0; no two places have the same style.

    The first eight have solid lines, the next eight dashes, then dashes with one dot, with two dots, and so on.
    """
    turn, colour = divmod(place, len(COLOURS))
    return Style(COLOURS[colour], (0, (6, 2, *(1, 2) * (turn - 1))) if turn else "solid")


def styles(names: Iterable[str]) -> dict[str, Style]:
    """The style of each arm (or other series of a figure), in the given order."""
    return {name: style(place) for place, name in enumerate(names)}


def readable(arm: str) -> str:
    """A readable name: ``epochs_4-batch_16`` becomes ``4 epochs × batch 16``, ``rank_1-high`` becomes ``rank 1, high``."""
    parts = re.split(r"-(?=[a-z])", arm)
    counted = [re.fullmatch(r"(.*?)_(\d+)", part) for part in parts]
    words = []
    for part, count in zip(parts, counted, strict=True):
        if count is None:
            words.append(part.replace("_", " "))
            continue
        name, number = count[1].replace("_", " "), count[2]
        several = name.endswith("s") and not name.endswith("ss")
        words.append(f"{number} {name[:-1] if number == '1' else name}" if several else f"{name} {number}")
    return (" × " if all(counted) else ", ").join(words)


def with_readable_names(text: str, arms: Iterable[str]) -> str:
    """Replace names of arms in a text by readable ones, except in names of runs (``EXPERIMENT/ARM/SEED``)."""
    for arm in sorted(arms, key=len, reverse=True):
        text = re.sub(rf"(?<![\w/-]){re.escape(arm)}(?![\w/-])", readable(arm), text)
    return text
