"""Parameterised constructions of kissing configurations in dimension 11: a recipe of plain values becomes integer points.

Needs numpy and the standard library only, and nothing of this package: a program that :mod:`grpo.discovery.mutation`
proposes is a recipe followed by this file's text, and stands alone.

A core is one of four constructions (:data:`CORES`), scaled so that its squared norms are at most ``limit``. Points that it
leaves room for are then added from an orbit of a vector (:func:`complete`). Whatever a recipe asks for, points that would
be too close to earlier ones are left out, so every recipe gives a valid set, of few points or of many.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIMENSION = 11
MOST_CANDIDATES = 6000  # of an orbit; a larger one is sampled
Points = NDArray[np.int64]
Signs = tuple[int, ...]


def build(recipe: dict[str, Any]) -> list[list[int]]:
    """The points of a recipe.

    Args:
        recipe: ``core`` (a name in :data:`CORES`), its ``parameters``, and ``completion`` (arguments of :func:`complete`,
            or None).
    """
    points, limit = CORES[recipe["core"]](**recipe["parameters"])
    points = keep(np.empty((0, DIMENSION), np.int64), points, limit)
    if recipe["completion"] is not None:
        points = complete(points, limit, **recipe["completion"])
    return [[int(x) for x in point] for point in points]


# ------------------------------------------------------------------------------------------------------ choosing points


def keep(points: Points, candidates: Points, limit: int) -> Points:
    """Add candidates one after another, each that is no nearer than sqrt(limit) to all before it and no longer than that."""
    norms = (candidates**2).sum(1)
    fits = (norms > 0) & (norms <= limit) & (squared_distances(candidates, points) >= limit).all(1)
    candidates = candidates[fits]
    chosen: list[int] = []
    free = np.ones(len(candidates), bool)
    for index, candidate in enumerate(candidates):
        if free[index]:
            chosen.append(index)
            free &= ((candidates - candidate) ** 2).sum(1) >= limit
    return np.concatenate([points, candidates[chosen]])


def squared_distances(first: Points, second: Points) -> Points:
    """All squared distances, shape (len(first), len(second)); entries stay below 10^9, so int64 holds them."""
    distances: Points = (first**2).sum(1)[:, None] + (second**2).sum(1)[None] - 2 * (first @ second.T)
    return distances


def independent_set(conflicts: NDArray[np.bool_], steps: int, seed: int) -> list[int]:
    """A large set of indices without conflicts, by tabu search: what conflicts with a new member leaves, for some steps.

    Args:
        conflicts: symmetric, shape (n, n).
    """
    rng = random.Random(seed)
    chosen, best = np.zeros(len(conflicts), bool), np.zeros(len(conflicts), bool)
    hits = np.zeros(len(conflicts), np.int64)  # members of the set that each index conflicts with
    banned_until = np.zeros(len(conflicts), np.int64)
    for step in range(steps):
        free = np.flatnonzero(~chosen & (banned_until <= step))
        if not len(free):
            continue
        lowest = free[hits[free] == hits[free].min()]
        new = int(lowest[rng.randrange(len(lowest))])
        for old in np.flatnonzero(conflicts[new] & chosen):
            chosen[old] = False
            hits -= conflicts[old]
            banned_until[old] = step + 1 + rng.randrange(7)
        chosen[new] = True
        hits += conflicts[new]
        if np.count_nonzero(chosen) > np.count_nonzero(best):
            best = chosen.copy()
    return [int(index) for index in np.flatnonzero(best)]


def orbit_of(vector: Sequence[int], seed: int) -> Points:
    """Images of a vector under permutations and sign changes of its coordinates, in random order, at most MOST_CANDIDATES."""
    rng = np.random.default_rng(seed)
    images: dict[tuple[int, ...], None] = {}  # a set that keeps the order in which they were found
    before = -1
    while before < len(images) < MOST_CANDIDATES:  # a round that finds no new one has most probably seen all
        before = len(images)
        shuffled = rng.permuted(np.tile(np.array(vector, np.int64), (MOST_CANDIDATES, 1)), axis=1)
        signed = shuffled * rng.choice((1, -1), shuffled.shape)
        images |= dict.fromkeys(map(tuple, signed.tolist()))
    return np.array([*images][:MOST_CANDIDATES], np.int64)


def complete(points: Points, limit: int, vector: Sequence[float], method: str, seed: int) -> Points:
    """Add points from the orbit of ``vector`` (as if limit were 4) that fit: greedily, or as a large clique of them."""
    unit = (limit / 4) ** 0.5
    candidates = orbit_of([round(x * unit) for x in vector], seed)
    fits = (squared_distances(candidates, points) >= limit).all(1) & ((candidates**2).sum(1) <= limit)
    candidates = candidates[fits]
    if method == "clique" and len(candidates):
        conflicts = squared_distances(candidates, candidates) < limit
        np.fill_diagonal(conflicts, False)
        candidates = candidates[independent_set(conflicts, steps=500, seed=seed)]
    return keep(points, candidates, limit)


# ---------------------------------------------------------------------------------------------------------------- cores


def orbit(vector: Sequence[int], seed: int) -> tuple[Points, int]:
    """Points of one orbit under all permutations and sign changes."""
    return orbit_of(vector, seed), sum(x * x for x in vector)


def code(length: int, axes: int, steps: int, seed: int) -> tuple[Points, int]:
    """From a constant-weight code (Leech and Sloane's construction A'): all signs on each block of four, and +-2 on axes.

    Blocks of ``length`` coordinates that meet pairwise in at most two; 35 of them on 11 coordinates, and 11 axes, give 582.
    """
    return np.concatenate([axis_points(axes), block_points(code_blocks(length, steps, seed))]), 4


def laminated(length: int, axes: int, steps: int, seed: int, height: int, layer: Sequence[int]) -> tuple[Points, int]:
    """A configuration of ``length`` < 11 dimensions as the equator, and two layers parallel to it.

    Args:
        height: of the layers, in units of a quarter of the norm.
        layer: a vector in the same units, of whose images the layers consist.
    """
    equator = 2 * np.concatenate([axis_points(axes), block_points(code_blocks(length, steps, seed))])
    images = orbit_of(layer, seed)
    images = np.pad(images, ((0, 0), (0, DIMENSION - images.shape[1])))
    images[:, length] = height
    mirrored = images.copy()
    mirrored[:, length] = -height
    return np.concatenate([equator, images, mirrored]), 16


def frames(shrink: float, turn: float, slack: float, rays: str, seed: int) -> tuple[Points, int]:
    """Eight coordinates in four pairs, and three for frames: 496 points of block form, 96 along frames, up to 12 rays.

    The 96 are (u, w): u = (+-a, +-a) on a pair, w one of six vectors along an orthogonal frame of R^3, a frame of its own
    for u and -u. Were a = 1 and |w|^2 = 2 in a common frame, 12 rays (0, v) would have room beside them, at the middles
    between neighbouring frame vectors; but three orthogonal vectors with |w|^2 = 2 have irrational coordinates.

    Args:
        shrink: 1 - a.
        turn: angle from one frame to the next, radians.
        slack: where |w|^2 lies between its smallest value, 4a - 2a^2, and its largest, 4 - 2a^2; from 0 to 1.
        rays: "cuboctahedron" (the 12), "cube" (8 in the middles of the frame's octants) or "none".
    """
    scale, a = 10**6, 1 - shrink
    length = (4 * a - 2 * a * a + slack * (4 - 4 * a)) ** 0.5
    axes = np.array([[2, 2, -1], [-1, 2, 2], [2, -1, 2]]) / 3
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    points: list[NDArray[np.float64]] = []
    for number, (pair, sign) in enumerate(itertools.product(pairs, (1, -1))):
        turned = axes @ turn_about(axes.sum(0), turn * (number - 3.5))
        for direction, along in itertools.product((1, -1), (1, -1)):
            for axis in turned:
                point = np.zeros(DIMENSION)
                point[list(pair)] = direction * a, direction * sign * a
                point[8:] = along * length * axis
                points.append(point)
    for weights in RAYS[rays]:
        point = np.zeros(DIMENSION)
        point[8:] = 2 * np.array(weights) @ axes / sum(x * x for x in weights) ** 0.5
        points.append(point)
    backbone = np.concatenate([axis_points(8), block_points(frame_blocks(pairs, seed))])
    return np.concatenate([scale * backbone, np.trunc(scale * np.array(points)).astype(np.int64)]), 4 * scale**2


def turn_about(axis: NDArray[np.float64], angle: float) -> NDArray[np.float64]:
    """A rotation matrix (Rodrigues)."""
    x, y, z = axis / (axis @ axis) ** 0.5
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    rotation: NDArray[np.float64] = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
    return rotation


CUBE = list(itertools.product((1, -1), repeat=3))
RAYS: dict[str, list[Signs]] = {
    "none": [],
    "cube": CUBE,
    "cuboctahedron": [signs for signs in itertools.product((1, 0, -1), repeat=3) if signs.count(0) == 1],
}
CORES: dict[str, Callable[..., tuple[Points, int]]] = {"orbit": orbit, "code": code, "laminated": laminated, "frames": frames}


# --------------------------------------------------------------------------------------------------------------- blocks


def axis_points(count: int) -> Points:
    """+-2 on each of the first ``count`` coordinates."""
    eye = 2 * np.eye(DIMENSION, dtype=np.int64)[:count]
    return np.concatenate([eye, -eye])


def block_points(blocks: Iterable[Sequence[int]]) -> Points:
    """All 16 sign patterns on each block of four coordinates."""
    points = []
    for block, signs in itertools.product(blocks, itertools.product((1, -1), repeat=4)):
        point = np.zeros(DIMENSION, np.int64)
        point[list(block)] = signs
        points.append(point)
    return np.array(points, np.int64).reshape(-1, DIMENSION)


def meet_in_more_than(most: int, blocks: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
    """Which two different blocks have more than ``most`` coordinates in common, shape (n, n)."""
    members = np.zeros((len(blocks), DIMENSION), np.int64)
    for row, block in zip(members, blocks, strict=True):
        row[list(block)] = 1
    common = members @ members.T
    np.fill_diagonal(common, 0)
    more: NDArray[np.bool_] = common > most
    return more


def code_blocks(length: int, steps: int, seed: int) -> list[Sequence[int]]:
    """Many blocks of four of ``length`` coordinates that meet pairwise in at most two."""
    blocks = list(itertools.combinations(range(length), 4))
    return [blocks[index] for index in independent_set(meet_in_more_than(2, blocks), steps, seed)]


def frame_blocks(pairs: Sequence[tuple[int, int]], seed: int) -> list[Sequence[int]]:
    """The six unions of two pairs, and for each of the last three coordinates eight triples from three pairs each."""
    unions = [first + second for first, second in itertools.combinations(pairs, 2)]
    triples = [triple for three in itertools.combinations(pairs, 3) for triple in itertools.product(*three)]
    # Triples of one coordinate share at most one of the eight; of two coordinates, a triple is used once.
    places = [(*triple, last) for triple in triples for last in range(8, DIMENSION)]
    return [*unions, *(places[index] for index in independent_set(meet_in_more_than(2, places), 1500, seed))]


RECIPE = {'core': 'frames', 'parameters': {'shrink': 3.4981886835820408e-06, 'turn': 0.010689707901785838, 'slack': 0.37904667608314135, 'rays': 'cube', 'seed': 296}, 'completion': None}


def run_code() -> list[list[int]]:
    return build(RECIPE)
