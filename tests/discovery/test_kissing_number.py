"""The constructions, the search without a language model, the stage and its section of the write-up."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from grpo.commands.kissing_search import run_kissing_number
from grpo.discovery import mutation
from grpo.discovery.constructions import CORES, build
from grpo.discovery.log import LOG, Attempt, Log, Proposal, Settings, read_log, score_rows, summarise
from grpo.discovery.search import Budget, seed_of
from grpo.discovery.verifier import Verification, verify_program, verify_text
from grpo.reporting.kissing_number import (
    draw_search,
    read_report,
    read_scores,
    section,
    write_delivery,
)
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import KissingNumber

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / paths.KISSING_NUMBER


def is_kissing(points: list[list[int]]) -> bool:
    """The definition, with Python's integers."""
    longest = max(sum(x * x for x in point) for point in points)
    nearest = min(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) for a, b in itertools.combinations(points, 2))
    return all(map(any, points)) and nearest >= longest


def points_of(core: str, completion: dict[str, Any] | None = None, **parameters: Any) -> list[list[int]]:
    return build({"core": core, "parameters": parameters, "completion": completion})


# ------------------------------------------------------------------------------------------------------- constructions


def test_the_committed_program_gives_600_points() -> None:
    points = runpy.run_path(str(COMMITTED))["run_code"]()
    assert len({tuple(point) for point in points}) == 600 and {len(point) for point in points} == {11}
    assert is_kissing(points)
    verdict = verify_program(COMMITTED)
    assert (verdict.num_points, verdict.combined_score, verdict.message) == (600, 600.0, "")


@pytest.mark.parametrize(
    ("core", "parameters", "count"),
    [
        ("orbit", {"vector": [1, 1] + [0] * 9, "seed": 0}, 220),  # the roots of D11: 11 x 10 / 2 x 4
        ("orbit", {"vector": [2] + [0] * 10, "seed": 3}, 22),
        ("code", {"length": 11, "axes": 11, "steps": 1000, "seed": 0}, 582),  # 22 + 35 x 16 (Best 1980)
        ("code", {"length": 10, "axes": 10, "steps": 1000, "seed": 0}, 500),  # 20 + 30 x 16
        ("code", {"length": 8, "axes": 8, "steps": 1000, "seed": 0}, 240),  # 16 + 14 x 16, as many as E8 has
        ("frames", {"shrink": 1e-5, "turn": 0.01, "slack": 0.5, "rays": "cube", "seed": 0}, 600),
        ("frames", {"shrink": 1e-5, "turn": 0.01, "slack": 0.5, "rays": "none", "seed": 0}, 592),
    ],
)
def test_known_numbers(core: str, parameters: dict[str, Any], count: int) -> None:
    points = points_of(core, **parameters)
    assert len(points) == count and is_kissing(points)


@pytest.mark.parametrize("seed", range(4))
def test_every_recipe_gives_a_valid_set(seed: int) -> None:
    rng = Random(seed)
    recipe = mutation.fresh(list(CORES)[seed % len(CORES)], rng)
    for _ in range(3):
        points = build(recipe)
        assert verify_text(f"points = {points}").message == ""
        recipe = mutation.mutate(recipe, rng)


def test_a_completion_adds_what_fits() -> None:
    """Without axes the axis vectors fit beside the blocks, and both ways of choosing find all of them."""
    for method in ("greedy", "clique"):
        completion = {"vector": [2.0] + [0.0] * 10, "method": method, "seed": 1}
        assert len(points_of("code", completion, length=11, axes=0, steps=1000, seed=0)) == 582


# --------------------------------------------------------------------------------------------------------------- search


def attempts_of(*scores: int) -> list[Attempt]:
    recipe = {"core": "orbit", "parameters": {"vector": [1] * 11, "seed": 0}, "completion": None}
    return [
        Attempt(i, i, "", 0.0, 0.0, Proposal("", recipe=recipe | {"mark": i}), Verification(s, 11, 1.0, float(s), ""))
        for i, s in enumerate(scores)
    ]


