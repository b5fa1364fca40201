"""600 integer vectors in dimension 11 whose distances are all at least as large as their lengths: tau_11 >= 600.

Divide by 10^6. R^11 = R^8 x R^3; the eight coordinates form four pairs.

1. 496 vectors of squared norm 4: +-2 on each of the eight, and all signs on 30 blocks of four coordinates that meet pairwise
   in at most two: the six unions of two pairs, and 24 blocks of one coordinate from each of three pairs and one of R^3.
2. 96 vectors (u, w): u = (+-1, +-1) on one of the four pairs, and w one of the six vectors of squared norm 2 along an
   orthogonal frame of R^3 whose unit vectors have no coordinate above 1/sqrt 2. Each u may have a frame of its own.
3. 8 vectors (0, v) of squared norm 4, at the middles of the frames' octants: 54.7 degrees from the frames (45 are needed)
   and 70.5 from one another (60 are needed).

With one frame for all u there is room for 12 vectors (0, v), which gives the 604 of arXiv 2606.10402. But these touch the
frames, and three orthogonal vectors of squared norm 2 cannot all be rational (the square of their determinant would be 8).
The 8 touch nothing, so the frames may differ a little from one u to the next. Then vectors of different u are further apart
than needed, u may be shortened a little (SHRINK), w lengthened, and all coordinates rounded.

More than 8 have no room of this kind: around one frame it is eight triangles with sides of 60 degrees, where two points can
be 60 degrees apart in the corners only, and the corners touch the frame.

How far frames must differ: (u, w) and (u', w') with u at a right angle to u' have squared distance
4(1 - SHRINK)^2 + |w - w'|^2, so |w - w'|^2 must be about 8 SHRINK; a frame vector moves by 1.15 TURN from one to the next.
"""

import itertools
import math

SCALE = 10**6
SHRINK = 1e-5
TURN = 0.01  # radians
FRAME = [[2, 2, -1], [-1, 2, 2], [2, -1, 2]]  # rows are at right angles and have length 3
PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]


def run_code() -> list[list[int]]:
    return backbone() + along_frames() + rays()


def backbone() -> list[list[int]]:
    points = [vector({i: sign * 2}) for i in range(8) for sign in (1, -1)]
    for block in blocks():
        for signs in itertools.product((1, -1), repeat=4):
            points.append(vector(dict(zip(block, signs, strict=True))))
    return points


def blocks() -> list[tuple[int, ...]]:
    """The six unions of pairs; for each coordinate of R^3, from any three pairs, one triple and its opposite."""
    found: list[tuple[int, ...]] = [first + second for first, second in itertools.combinations(PAIRS, 2)]
    for last in (8, 9, 10):
        for choice in itertools.product(itertools.product((0, 1), repeat=2), repeat=4):
            new: list[tuple[int, ...]] = []
            for three, bits in zip(itertools.combinations(PAIRS, 3), choice, strict=True):
                triple = [pair[bit] for pair, bit in zip(three, (0, *bits), strict=True)]
                opposite = [pair[1 - bit] for pair, bit in zip(three, (0, *bits), strict=True)]
                new += [(*triple, last), (*opposite, last)]
            if all(len(set(a) & set(b)) <= 2 for a, b in itertools.combinations(found + new, 2)):
                found += new
                break
    return found


def along_frames() -> list[list[int]]:
    a = 1 - SHRINK
    length = math.sqrt(2 + 2 * a - 2 * a * a)  # between what 2e_i allows and a squared norm of 4
    points = []
    for number, (pair, sign) in enumerate(itertools.product(PAIRS, (1, -1))):
        for axis in FRAME:
            w = [length / 3 * x for x in turned(axis, TURN * (number - 3.5))]
            for g, h in itertools.product((1, -1), repeat=2):
                points.append(vector({pair[0]: g * a, pair[1]: g * sign * a, 8: h * w[0], 9: h * w[1], 10: h * w[2]}))
    return points


def turned(axis: list[int], angle: float) -> list[float]:
    """Turned about (1, 1, 1), which has the same angle to all vectors of FRAME (Rodrigues)."""
    x, y, z = axis
    along = (x + y + z) / 3
    cross = [(z - y) / math.sqrt(3), (x - z) / math.sqrt(3), (y - x) / math.sqrt(3)]
    return [along + math.cos(angle) * (c - along) + math.sin(angle) * d for c, d in zip(axis, cross, strict=True)]


def rays() -> list[list[int]]:
    points = []
    for signs in itertools.product((1, -1), repeat=3):
        v = [sum(sign * axis[i] for sign, axis in zip(signs, FRAME, strict=True)) for i in range(3)]  # its length is 3 sqrt 3
        points.append(vector({8 + i: 1.99 * v[i] / (3 * math.sqrt(3)) for i in range(3)}))
    return points


def vector(values: dict[int, float]) -> list[int]:
    """The other coordinates are 0."""
    return [round(SCALE * values.get(i, 0)) for i in range(11)]
