"""`grpo verify` on a small study of made-up runs: an altered digit is found and its place named, also without data/."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_parts import run, store, store_general, study_of

from grpo.commands import stages
from grpo.commands import verify as verifying
from grpo.commands.recompute import Difference, compare, rows_of_file
from grpo.commands.verify import differences, noise
from grpo.common.files import write_json
from grpo.reporting.curves import CURVES, REACH
from grpo.reporting.writeup import read_timing_table
from grpo.results.outcomes_file import scores_of
from grpo.study import paths
from grpo.study.claims import Beats
from grpo.study.schema import Study

SWEEP = "grpo_learning_rate"
RATES = {"1e-4": {"learning_rate": 1e-4}, "3e-4": {"learning_rate": 3e-4}, "1e-3": {"learning_rate": 1e-3}}
CLAIMS = [
    Beats(experiment=SWEEP, arm="3e-4", beats="1e-4", by=0.05),
    Beats(experiment=SWEEP, arm="last", beats="first", metric="token_entropy", at="late", by=1.5),
    Beats(experiment=SWEEP, arm="3e-4", beats="1e-4", metric="val/old_task_reward", by=0.05),
    Beats(experiment=SWEEP, arm="3e-4", beats="1e-4", metric="kl/forward_per_token", by=1.25),
]


def kept(arm: str, seeds: list[int], chance: np.random.Generator) -> list[dict[str, Any]]:
    """What the stage `kl` says of an arm's kept checkpoints, as far as claims use it."""
    runs = [f"{SWEEP}/{arm}/{seed}" for seed in seeds]
    metrics = ("old_task_reward", "forward_per_token")
    return [{"step": step, "by_run": {run: {of: chance.random() for of in metrics} for run in runs}} for step in (0, 8, 16)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, mini_study: Study) -> tuple[Path, Study]:
    """A finished study: three arms of three seeds, one of which was stopped."""
    folder, chance = tmp_path_factory.mktemp("study"), np.random.default_rng(0)
    study = study_of(mini_study, **{SWEEP: RATES}).model_copy(update={"seeds": [0, 1, 2], "claims": CLAIMS})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        store_general()
        for arm, end in (("1e-4", 0.3), ("3e-4", 0.6), ("1e-3", 0.7)):
            for seed in study.seeds:
                rewards = [(chance.random(100) < share).astype(float) for share in (0.1, 0.25, end)]
                stopped = 16 if (arm, seed) == ("1e-3", 2) else None
                entropy = chance.random(16) + float(arm) * 1000
                store(run(arm, rewards, seed, values=RATES[arm], steps=16, token_entropy=entropy, diverged=stopped))
        write_json(paths.KL_REPORTS / f"{SWEEP}.json", {"arms": {arm: kept(arm, study.seeds, chance) for arm in RATES}})
        patch.setattr(stages, "load_study", lambda: study)
        stages.report()
        shutil.rmtree(paths.BASELINE)  # made-up rows that do not give the made-up accuracy
    return folder, study


@pytest.fixture
def study(made: tuple[Path, Study], workdir: Path) -> Study:
    """The finished study, with its files in the working folder."""
    shutil.copytree(made[0], workdir, dirs_exist_ok=True)
    return made[1]


def found_in(study: Study) -> list[Difference]:
    return differences(study, rows_of_file(paths.OUTCOMES))[0]


def test_an_altered_digit_is_found_and_its_place_named(study: Study) -> None:
    """In each of 100 reports, from what git stores alone: the file, and of the record the key, of other files the line."""
    assert found_in(study) == []  # with the run folders
    shutil.rmtree(paths.RUNS)
    assert found_in(study) == []
    draw = random.Random(0)
    files = [paths.RECORD, paths.WRITEUP, paths.PAGE, CURVES / REACH, *sorted(paths.TABLES.glob("*.md"))]
    for number in range(100):
        path = files[number % len(files)]
        text = path.read_text()
        place = draw.choice([match.start() for match in re.finditer(r"\d", text)])
        digit = draw.choice([of for of in "0123456789" if of != text[place]])
        changed = text[:place] + digit + text[place + 1 :]
        path.write_text(changed)
        line = text.count("\n", 0, place)
        first = found_in(study)[0]
        assert first.file == str(path), (number, first)
        if path == paths.RECORD and not first.place.startswith("line "):
            key = re.match(r'\s*"([^"]+)": ', changed.splitlines()[line])
            assert first.place.split("/")[-1] == key[1] if key else first.place.split("/")[-1].isdigit(), (number, first)
        else:
            assert first.place.startswith("samples") or first.place == f"line {line + 1}", (number, first)
        path.write_text(text)


def test_a_changed_score_is_found_in_what_follows_from_it_and_in_data(study: Study) -> None:
    text = paths.OUTCOMES.read_text()
    scores = rows_of_file(paths.OUTCOMES)[f"{SWEEP}/3e-4/1"]["last"]
    changed = scores_of(np.where(np.arange(100) == 7, 1 - scores, scores))
    paths.OUTCOMES.write_text(text.replace(scores_of(scores), changed))
    places = {one.place: one for one in found_in(study)}
    assert f"{SWEEP}/3e-4/1: last" in places  # it is not what the run folder says
    of_mean = places[f"experiments/{SWEEP}/arms/1/value"]
    assert abs(float(of_mean.written) - float(of_mean.recomputed)) == pytest.approx(1 / 300)  # one of 3 x 100 scores
    whole = np.where(scores == 1, 10.0, -2.0)  # of an own reward
    paths.OUTCOMES.write_text(text.replace(scores_of(scores), scores_of(whole)))
    assert [*rows_of_file(paths.OUTCOMES)[f"{SWEEP}/3e-4/1"]["last"]] == [*whole]


