"""Comments by hand: numbers from the record, a digest that notices what would make a sentence false, and messages."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo.common.errors import UserError
from grpo.reporting.comments import COMMENTS, Comment, accept_all, read_comments


def arm(
    name: str, value: float, below: float | None = None, setting: str = "", chosen: bool = True, **more: Any
) -> dict[str, Any]:
    told = None if below is None else {"value": below, "low": below - 0.1, "high": below + 0.1}
    own = {"arm": name, "setting": setting or name, "chosen": chosen, "value": value, "low": value - 0.05, "high": value + 0.05}
    return own | {"below": told, "collapsed": [], "runs": [f"{name}/0", f"{name}/1"]} | more


def record() -> dict[str, Any]:
    sweep = [
        arm("low", 0.6, 0.2),
        arm("high-rate_1", 0.8, setting="high"),
        arm("high-rate_3", 0.1, setting="high", chosen=False),
    ]
    other = [arm("a", 0.5), arm("b", 0.4, 0.1)]
    return {
        "experiments": {
            "sweep": {"winner": "high-rate_1", "leader": "high-rate_1", "arms": sweep},
            "other": {"winner": "a", "leader": "a", "arms": other},
        },
        "claims": [
            {"id": "better", "experiment": "sweep", "verdict": "agrees"},
            {"id": "o", "experiment": "other", "verdict": "agrees"},
        ],
        "baseline": {"r1_zero": {"accuracy": {"value": 0.04, "low": 0.02, "high": 0.06}}},
        "best_of_n": {"r1_zero": {"n": {"4": {"pass": {"value": 0.2, "low": 0.1, "high": 0.3}}}}},
    }


def write(
    text: str, name: str = "sweep", *head: str, folder: Path = COMMENTS, study: str = "s", written: str = "nothing yet"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["---", f"study: {study}", f"written for: {written}", *head, "---", text, ""]
    (folder / f"{name}.md").write_text("\n".join(lines))


def read(
    of: dict[str, Any] | None = None, study: str = "s", folder: str = "lab", left_out: tuple[str, ...] = ()
) -> dict[str, Comment]:
    made: Any = SimpleNamespace(study=study, folder=folder, left_out=left_out)
    return read_comments(made, of or record())


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ('{{ arm("low") | interval }}', "0.600 (0.550 to 0.650)"),
        ('{{ arm("high").value | number(1) }}', "0.8"),  # a setting stands for its chosen arm
        ('{{ arm("high-rate_3").value | percent }}', "10%"),
        ('{{ (arm("a", "other").value - arm("low").value) | number }}', "-0.100"),
        ('{{ arm(experiment("other").winner, "other").arm }}', "a"),
        ('{{ baseline("r1_zero").accuracy | interval }}', "0.040 (0.020 to 0.060)"),
        ('{{ best_of_n("r1_zero", 4).pass.value | number(2) }}', "0.20"),
    ],
)
def test_numbers_come_from_the_record(template: str, filled: str) -> None:
    write(template)
    assert read()["sweep"].text == filled


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(of: Any) -> None:
        *keys, last = (int(key) if key.isdecimal() else key for key in path.split("/"))
        for key in keys:
            of = of[key]
        of[last] = value

    return change


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (changed("experiments/sweep/arms/0/value", 0.6004), False),  # last digits
        (changed("experiments/sweep/arms/2/value", 0.9), False),  # an arm that no table shows
        (changed("experiments/other/winner", "b"), False),  # an experiment that the comment does not name
        (changed("experiments/sweep/winner", "low"), True),
        (changed("experiments/sweep/arms/0/below/low", -0.01), True),  # it can no longer be told from the leader
        (changed("experiments/sweep/arms/0/collapsed", ["low/0"]), True),
        (changed("claims/0/verdict", "disagrees"), True),
        (changed("claims/1/verdict", "disagrees"), False),
        (changed("experiments/sweep/arms/0/value", 0.3), True),  # below what it rests on
    ],
)
def test_the_digest_notices_what_would_make_a_sentence_false(change: Callable[[Any], None], noticed: bool) -> None:
    write('{{ arm("low").value }}', "sweep", 'rests on: arm("low").value > 0.5')
    before = read()["sweep"]
    accept_all({"sweep": before}, ["all"])
    assert before.state.startswith("draft") and read()["sweep"].state == ""
    now = copy.deepcopy(record())
    change(now)
    assert (read(now)["sweep"].state == "written for other results") == noticed


@pytest.mark.usefixtures("workdir")
def test_a_comment_is_not_accepted_against_what_it_rests_on() -> None:
    write("x", "sweep", 'rests on: arm("low").value > arm("high").value')
    write("y", "other")
    before = (COMMENTS / "other.md").read_text()
    with pytest.raises(UserError, match=r'sweep.md: rests on arm\("low"\).value > arm\("high"\).value, which is not so'):
        accept_all(read(), ["other", "sweep"])
    assert (COMMENTS / "other.md").read_text() == before
    with pytest.raises(UserError, match="no comment 'swep'; there are: other, sweep"):
        accept_all(read(), ["swep"])


@pytest.mark.usefixtures("workdir")
def test_a_study_shows_its_own_comments_only() -> None:
    write("default's")
    write("own", folder=Path("lab/comments"), study="mine")
    assert [comment.text for comment in read(study="mine").values()] == ["own"]
    assert [comment.text for comment in read().values()] == ["default's"]
    assert read(left_out=("sweep",)) == {}
    write("z", "swep")
    with pytest.raises(
        UserError, match=r"no experiment 'swep' in the study s. Rename it to one of: sweep, other, math_baseline"
    ):
        read()


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ('a\n\n{{ arm("lo") }}', 7, "no arm 'lo'; there are: low, high, high-rate_1"),
        ('a\n{{ arm("low").mean | number }}', 6, "no 'mean' here, but arm, setting"),
        ('{{ arm("low").mean }}', 5, "no 'mean' here"),
        ('{{ arm("high").below | interval }}', 5, "no value with an interval here"),
        ("{{ arm( }}", 5, "unexpected"),
        ("{{ x }}", 5, "cannot use name"),
        ("{{ nothing() }}", 5, "no name 'nothing'; there are: experiment, arm"),
        ("{{ arm('low') | upper }}", 5, "no filter 'upper'; there are: number"),
        ("\n{% for one in (1, 2) %}x{% endfor %}", 6, "cannot use for"),
        ("{{ 'a' * 1000000000 }}", 5, "cannot use mul"),
        ("{{ arm('low').items() }}", 5, "cannot use"),
        ("{{ arm('low').__class__ }}", 5, "no '__class__' here"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", 5, "recursion"),
        ("x" * 20_001, None, "longer than 20,000 characters"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_mistake_is_one_message_with_its_line(body: str, line: int | None, message: str) -> None:
    write(body)
    with pytest.raises(UserError) as error:
        read()
    where = f"{COMMENTS}/sweep.md" + (f":{line}" if line else "")
    assert str(error.value).startswith(f"{where}: ") and message in str(error.value), error.value


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no head", r"sweep.md:1: no head. Begin with"),
        ("---\nstudy: s\n---\n", r"the head needs one line `written for: …`, and has 0"),
        ("---\nstudy: s\nwriten for: x\n---\n", r"sweep.md:3: no line 'writen for' is known"),
        ("---\nstudy: s\nwritten for: x\nrests on: arm('low').value\n---\n", r"sweep.md:4: .* is 0.6, neither true nor false"),
    ],
)
def test_a_head_has_a_study_a_digest_and_facts(text: str, message: str) -> None:
    COMMENTS.mkdir(parents=True)
    (COMMENTS / "sweep.md").write_text(text)
    with pytest.raises(UserError, match=message):
        read()


def test_the_default_studys_comments_can_be_read() -> None:
    """Each names its study and is a template within the rules; the record of a finished study fills them in."""
    files = sorted((Path(__file__).parents[2] / COMMENTS).glob("*.md"))
    assert len(files) > 10
    for file in files:
        assert re.match(
            r"---\nstudy: mini\nwritten for: (nothing yet|[0-9a-f]{12})\n(rests on: .+\n)*---\n\S", file.read_text()
        ), file
