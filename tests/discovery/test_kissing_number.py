"""The search for kissing configurations: the command, its log and report, its strategies."""

import itertools
import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_endpoint import BAD, BETTER, GARBAGE, GOOD, KEY, MODEL, Behaviour, FakeEndpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from grpo.commands.kissing_search import run_kissing_number
from grpo.discovery.log import LOG, Attempt, Log, Proposal, SearchSettings, read_log, summarise
from grpo.discovery.sandbox import Limits, run_program
from grpo.discovery.search import Budget
from grpo.discovery.strategies import BASELINE, REFUSED, ROUND, STRATEGIES, TURNS, extract_program, messages_of
from grpo.discovery.verifier import Verification, verify_program, verify_text
from grpo.reporting.kissing_number import draw_search, read_report, write_delivery
from grpo.study import paths
from grpo.study.config import KissingNumber
from grpo.study.schema import Study

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / paths.KISSING_NUMBER
SEARCH = KissingNumber(strategy="conversation", model=MODEL, calls=6, seed=1)
SCRIPT = [BAD, GARBAGE, GOOD, BAD, BETTER, GOOD]
SCORES = [0, 0, 22, 0, 38, 22]


def test_the_committed_program_gives_600_points() -> None:
    points = runpy.run_path(str(COMMITTED))["run_code"]()
    assert len({tuple(point) for point in points}) == 600 and {len(point) for point in points} == {11}
    nearest = min(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) for a, b in itertools.combinations(points, 2))
    assert all(map(any, points)) and nearest >= max(sum(x * x for x in point) for point in points)  # in Python's integers
    verdict = verify_program(COMMITTED)
    assert (verdict.num_points, verdict.combined_score, verdict.message) == (600, 600.0, "")