@pytest.mark.parametrize("written", [[], [[1.0, 2.0], [3.0], [4.0]], [[1.0], [3.0]], [[1.0, 2.0, 2.0], [3.0]]])
def test_lists_of_other_lengths_differ(written: list[list[float]]) -> None:
    assert len([*compare("f", "p", [[1.0, 2.0], [3.0]], written)]) >= 1
    assert not [*compare("f", "p", [[1.0, 2.0], [3.0]], [[1.0, 2.0], [3.0]])]


def test_the_command_says_what_it_found(study: Study, grpo: Callable[..., tuple[int, str, str]]) -> None:
    paths.PARAMS.write_text(json.dumps(study.model_dump(mode="json", exclude_unset=True)))
    code, out, _ = grpo("verify", "--no-run")
    assert code == 0 and "no differences (9 runs" in out and "noise: " in out
    paths.RECORD.write_text(paths.RECORD.read_text().replace('"holds"', '"open"', 1))
    code, out, _ = grpo("verify", "--no-run", "--json")
    assert code == 1 and json.loads(out)["differences"][0]["place"] == "claims/2/verdict"  # after two published ones


def test_noise_of_runs_draws_and_problems(study: Study) -> None:
    """Scores are drawn independently: a run's mean varies by its draws alone, sqrt(p (1 - p) / 100), and problems do not."""
    said = noise(differences(study, rows_of_file(paths.OUTCOMES))[1])
    drawn = np.sqrt(np.mean([p * (1 - p) / 100 for p in (0.3, 0.6, 0.7)]))
    assert said["draws"] and said["problems"] and said["seeds"] and said["largest"]
    assert said["draws"] == pytest.approx(drawn, rel=0.1) and said["problems"] < drawn
    assert said["seeds"] <= said["largest"]


@pytest.mark.parametrize(
    ("processor", "changed", "agrees"),
    [
        ("of 1 GHz", "", True),
        ("of 1 GHz", "history.csv", False),
        ("another", "history.csv", True),  # bits may differ there, and the end is the same
        ("another", "outcomes.jsonl", False),  # .6 lower
    ],
)
def test_a_run_that_is_trained_again(
    study: Study, monkeypatch: pytest.MonkeyPatch, processor: str, changed: str, agrees: bool
) -> None:
    """Training itself is replaced by a copy of the recorded run, changed in one file."""
    name, calls = f"{SWEEP}/3e-4/0", []

    def trained(there: Path, stage: str, *_: str) -> None:
        calls.append(stage)
        if stage == "train":
            assert not (there / paths.RUNS).exists() and (there / paths.REPORTS / "record.json").exists()
            shutil.copytree(paths.RUNS / name, there / paths.RUNS / name)
            if changed:
                file = there / paths.RUNS / name / changed
                file.write_text(file.read_text().replace("1.0", "0.0"))

    monkeypatch.setattr(verifying, "_grpo", trained)
    monkeypatch.setattr(verifying, "hardware", lambda: {"processor": processor})
    found = verifying.repeat(rows_of_file(paths.OUTCOMES), name)
    assert calls == ["model", "dataset", "train"]  # the project has neither
    assert found["agrees"] is agrees and (changed in found["unlike"] if changed else not found["unlike"])


@pytest.mark.parametrize("why", ["stopped", "start_from", "same_as"])
def test_no_run_is_drawn_that_ended_early_began_elsewhere_or_was_taken_over(study: Study, why: str) -> None:
    rows, timing = rows_of_file(paths.OUTCOMES), read_timing_table().set_index("run").astype({"same_as": object})
    short, long = f"{SWEEP}/1e-4/0", f"{SWEEP}/1e-4/1"
    timing.loc[[short, long], "total_s"] = 1.0, 2.0  # one of two is drawn, the shorter one
    both = {name: rows[name] for name in (short, long)}
    assert verifying._drawn(both, timing) == short
    if why == "same_as":
        timing.loc[short, why] = long
    else:
        both[short] = both[short] | {why: 8.0}
    assert verifying._drawn(both, timing) == long


def test_a_run_is_drawn_whose_rise_the_tolerance_would_miss(study: Study) -> None:
    """The shortest run rose by less than what another processor may change; only where all did, it is drawn."""
    rows, timing = rows_of_file(paths.OUTCOMES), read_timing_table().set_index("run").astype({"same_as": object})
    short, long = f"{SWEEP}/1e-4/0", f"{SWEEP}/1e-4/1"
    timing.loc[[short, long], "total_s"] = 1.0, 2.0
    rose = {
        name: rows[name] | {"start": np.full(100, 0.2), "last": np.full(200, 0.2 + by)}
        for name, by in ((short, 0.26), (long, 0.28))
    }
    assert verifying._drawn(rose, timing) == long
    assert verifying._drawn(rose | {long: rose[short]}, timing) == short


def test_scores_as_text() -> None:
    for values, text in (
        ([0.0, 1.0, 1.0], "011"),
        ([0.5, 1 / 3, -2.0], "0.5 0.3333333333333333 -2.0"),
        ([1.0], "1"),
        ([0.25], "0.25"),
    ):
        assert scores_of(np.array(values)) == text
