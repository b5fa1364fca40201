"""Verdicts of several studies together, and the file that keeps what they rest on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import report_parts
from numpy.typing import NDArray
from pydantic import TypeAdapter
from scipy import stats
from study_parts import ROOT

from grpo.common.errors import UserError
from grpo.results.claims import read_published
from grpo.results.evidence import Arm
from grpo.results.intervals import difference_of, mean_of_pairs
from grpo.results.pairs import Pairs, read_pairs, write_pairs
from grpo.results.verdicts import DOES_NOT_HOLD, HOLDS, NOT_TESTED, OPEN, SAME, decide_by, judge
from grpo.study import paths
from grpo.study.claims import AnyClaim

BEATS: AnyClaim = TypeAdapter(AnyClaim).validate_python({"arm": "a", "beats": "b", "by": 0.05, "at": "last_step"})
MORE: AnyClaim = TypeAdapter(AnyClaim).validate_python({"arm": "a", "beats": "b", "by": 1.25, "metric": "m", "at": "late"})


def study(problems: str, *differences: float, of: int = 100) -> Pairs:
    """Runs that differ by so much in each problem: only the runs vary, and one problem as if it differed."""
    table = np.repeat(np.array(differences)[:, None], of, axis=1)
    return Pairs("a", "b", [*range(len(differences))], table, np.empty((len(differences), 0)), problems)


@pytest.mark.parametrize(
    ("studies", "alone", "expected"),
    [
        ([(0.0, 0.1, 0.2, 0.3), (0.1, 0.2, 0.0, 0.3), (0.0, 0.1, 0.2, 0.3)], OPEN, HOLDS),
        ([(-0.1, 0.1, 0.06, -0.06), (0.1, -0.1, 0.03, -0.03), (-0.05, 0.05, 0.06, -0.06)], OPEN, SAME),
        ([(-0.3, -0.1, -0.2, 0.1)] * 4, OPEN, DOES_NOT_HOLD),
        ([(0.2, 0.2, 0.21), (-0.2, -0.2, -0.21)], None, OPEN),  # each is sure, and they contradict each other
        ([(0.2, 0.2, 0.21), (0.2, 0.21, 0.2), (-0.2, -0.2, -0.21)], None, OPEN),
    ],
)
def test_studies_decide_together_unless_they_contradict_each_other(
    studies: list[tuple[float, ...]], alone: str | None, expected: str
) -> None:
    pairs = [study(str(number), *of) for number, of in enumerate(studies)]
    found = decide_by(BEATS, pairs)
    assert found.verdict == expected
    assert found.interval is not None and found.interval["value"] == pytest.approx(np.mean(studies))
    assert alone is None or {decide_by(BEATS, [of]).verdict for of in pairs} == {alone}


def test_the_interval_of_several_studies_by_hand() -> None:
    """Runs of equal problems: the t interval over all of them, and each study's problems by the square of its share of runs."""
    first, second = (0.1, 0.2, 0.3), (0.12, 0.25)
    found = mean_of_pairs([study("x", *first).differences, study("y", *second, of=50).differences])
    variance = stats.sem([*first, *second]) ** 2 + 0.6**2 / 99 / 100 + 0.4**2 / 49 / 50
    assert found.value == pytest.approx(np.mean([*first, *second])) and found.se == pytest.approx(np.sqrt(variance))
    far = mean_of_pairs(
        [study(key, *(at + noise for noise in (-0.01, 0, 0.01))).differences for key, at in (("x", 0), ("y", 1))]
    )
    assert far.df == 1 and far.se == pytest.approx(0.5, rel=0.01)  # of the two studies' means, 0 and 1


def test_studies_of_the_same_problems_are_one_study_with_more_runs() -> None:
    rng = np.random.default_rng(0)
    table = rng.choice([-1.0, 0.0, 1.0], (5, 80), p=[0.1, 0.7, 0.2])
    halves = [replace(study("x", 0, 0), differences=table[:2]), replace(study("x", 0, 0, 0), differences=table[2:])]
    interval = difference_of(np.zeros_like(table), table).ends()
    assert decide_by(BEATS, halves).interval == pytest.approx(interval)
    assert decide_by(BEATS, [halves[0], replace(halves[1], problems="y")]).interval != pytest.approx(interval, abs=1e-4)


