"""The exact verifier against known sets, a naive check, and programs that try to get a false verdict."""

import itertools
import json
import random
import time
from pathlib import Path

import pytest

from grpo.common.errors import UserError
from grpo.discovery.sandbox import Limits
from grpo.discovery.verifier import Verification, check_points, verify_program, verify_text

QUICK = Limits(seconds=20, cpu_seconds=2, memory_mb=500, output_mb=1)
Points = list[list[int]]


def roots(n: int) -> Points:
    """The root system D_n: all +-e_i +- e_j, of squared norm 2 and with squared distances of 2 and more."""
    points = []
    for i, j in itertools.combinations(range(n), 2):
        for signs in itertools.product((1, -1), repeat=2):
            point = [0] * 11
            point[i], point[j] = signs
            points.append(point)
    return points


def axes(n: int, length: int = 2) -> Points:
    return [[sign * length * (i == j) for j in range(11)] for i in range(n) for sign in (1, -1)]


def naive(points: Points) -> tuple[int, int]:
    """The smallest squared distance and the largest squared norm, in Python's integers."""
    distances = [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for x, y in itertools.combinations(points, 2)]
    return min(distances), max(sum(a * a for a in x) for x in points)


def rejected(points: object, message: str) -> Verification:
    verdict = check_points(points)
    assert (verdict.validity, verdict.combined_score) == (0.0, 0.0)
    assert message in verdict.message
    return verdict


@pytest.mark.parametrize("scale", [1, 10**13, -(10**100)])
@pytest.mark.parametrize(("points", "count"), [(axes(11), 22), (roots(11), 220)], ids=["axes", "D11"])
def test_sets_known_to_be_valid_are_so_at_any_scale(points: Points, count: int, scale: int) -> None:
    scaled = [[scale * entry for entry in point] for point in points]
    assert check_points(scaled) == Verification(count, 11, 1.0, float(count), "")


def test_small_sets() -> None:
    assert check_points([[5, *[0] * 10]]).combined_score == 1
    opposite = [[600_000_000] * 11, [-600_000_000] * 11]  # norms below 2**63, a squared distance above it
    assert check_points(opposite).combined_score == 2
    assert check_points(roots(4) + axes(4)).validity == 0  # norms 2 and 4
    half = [[*signs, *[0] * 7] for signs in itertools.product((1, -1), repeat=4)]
    assert check_points(half + axes(4)) == Verification(24, 11, 1.0, 24.0, "")  # the 24-cell


def test_the_message_names_the_pair_and_the_longest_point() -> None:
    points = [*axes(11, 10), [0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0]]
    verdict = rejected(points, "Minimum squared distance 16 < maximum squared norm 100: ")
    assert "points 2 [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0] and 22 [0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0]" in verdict.message
    assert "point 0 [10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] has" in verdict.message
    assert (verdict.num_points, verdict.dimension) == (23, 11)


