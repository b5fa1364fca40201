"""The committed program, the budget of a search, the stage with and without a language model, and its report."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_endpoint import BAD, BETTER, GARBAGE, GOOD, KEY, MODEL, Behaviour, FakeEndpoint

from grpo.commands.kissing_search import run_kissing_number
from grpo.discovery.log import LOG, Attempt, Log, Proposal, Settings, read_log, summarise
from grpo.discovery.search import Budget
from grpo.discovery.verifier import Verification, verify_program
from grpo.reporting.kissing_number import draw_search, read_report, write_delivery
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import KissingNumber

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / paths.KISSING_NUMBER
SEARCH = KissingNumber(strategy="conversation", calls=6, seed=1)
SCRIPT = [BAD, GARBAGE, GOOD, BAD, BETTER, GOOD]
SCORES = [0, 0, 22, 0, 38, 22]


def is_kissing(points: list[list[int]]) -> bool:
    """The definition, with Python's integers."""
    longest = max(sum(x * x for x in point) for point in points)
    nearest = min(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) for a, b in itertools.combinations(points, 2))
    return all(map(any, points)) and nearest >= longest


def test_the_committed_program_gives_600_points() -> None:
    points = runpy.run_path(str(COMMITTED))["run_code"]()
    assert len({tuple(point) for point in points}) == 600 and {len(point) for point in points} == {11}
    assert is_kissing(points)
    verdict = verify_program(COMMITTED)
    assert (verdict.num_points, verdict.combined_score, verdict.message) == (600, 600.0, "")


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


# ---------------------------------------------------------------------------------------------------------------- search


def attempts_of(*scores: int) -> list[Attempt]:
    """Attempts of one call, 7 tokens and 3 seconds each."""
    proposal = Proposal("points = []", answer="an answer", tokens=7)
    return [Attempt(i, i, "", 1.0, 2.0, proposal, Verification(s, 11, 1.0, float(s), "")) for i, s in enumerate(scores)]


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
    assert budget.used_up(attempts_of(1, 2, 3)) == reason


def test_as_many_points_as_the_committed_program_come_from_the_search() -> None:
    two, settings = Verification(2, 11, 1.0, 2.0, ""), Settings("best_of_n", 1)
    result = summarise(Log(Path("log.json"), settings, attempts_of(1, 2, 2)), "3 of 3 calls", two)
    assert (result["best"], result["best_from"], result["found_at"], result["valid"]) == (2, "search", 1, 3)
    nothing = summarise(Log(Path("log.json"), settings, attempts_of(0)), "1 of 1 calls", Verification(0, None, 0.0, 0.0, "?"))
    assert (nothing["best"], nothing["best_from"], nothing["found_at"]) == (0, "committed program", None)


# ---------------------------------------------------------------------------------------------------------------- stage