def test_the_committed_search_is_proposed_again_to_the_last_digit() -> None:
    """A proposal depends on the log so far and the attempt's seed alone."""
    _, attempts = read_log(ROOT / paths.KISSING_NUMBER_DELIVERY / LOG)
    assert len(attempts) == 100
    for index, attempt in enumerate(attempts):
        again = mutation.propose(attempts[:index], seed_of(0, index))
        assert (again.recipe, again.parents) == (attempt.proposal.recipe, attempt.proposal.parents)
    best = max(attempts, key=lambda attempt: attempt.score)
    program = (ROOT / paths.KISSING_NUMBER_DELIVERY / "program.py").read_text()
    assert mutation.program_of(best.proposal.recipe or {}) == program and verify_text(program).combined_score == best.score


def test_a_proposed_program_stands_alone(tmp_path: Path) -> None:
    """It runs without this package."""
    proposal = mutation.propose([], seed_of(0, 0))
    assert proposal.program is not None and "import grpo" not in proposal.program and "from grpo" not in proposal.program
    (tmp_path / "program.py").write_text(proposal.program + "\nprint(len(run_code()))\n")
    command = [sys.executable, "-I", "program.py"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert int(out) == len(build(proposal.recipe or {})) == verify_text(proposal.program).num_points


# -------------------------------------------------------------------------------------------------------- command line


def test_verify_prints_the_verdict_and_tells_it_by_its_exit_code(grpo: Any, tmp_path: Path) -> None:
    roots = [[6 if k in (i, j) else 0 for k in range(11)] for i, j in ((0, 1), (1, 2))]
    program = tmp_path / "program.py"
    program.write_text(f"points = {roots}")
    code, said, _ = grpo("kissing", "verify", str(program))
    assert code == 0
    assert json.loads(said) == {
        "num_points": 2, "dimension": 11, "validity": 1.0, "combined_score": 2.0, "message": ""
    }  # fmt: skip
    program.write_text(f"points = {[*roots, [7, 6, 0, 6, 0, 0, 0, 0, 0, 0, 0]]}")
    code, said, _ = grpo("kissing", "verify", str(program))
    assert code == 1 and json.loads(said)["combined_score"] == 0.0
    assert json.loads(said)["message"].startswith("Minimum squared distance 37 < maximum squared norm 121: points 0 ")
    evaluator = [sys.executable, COMMITTED.with_name("evaluator.py"), program]  # as the homework calls it
    done = subprocess.run(evaluator, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout.startswith("num_points: 3\ndimension: 11\nvalidity: 0.0\nmessage: Minimum ")


# ---------------------------------------------------------------------------------------------------------------- stage


def _with_program(folder: Path) -> Path:
    """The folder, with the committed program in its place."""
    (folder / paths.KISSING_NUMBER).parent.mkdir(parents=True)
    shutil.copy(COMMITTED, folder / paths.KISSING_NUMBER)
    return folder


@pytest.fixture
def study(mini_study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.chdir(_with_program(tmp_path))
    monkeypatch.setattr("grpo.commands.kissing_search.MlflowRun", NoMlflow)
    return mini_study.model_copy(update={"kissing_number": SEARCH})


@pytest.fixture(scope="module")
def made(mini_study: Study, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder in which the stage has run, and what it returned."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(_with_program(folder))
        patch.setattr("grpo.commands.kissing_search.MlflowRun", NoMlflow)
        return folder, run_kissing_number(mini_study.model_copy(update={"kissing_number": SEARCH}))


@pytest.fixture
def report(made: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the stage returned; its files are below the working folder."""
    monkeypatch.chdir(made[0])
    return dict(made[1])


SEARCH = KissingNumber(calls=6, seed=1)


class NoMlflow:
    """Instead of a database in every test; the pipeline's tests write the real one."""

    def __init__(self, *_: object) -> None: ...

    def log(self, *_: object, **__: object) -> None: ...

    def artifact(self, path: Path) -> None:
        assert path.exists()

    def finish(self) -> None: ...


def test_the_stage_writes_program_log_and_scores(report: dict[str, Any]) -> None:
    result = report
    settings, attempts = read_log(paths.CONVERSATION_LOG)
    assert (len(attempts), settings.strategy, settings.seed) == (6, "mutation", 1)
    assert result["best"] == 600 and result["best_from"] == "committed program"
    assert (paths.KISSING_SEARCH / "program.py").read_text() == COMMITTED.read_text()
    assert result["best_of_search"] == max(attempt.score for attempt in attempts) > 0
    assert result == read_report() == json.loads(paths.KISSING_NUMBER_REPORT.read_text())
    assert read_scores().to_dict("records") == score_rows(attempts)
    assert not list(paths.KISSING_NUMBER_STATE.glob("*"))
    assert "No language model was used" in (text := section(result)) and f"found **{result['best_of_search']}** points" in text
    for attempt in attempts:
        assert attempt.proposal.program and attempt.started_at and attempt.verify_s > 0


def test_what_the_search_found_too_is_its_own() -> None:
    """As many points as the committed program's."""
    two = Verification(2, 11, 1.0, 2.0, "")
    attempt = Attempt(0, 1, "", 0.0, 0.0, Proposal("points = []", recipe={"core": "none"}), two)
    found = summarise(Log(Path("log.json"), Settings("mutation", "mutation", 1), [attempt]), "1 of 1 calls", two)
    assert (found["best"], found["best_from"], found["found_at"]) == (2, "search", 0)
    log = Log(Path("log.json"), Settings("mutation", "mutation", 1), attempts_of(3, 5, 5, 4, 6))
    course = [(entry["attempt"], entry["score"]) for entry in summarise(log, "", two)["course"]]
    assert course == [(0, 3), (1, 5), (4, 6)]  # the attempts that improved on all before


def test_a_study_without_a_search_gets_outputs_that_say_so(study: Study) -> None:
    """DVC wants them to be there, and git drops empty folders; the report does not read them."""
    study = study.model_copy(update={"kissing_number": None})
    assert run_kissing_number(study) == json.loads(paths.KISSING_NUMBER_REPORT.read_text()) == {}
    write_delivery(study)
    for folder in (paths.KISSING_SEARCH, paths.CONVERSATION_LOG.parent, paths.KISSING_NUMBER_DELIVERY):
        assert "`kissing_number`" in "".join(path.read_text() for path in folder.iterdir())


def test_a_killed_stage_goes_on(study: Study, made: tuple[Path, Any]) -> None:
    """SIGKILL after some attempts: the rest follow, with the same programs as without it."""
    whole = made[1]
    program = (
        "from grpo.study.schema import load_study; from grpo.commands.kissing_search import run_kissing_number\n"
        "from grpo.study.settings import KissingNumber; from pathlib import Path\n"
        f"study = load_study(Path({str(ROOT / 'params.yaml')!r}))\n"
        "run_kissing_number(study.model_copy(update={'kissing_number': KissingNumber(calls=6, seed=1)}))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (logs := list(paths.KISSING_NUMBER_STATE.glob(f"*/{LOG}"))) or len(read_log(logs[0])[1]) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = read_log(logs[0])[1]
    assert 2 <= len(before) < 6
    result = run_kissing_number(study)
    assert read_log(paths.CONVERSATION_LOG)[1][: len(before)] == before  # times too: they were not made again
    assert result == whole


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (Budget(calls=3), "3 of 3 calls"),
        (Budget(tokens=21), "21 of 21 tokens"),
        (Budget(tokens=22), ""),
        (Budget(seconds=9.0), "9 of 9 seconds"),
        (Budget(seconds=9.5), ""),
        (Budget(calls=4, seconds=9.5), ""),
    ],
)
def test_budgets(budget: Budget, reason: str) -> None:
    """Of three attempts, each of one call, 7 tokens and 3 seconds."""
    attempts = attempts_of(1, 2, 3)
    each = [replace(a, propose_s=1.0, verify_s=2.0, proposal=replace(a.proposal, tokens=7)) for a in attempts]
    assert budget.used_up(each) == reason


# --------------------------------------------------------------------------------------------------------------- report


def test_the_figure_shows_every_attempt(report: dict[str, Any]) -> None:
    dots = [line for line in draw_search(report, read_scores()).axes[0].lines if line.get_marker() == "o"]
    drawn = sorted((x, y) for line in dots for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert drawn == sorted((row["attempt"], row["score"]) for row in read_scores().to_dict("records"))