@pytest.mark.parametrize("size", [10**3, 2 * 10**8, 10**9, 10**13, 2**31, 2**32, 2**62, 10**30, 10**90])
def test_wrong_by_one(size: int) -> None:
    """Two points at squared distance size^2, and one of squared norm size^2 + 1."""
    side = size * 866 // 1000
    points = [point + [0] * 7 for point in ([size // 2, side, 0, 0], [-size // 2, side, 0, 0], [0, 0, size, 1])]
    rejected(points, f"Minimum squared distance {size**2} < maximum squared norm {size**2 + 1}: points 0 [")
    points[2][3] = 0
    assert check_points(points).combined_score == 3


@pytest.mark.parametrize("scale", [1, 50, 10**4, 2 * 10**8, 10**13, 2**63, 10**30, 10**90])
def test_as_a_naive_check(scale: int) -> None:
    rng = random.Random(scale)
    seen = set()
    for trial in range(60):
        n = rng.choice([2, 3, 4, 11])
        base = roots(n) if trial % 2 else axes(n)
        some = rng.sample(base, rng.randint(2, min(len(base), 12)))
        noise = rng.choice([0, 1, scale // 1000])
        points = [[scale * entry + rng.randint(-noise, noise) for entry in point] for point in some]
        if trial % 5 == 0:  # all but one far away and near one another
            points = [[entry + 100 * scale for entry in point] for point in points[1:]] + [[7 * scale] * 11]
        distinct = [list(point) for point in dict.fromkeys(map(tuple, points)) if any(point)]
        if len(distinct) < 2:
            continue
        least, most = naive(distinct)
        verdict = check_points(distinct)
        assert verdict.validity == (least >= most)
        seen.add(verdict.validity)
        if least < most and most < 10**150:
            assert verdict.message.startswith(f"Minimum squared distance {least} < maximum squared norm {most}: points ")
    assert seen == {0.0, 1.0}


@pytest.mark.parametrize("scale", [1, 10**13, 10**90 + 7])
def test_600_points_take_little_time(scale: int) -> None:
    rng = random.Random(0)
    points = [[100 * scale + rng.randint(0, 10**9) for _ in range(11)] for _ in range(600)]
    start = time.process_time()  # of this process alone: others may keep the machine busy
    verdict = check_points(points)
    assert time.process_time() - start < 10
    least, most = naive(points)
    assert verdict.message.startswith(f"Minimum squared distance {least} < maximum squared norm {most}: ")


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (None, "The points are None, expected a list"),
        ("points" * 10**6, "The points are 'pointspoints...spointspoints', expected a list"),
        ([], "points: List should have at least 1 item"),
        ([[1] * 11, 5], "points[1]: Input should be a valid list, but it is 5"),
        ([[1] * 10], "points[0]: List should have at least 11 items after validation, not 10"),
        ([[1.0] + [0] * 10], "points[0][0]: Input should be a valid integer, but it is 1.0"),
        ([[0] * 10 + [float("nan")]], "points[0][10]: Input should be a valid integer, but it is nan"),
        ([["1"] + [0] * 10], "points[0][0]: Input should be a valid integer, but it is '1'"),
        ([[True] + [0] * 10], "points[0][0]: Input should be a valid integer, but it is True"),
        ([[1] * 11, [0] * 11], "Point 1 is the zero vector"),
        ([*axes(11), axes(11)[3]], "Minimum squared distance 0 < maximum squared norm 4: points 3 [0, -2, 0"),
    ],
)
def test_refused(points: object, message: str) -> None:
    rejected(points, message)
    assert rejected([[1, 2], [3, 4]], "at least 11 items").dimension == 2


def test_more_points_than_can_be_are_refused_at_once() -> None:
    start = time.process_time()
    verdict = rejected([[1] * 11] * 10**5, "100000 points are more than 868, the proven upper bound")
    assert time.process_time() - start < 5 and verdict.num_points == 10**5
    rejected([[number, *[1] * 10] for number in range(868)], "Minimum squared distance 1 < ")


AXES = "[[s * 2 * (i == j) for j in range(11)] for i in range(11) for s in (1, -1)]"


TO_EVERY_PIPE = """
import os
def send(data):
    for descriptor in range(3, 1024):
        try:
            os.write(descriptor, data)
        except OSError:
            pass
"""
CLAIM = json.dumps({"num_points": 868, "dimension": 11, "validity": 1.0, "combined_score": 868.0, "message": ""})


@pytest.mark.parametrize(
    "program",
    [
        f"points = {CLAIM}",
        f"{TO_EVERY_PIPE}\nsend(b'''{{\"points\": {CLAIM}}}''')\nos._exit(0)",
        f"{TO_EVERY_PIPE}\nsend(b'{{\"points\": [[1,0],[0,1]]}}')\nos._exit(0)",
        f'{TO_EVERY_PIPE}\nsend(b\'{{"error": ""}}\')\nos._exit(0)',
        f"{TO_EVERY_PIPE}\nsend(b'[' * 100000)\nos._exit(0)",
        f"{TO_EVERY_PIPE}\nsend(bytes(range(256)))\npoints = {AXES}",
        f"{TO_EVERY_PIPE.replace('os.write(descriptor, data)', 'os.lseek(descriptor, data, 0)')}\nsend(10**5)\npoints = {AXES}",
        f"import json\njson.dumps = json.JSONEncoder.encode = lambda *a, **k: '''{CLAIM}'''\npoints = [[1]]",
        "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.len = lambda x: 868\npoints = [[1]]",
        "class L(list):\n    def __iter__(self): return iter([868.0])\n    def __len__(self): return 868\npoints = L([[1]])",
        "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
        "import gc, types\nfor f in gc.get_objects():\n"
        "    if isinstance(f, types.FunctionType) and f.__name__ == 'explained':\n"
        "        f.__code__ = (lambda *a: 'valid').__code__\nraise ValueError",
        "import sys\nsys._getframe(1).f_globals['listed'] = lambda *a: [[1]]\npoints = 3",
    ],
)
def test_nothing_is_valid_because_a_program_says_so(program: str) -> None:
    verdict = verify_text(program, QUICK)
    assert (verdict.validity, verdict.combined_score) == (0.0, 0.0)
    assert verdict.message and verdict.num_points < 2 + ("[[1,0]" in program)


@pytest.mark.parametrize(
    "program",
    [
        f"import numpy as np\npoints = np.array({AXES}, dtype=object) * 10**40",
        f"print('some output')\nprint(chr(233))\npoints = lambda: {AXES}",
        f"{TO_EVERY_PIPE}\nimport json\nsend(json.dumps({{'points': {AXES}}}).encode())\nos._exit(3)",
    ],
)
def test_programs_with_22_points(program: str) -> None:
    assert verify_text(program, QUICK) == Verification(22, 11, 1.0, 22.0, "")


def test_a_file(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(f"# two lines\npoints = {AXES}\n", encoding="utf-8")
    assert verify_program(program, QUICK).combined_score == 22
    program.write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\nassert len(name) == 1\npoints = [[1]]".encode("latin-1"))
    assert "points[0]: List should have at least 11 items" in verify_program(program, QUICK).message
    program.write_bytes(b"points = '\xff'")
    assert "SyntaxError" in verify_program(program, QUICK).message
    assert verify_text("name = '\ud800'", QUICK).validity == 0
    for wrong in (tmp_path / "missing.py", tmp_path):
        with pytest.raises(UserError, match=r"cannot be read.*Name a file with a Python program"):
            verify_program(wrong)