def test_verify_prints_the_verdict_and_tells_it_by_its_exit_code(
    grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[Limits] = []
    monkeypatch.setattr("grpo.discovery.verifier.run_program", lambda _, *a: limits.append(a[0]) or run_program(_, *a))
    roots = [[6 if k in (i, j) else 0 for k in range(11)] for i, j in ((0, 1), (1, 2))]
    program = tmp_path / "program.py"
    program.write_text(f"points = {roots}")
    code, said, _ = grpo("kissing", "verify", str(program))
    assert code == 0
    whole = {"num_points": 2, "dimension": 11, "validity": 1.0, "combined_score": 2.0, "message": ""}
    assert json.loads(said) == whole
    program.write_text(f"points = {[*roots, [7, 6, 0, 6, 0, 0, 0, 0, 0, 0, 0]]}")
    code, said, _ = grpo("kissing", "verify", str(program), "--seconds", "60", "--memory-mb", "500")
    assert limits == [Limits(30, 30, 2000), Limits(60, 60, 500)]  # of both kinds of time
    assert code == 1 and json.loads(said)["combined_score"] == 0.0
    assert json.loads(said)["message"].startswith("Minimum squared distance 37 < maximum squared norm 121: points 0 ")
    evaluator = [sys.executable, COMMITTED.with_name("evaluator.py"), program]  # as the homework calls it
    done = subprocess.run(evaluator, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout.startswith("num_points: 3\ndimension: 11\nvalidity: 0.0\nmessage: Minimum ")


def attempts_of(*scores: int) -> list[Attempt]:
    """Attempts of one call, 7 tokens and 3 seconds each."""
    proposal = Proposal("points = []", answer="an answer", tokens=7)
    return [Attempt(i, i, "", 1.0, 2.0, proposal, Verification(s, 11, 1.0, float(s), "")) for i, s in enumerate(scores)]


def test_budgets() -> None:
    three = attempts_of(1, 2, 3)
    for budget, reason in (
        (Budget(calls=3), "3 of 3 calls"),
        *((Budget(tokens=n), reason) for n, reason in ((21, "21 of 21 tokens"), (22, ""))),
        *((Budget(seconds=s), reason) for s, reason in ((9.0, "9 of 9 seconds"), (9.5, ""))),
        (Budget(calls=4, seconds=9.5), ""),
    ):
        assert budget.used_up(three) == reason


def test_as_many_points_as_the_committed_program_come_from_the_search() -> None:
    two, settings = Verification(2, 11, 1.0, 2.0, ""), SearchSettings("best_of_n", 1)
    result = summarise(Log(Path("log.json"), settings, attempts_of(1, 2, 2)), "3 of 3 calls", two)
    assert (result["best"], result["best_from"], result["found_at"], result["valid"]) == (2, "search", 1, 3)
    nothing = summarise(Log(Path("log.json"), settings, attempts_of(0)), "1 of 1 calls", Verification(0, None, 0.0, 0.0, "?"))
    assert (nothing["best"], nothing["best_from"], nothing["found_at"]) == (0, "committed program", None)


def answer(request: dict[str, Any]) -> Behaviour:
    """The script's answer by the length of the conversation, so that a search can go on after a kill."""
    return SCRIPT[len(request["messages"]) // 2]


@pytest.fixture(scope="module", autouse=True)
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint(answer) as server, pytest.MonkeyPatch.context() as patch:
        nothing = {"log": lambda *_, **__: None, "artifact": lambda path: path.stat(), "finish": lambda: None}
        patch.setattr("grpo.commands.kissing_search.MlflowRun", lambda *_: SimpleNamespace(**nothing))  # the pipeline writes it
        for name, value in {"BASE_URL": server.url, "API_KEY": KEY}.items():
            patch.setenv(f"OPENAI_{name}", value)
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield server


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
def test_a_killed_stage_goes_on(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt is in the log at once: the rest follow, with the same programs as without a kill."""
    before: list[Attempt] = []

    def verify(program: str) -> Verification:
        for log in paths.KISSING_NUMBER_STATE.glob(f"*/{LOG}"):
            before[:] = read_log(log)[1]
        if len(before) == 3:
            raise KeyboardInterrupt
        return verify_text(program)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("grpo.commands.kissing_search.verify_text", verify)
        run(mini_study, SEARCH)
    result, after = run(mini_study, SEARCH), read_log(paths.CONVERSATION_LOG)[1]
    assert after[:3] == before  # times too: they were not made again
    assert [attempt.score for attempt in after] == SCORES and result["best_of_search"] == 38


FAR_OFF = "Minimum squared distance 36 < maximum squared norm 40: points 3 and 17 of {{ 2 }} & <b>"


REFUSAL = (0, None, None, f"{REFUSED}: HTTP 400: too long")  # what Search.add takes of a prompt that was refused


class Search:
    """A search by a strategy, whose answers score what they are told to."""

    def __init__(self, strategy: str) -> None:
        self.plan, self.attempts = STRATEGIES[strategy], list[Attempt]()

    def held(self) -> tuple[int, ...]:
        """The attempts whose answers the next prompt holds."""
        before = list(self.attempts)
        held = self.plan(self.attempts)
        assert self.attempts == before and self.plan(self.attempts) == held, "not a pure function"
        return held

    def texts(self) -> list[str]:
        """The messages of the next prompt; the user's and the model's in turns, the user's first and last."""
        messages = messages_of(self.attempts, self.held())
        assert [one["role"] for one in messages] == ["user", *["assistant", "user"] * (len(messages) // 2)]
        return [one["content"] for one in messages]

    def add(
        self, points: int, answer: str | None = "an answer", program: str | None = "points = []\n", problem: str = ""
    ) -> None:
        """Take an answer to the next prompt; ``points`` of a valid set, 0 if it failed."""
        proposal = Proposal(program, problem, self.held(), messages=[], answer=answer)
        message = "" if points else problem or FAR_OFF
        verdict = Verification(points, 11 if points else None, float(points > 0), float(points), message)
        index = len(self.attempts)
        self.attempts.append(Attempt(index, index, "2026-01-01T00:00:00+00:00", 1.0, 1.0, proposal, verdict))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_prompt_is_the_baseline(strategy: str) -> None:
    search = Search(strategy)
    assert search.texts() == [BASELINE]
    for part in ("in 11 dimensions", "0 is not in C", r"\geq \max_{x \in C}", "global variable `points`"):
        assert part in BASELINE


def test_a_conversation_keeps_every_answer_and_what_the_evaluator_said() -> None:
    search = Search("conversation")
    search.add(0, "my first try {{ seed }}")
    search.add(0, "I refuse", None, "the answer holds no code block")
    search.add(22, "a cross")
    problem, first, error, second, missing, third, valid = search.texts()
    assert (problem, first, second, third) == (BASELINE, "my first try {{ seed }}", "I refuse", "a cross")
    assert f"`{FAR_OFF}`" in error and "validity: 0.0" in error
    assert "held no program that could be run: the answer holds no code block" in missing
    assert "num_points: 22, dimension: 11, validity: 1.0" in valid and "larger" in valid
    assert search.held() == (0, 1, 2)


@pytest.mark.parametrize(
    ("strategy", "points", "held"),
    [
        ("best_of_n", [0, 22, 30, 0, 22], [()] * 6),
        (  # eight answers, then the first of the best ones
            "conversation",
            [0, 10, 30, 0, 30, 12, 0, 0, 5, 50, 0],
            [*(tuple(range(count)) for count in range(9)), (2,), (2, 9), (2, 9, 10)],
        ),
        ("conversation", [0] * 9, [*(tuple(range(count)) for count in range(9)), ()]),
        ("hybrid", [10, 30, 0, 30, 0, 0, 0, 0, 12, 40, 0, 5], [()] * 4 + [(1,)] * 4 + [(1, 7)] * 4 + [(1, 7, 9)]),
    ],
)
def test_the_attempts_in_each_prompt(strategy: str, points: list[int], held: list[tuple[int, ...]]) -> None:
    assert (TURNS, ROUND) == (8, 4)
    search = Search(strategy)
    for one in points:
        search.add(one)
    assert [*(attempt.proposal.parents for attempt in search.attempts), search.held()] == held


def test_a_hybrid_goes_on_with_a_program_where_all_of_a_round_failed() -> None:
    search = Search("hybrid")
    search.add(0)
    for _ in range(3):
        search.add(0, "no program", None, "the answer holds no code block")
    assert search.held() == (0,)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_attempts_without_an_answer_change_no_prompt(strategy: str) -> None:
    search = Search(strategy)
    for points in (0, 22, 0, 30, 0):
        search.add(points)
    before = search.texts()
    for _ in range(2):
        search.add(0, None, None, "the endpoint did not answer: HTTP 500: oops")
    assert search.texts() == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_prompt_that_was_refused_is_followed_by_shorter_ones(strategy: str) -> None:
    search = Search(strategy)
    for points in (0, 22, 0, 0, 0, 10, 0, 0):
        search.add(points)
    long = search.held()
    search.add(*REFUSAL)
    assert search.held() == ((1,) if len(long) > 1 else ())
    search.add(*REFUSAL)
    assert search.texts() == [BASELINE]
    search.add(5)
    search.add(6)  # it goes on from there, whatever was refused before
    assert len(search.held()) == {"best_of_n": 0, "conversation": 2, "hybrid": 0}[strategy]


PROGRAM = "def run_code():\n    return []\n"
ANSWERS = YAML(typ="safe", pure=True).load(Path(__file__).with_name("programs.yaml"))["answers"]
OTHER = "points = [[1] * 11]\n"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("answer", "program", "reason"), ANSWERS)
def test_program_in_an_answer(answer: str, program: str | None, reason: str) -> None:
    found, why = extract_program(answer)
    assert found == program and reason in why and bool(reason) == bool(why) and "\n" not in why


PARTS = ["```", "```python", "~~~", "<think>", "</think>", PROGRAM, OTHER, "text", "\n", "  ", "`", '"""', "\\", "\0", "\u2028"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=12))
def test_any_answer_holds_a_program_or_a_reason(parts: list[str]) -> None:
    program, why = extract_program("".join(parts))
    assert (program is None) == bool(why)
    assert program is None or program.strip()