def answer(request: dict[str, Any]) -> Behaviour:
    """The script's answer by the length of the conversation, so that a search can go on after a kill."""
    return SCRIPT[len(request["messages"]) // 2]


@pytest.fixture(scope="module", autouse=True)
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint(answer) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.commands.kissing_search.MlflowRun", NoMlflow)
        for name, value in {"BASE_URL": server.url, "MODEL": MODEL, "API_KEY": KEY}.items():
            patch.setenv(f"OPENAI_{name}", value)
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield server


class NoMlflow:
    """Instead of a database in every test; the pipeline's tests write the real one."""

    def __init__(self, *_: object) -> None: ...

    def log(self, *_: object, **__: object) -> None: ...

    def artifact(self, path: Path) -> None:
        assert path.exists()

    def finish(self) -> None: ...


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the committed program in its place."""
    (tmp_path / paths.KISSING_NUMBER).parent.mkdir(parents=True)
    shutil.copy(COMMITTED, tmp_path / paths.KISSING_NUMBER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(study: Study, search: KissingNumber | None) -> dict[str, Any]:
    """Run the stage and write the deliverables; returns what the stage did."""
    study = study.model_copy(update={"kissing_number": search})
    result = run_kissing_number(study)
    write_delivery(study)
    assert result == json.loads(paths.KISSING_NUMBER_REPORT.read_text())
    return result


@pytest.mark.usefixtures("folder")
def test_a_search_writes_program_log_and_report(mini_study: Study) -> None:
    result = run(mini_study, SEARCH)
    assert result == read_report()
    settings, attempts = read_log(paths.CONVERSATION_LOG)
    assert (settings.strategy, settings.seed, settings.model) == ("conversation", 1, MODEL)
    assert [attempt.score for attempt in attempts] == SCORES and all(attempt.started_at for attempt in attempts)
    assert (result["best"], result["best_from"], result["best_of_search"]) == (600, "committed program", 38)
    assert (result["attempts"], result["valid"], result["found_at"]) == (6, 3, 4)
    assert not list(paths.KISSING_NUMBER_STATE.glob("*"))
    delivered = paths.KISSING_NUMBER_DELIVERY
    assert (delivered / "program.py").read_text() == (paths.KISSING_SEARCH / "program.py").read_text() == COMMITTED.read_text()
    assert (delivered / LOG).read_bytes() == paths.CONVERSATION_LOG.read_bytes()
    text = (delivered / "report.md").read_text()
    assert f"model {MODEL}" in text and "found **38** points" in text and "no language model" not in text.lower()
    assert "| 2 | 22 | 0, 1 |\n| 4 | 38 | 0, 1, 2, 3 |" in text  # the course
    assert "2 of 3 gave a valid set" in text and "0 of 2 gave a larger one" in text
    assert "points = [[2] + [0] * 10" in text  # an answer within a later prompt

    figure = draw_search()
    assert figure is not None
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert sorted((x, y) for line in dots for x, y in zip(*line.get_data(), strict=True)) == list(enumerate(SCORES))


@pytest.mark.usefixtures("folder")
def test_without_a_strategy_the_committed_program_is_checked(mini_study: Study, endpoint: FakeEndpoint) -> None:
    before = len(endpoint.requests)
    result = run(mini_study, KissingNumber())
    assert (result["best"], result["best_from"], result["attempts"]) == (600, "committed program", 0)
    assert len(endpoint.requests) == before and draw_search() is None and read_report() == result
    assert (paths.KISSING_NUMBER_DELIVERY / "program.py").read_text() == COMMITTED.read_text()
    text = (paths.KISSING_NUMBER_DELIVERY / "report.md").read_text()
    assert "No search ran, as it needs a language model" in text and "program gives **600**" in text
    assert "figures/" not in text and json.loads((paths.KISSING_NUMBER_DELIVERY / LOG).read_text())["attempts"] == []


@pytest.mark.usefixtures("folder")
def test_a_study_without_the_stage_gets_outputs_that_say_so(mini_study: Study) -> None:
    """DVC wants them to be there, and git drops empty folders; the report does not read them."""
    assert run(mini_study, None) == {}
    for folder in (paths.KISSING_SEARCH, paths.CONVERSATION_LOG.parent, paths.KISSING_NUMBER_DELIVERY):
        assert "`kissing_number`" in "".join(path.read_text() for path in folder.iterdir())


@pytest.mark.usefixtures("folder")
def test_a_killed_stage_goes_on(mini_study: Study, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL after some attempts: the rest follow, with the same programs as without it."""
    program = (
        "from grpo.study.schema import load_study; from grpo.commands.kissing_search import run_kissing_number\n"
        "from grpo.study.settings import KissingNumber; from pathlib import Path\n"
        f"study = load_study(Path({str(ROOT / 'params.yaml')!r}))\n"
        f"search = KissingNumber(**{SEARCH.model_dump()!r})\n"
        "run_kissing_number(study.model_copy(update={'kissing_number': search}))\n"
    )
    kept_from, hang = len(endpoint.requests), Behaviour(after_s=60.0)
    monkeypatch.setattr(endpoint, "_script", lambda request: hang if len(request["messages"]) > 6 else answer(request))
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(endpoint.requests) < kept_from + 4:  # three attempts are in the log
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (log,) = paths.KISSING_NUMBER_STATE.glob(f"*/{LOG}")
    before = read_log(log)[1]
    assert len(before) == 3
    monkeypatch.setattr(endpoint, "_script", answer)
    result = run(mini_study, SEARCH)
    after = read_log(paths.CONVERSATION_LOG)[1]
    assert after[:3] == before  # times too: they were not made again
    assert [attempt.score for attempt in after] == SCORES and result["best_of_search"] == 38