def test_the_interval_of_three_studies_covers_the_truth() -> None:
    """Five bases each, effects of bases and of problems, and answers drawn: 95% of intervals hold the true difference, .05."""
    rng, held, many = np.random.default_rng(5), 0, 600

    def drawn() -> NDArray[np.float64]:
        chance = 0.5 + rng.normal(0, 0.08, (5, 1)) + rng.normal(0, 0.15, (1, 60))
        return (rng.random((5, 60)) < chance + 0.05).astype(float) - (rng.random((5, 60)) < 0.5)

    for _ in range(many):
        found = mean_of_pairs([drawn() for _ in range(3)])
        held += found.low < 0.05 < found.high
    assert 0.93 <= held / many <= 0.98


def arms(*ends: float, middle: float | None = None) -> list[Arm]:
    """Two arms; the first ends so, and the second at .5 to .6."""

    def of(name: str, ends: tuple[float, ...]) -> Arm:
        runs = [
            report_parts.run(name, [0.1, end if middle is None else middle, end], seed, steps=64, every=32, m=(0.5 + end) * 2)
            for seed, end in enumerate(ends)
        ]
        return Arm("e", name, runs, [])

    return [of("a", ends), of("b", tuple(0.5 + 0.05 * place for place in range(len(ends))))]


@pytest.mark.parametrize("claim", [BEATS, MORE, BEATS.model_copy(update={"at": "end"})])
def test_verdicts_are_the_same_from_the_file(claim: AnyClaim, tmp_path: Path) -> None:
    for ends in ((0.7, 0.83, 0.9), (0.52, 0.55, 0.59), (0.2, 0.1, 0.3)):
        found = judge(claim, *arms(*ends))
        assert found.pairs is not None
        write_pairs(tmp_path / "pairs.csv", {"x": found.pairs, "y": study("p", 1 / 3, -0.1)})
        read = read_pairs(tmp_path / "pairs.csv")
        again = decide_by(claim, [read["x"]])
        assert replace(again, measured=found.measured) == found
        assert (read["y"].problems, read["y"].seeds) == ("p", [0, 1]) and read["y"].differences[0, 0] == 1 / 3


def test_the_committed_pairs_give_the_verdicts_of_the_committed_record() -> None:
    pairs, record = read_pairs(ROOT / paths.PAIRS), json.loads((ROOT / paths.RECORD).read_text())
    claims = {claim.id: claim for claim in read_published().claims}
    judged = {one["id"]: one for one in record["claims"] if one["id"] in pairs}
    assert len(judged) > 10
    for name, one in judged.items():
        found = decide_by(claims[name], [pairs[name]])
        assert (found.verdict, found.interval) == (one["verdict"], pytest.approx(one["interval"]))


def test_all_studies_together_wait_too_until_the_difference_stops_moving() -> None:
    claim = BEATS.model_copy(update={"at": "end"})
    found = judge(claim, *arms(0.2, 0.1, 0.3, middle=0.1)).pairs
    assert found is not None and found.moved.mean(axis=1) == pytest.approx([-0.3, -0.45, -0.3])  # .1, 0 and .2 less .4 to .5
    climbing = [replace(found, moved=np.full((3, 100), 0.1), problems=name) for name in "xyz"]
    assert decide_by(claim, climbing).verdict == NOT_TESTED
    assert decide_by(claim, [replace(one, moved=-one.moved) for one in climbing]).verdict == DOES_NOT_HOLD


@pytest.mark.parametrize(
    ("old", "new"),
    [("0.1 0.1", "0.1 x"), (",0.1 0.1", ","), ("differences", "d"), (",0,0.1 0.1", ",0,inf 1"), ("0.1 0.1", "0.1")],
)
def test_a_damaged_file_is_named(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    write_pairs(path, {"x": study("p", 0.1, 0.2, of=2)})
    text = path.read_text().replace("0.10000000000000001", "0.1")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=r"pairs\.csv: damaged"):
        read_pairs(path)
