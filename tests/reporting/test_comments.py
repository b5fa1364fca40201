"""Comments by hand: numbers from the record, and messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from study_parts import EXPERIMENTS

from grpo.common.errors import UserError
from grpo.reporting.comments import COMMENTS, QUESTIONS, read_comments
from grpo.study import paths


def arm(name: str, value: float, below: float | None = None, setting: str = "", chosen: bool = True) -> dict[str, Any]:
    distance = None if below is None else {"value": below, "low": below - 0.1, "high": below + 0.1}
    own = {"arm": name, "setting": setting or name, "chosen": chosen, "value": value, "low": value - 0.05, "high": value + 0.05}
    return own | {"below": distance}


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
        "baseline": {"r1_zero": {"accuracy": {"value": 0.04, "low": 0.02, "high": 0.06}}},
        "best_of_n": {"r1_zero": {"n": {"4": {"pass": {"value": 0.2, "low": 0.1, "high": 0.3}}}}},
    }


def write(text: str, name: str = "sweep", folder: Path = COMMENTS, study: str = "s") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(f"---\nstudy: {study}\n---\n{text}\n")


def read(
    of: dict[str, Any] | None = None, study: str = "s", folder: str = "lab", left_out: tuple[str, ...] = ()
) -> dict[str, str]:
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
    assert read()["sweep"] == filled


@pytest.mark.usefixtures("workdir")
def test_a_study_shows_its_own_comments_only() -> None:
    write("default's")
    write("own", folder=Path("lab/comments"), study="mine")
    write("third", folder=COMMENTS / "third", study="third")  # beside the default study's, which stays
    comments = {study: [*read(study=study).values()] for study in ("s", "mine", "third")}
    assert comments == {"s": ["default's"], "mine": ["own"], "third": ["third"]}
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
        ('a\n\n{{ arm("lo") }}', 6, "no arm 'lo'; there are: low, high, high-rate_1"),
        ('{{ arm("low").mean }}', 4, "mean"),
        ('{{ arm("high").below | interval }}', 4, "no value with an interval here"),
        ("{{ arm( }}", 4, "unexpected"),
        ("{{ arm('low').update({}) }}", 4, "unsafe"),
        ("{{ arm.__globals__ }}", 4, "unsafe"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", 4, "recursion"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_mistake_is_one_message_with_its_line(body: str, line: int, message: str) -> None:
    write(body)
    with pytest.raises(UserError) as error:
        read()
    assert str(error.value).startswith(f"{COMMENTS}/sweep.md:{line}: ") and message in str(error.value), error.value


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize("text", ["no head", "---\nstudy: s\n", "---\nauthor: s\n---\n"])
def test_a_comment_without_a_head_is_refused(text: str) -> None:
    COMMENTS.mkdir(parents=True)
    (COMMENTS / "sweep.md").write_text(text)
    with pytest.raises(UserError, match=r"sweep.md:1: no head. Begin with"):
        read()


def test_the_default_studys_comments_are_filled_from_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    found = read(json.loads(paths.RECORD.read_text()), study="mini", folder="studies")
    assert len(found) > 10 and not any("{{" in text for text in found.values())
    assert re.search(r"\d\.\d{3} \(\d\.\d{3} to \d\.\d{3}\)", found["grpo_baselines"])


def test_the_handouts_questions_are_listed_by_the_names_of_comments() -> None:
    """Of every experiment that a handout asks for: all but our own."""
    asked = re.findall(r"^- `(\w+)`", Path(__file__).parents[2].joinpath("studies/questions.md").read_text(), re.M)
    assert {*asked} == {*EXPERIMENTS, *QUESTIONS} - {"grpo_lora", "kissing_number"} and len(asked) == len({*asked})
