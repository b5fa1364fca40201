"""The look of each arm: one colour all through the report, dashes that tell arms of one colour apart, and a name to read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Colours that stay apart for colour-blind readers (Okabe and Ito 2008), with a violet for their black, so that all read on
# light and on dark ground. From the ninth arm on they come again, and the line differs instead.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A63C4", "#999999")
METHODS = {"grpo": COLOURS[0], "sft": COLOURS[1], "expert_iteration": COLOURS[2]}  # where methods stand beside one another


@dataclass(frozen=True)
class Style:
    """How the curve of an arm is drawn: its colour, and lengths of ink and gap (none: a solid line)."""

    color: str
    dashes: tuple[int, ...] = ()


def style(place: int) -> Style:
    """The look of an experiment's arm, by its place in params.yaml, from 0 on; no two places look the same.

    A solid line for the first eight, then dashes, dashes with one dot between them, with two, and so on.
    """
    turn, colour = divmod(place, len(COLOURS))
    return Style(COLOURS[colour], (6, 2, *(1, 2) * (turn - 1)) if turn else ())


def styles(names: Iterable[str]) -> dict[str, Style]:
    """The look of each of an experiment's arms (or of whatever else a figure shows), in the order of params.yaml."""
    return {name: style(place) for place, name in enumerate(names)}


def styles_of_places(places: Mapping[str, int]) -> dict[str, Style]:
    """The look of arms of several experiments in one figure, by each one's place in its own.

    Each keeps its colour; of those with the same place the later ones get the next line that is free.
    """
    found: dict[str, Style] = {}
    for name, place in places.items():
        while style(place) in found.values():
            place += len(COLOURS)
        found[name] = style(place)
    return found


def readable(arm: str) -> str:
    """An arm's name for a reader: ``epochs_4-batch_16`` is ``4 epochs × batch 16``, ``rank_1-high`` is ``rank 1, high``."""
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
    """A text in which arms stand by the names that figures give them; in names of runs (``EXPERIMENT/ARM/SEED``) they stay."""
    for arm in sorted(arms, key=len, reverse=True):
        text = re.sub(rf"(?<![\w/-]){re.escape(arm)}(?![\w/-])", readable(arm), text)
    return text
