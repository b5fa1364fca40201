"""The look of each arm: one colour all through the report, and dashes that tell arms of one colour apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Colours that stay apart for colour-blind readers (Okabe and Ito 2008). From the ninth arm on they come again, and the line
# differs instead, as no palette has many colours that everyone can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
# The same colours, lighter where they would drown in dark ground.
DARK = {
    "#0072B2": "#4DA3E0",
    "#D55E00": "#FF7F2A",
    "#009E73": "#1FC79A",
    "#CC79A7": "#E39BC3",
    "#E69F00": "#F0B429",
    "#56B4E9": "#8FD0F7",
    "#000000": "#F2F2F2",
    "#999999": "#B8B8B8",
}


@dataclass(frozen=True)
class Style:
    """How the curve of an arm is drawn: its colour, and lengths of ink and gap (none: a solid line)."""

    color: str
    dashes: tuple[int, ...]


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
