"""What a language model is asked, and which program is taken from its answer."""

from __future__ import annotations

import time

import pytest
from fake_endpoint import CROSS, CROSS_AND_CUBE, TOO_CLOSE
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.discovery.log import Attempt, Proposal
from grpo.discovery.strategies import (
    LONGEST_PROGRAM,
    PATIENCE,
    POPULATION,
    REFUSED,
    ROUND,
    STRATEGIES,
    WITHOUT_BOUNDS,
    extract_program,
)
from grpo.discovery.verifier import Verification

FAR_OFF = "Minimum squared distance 36 < maximum squared norm 40: points 3 and 17 of {{ 2 }} & <b>\n  second line"


def attempt(index: int, points: int = 0, program: str | None = "", message: str = FAR_OFF, answered: bool = True) -> Attempt:
    """An attempt; ``points`` of a valid set, 0 if it failed; ``program``: "" for one of its own."""
    if program == "":
        program = f"points = []  # number {index}\n"
    proposal = Proposal(program, problem="" if program else message, messages=[], answer="an answer" if answered else None)
    verdict = Verification(points, 11 if points else None, float(points > 0), float(points), "" if points else message)
    return Attempt(index, index, "2026-01-01T00:00:00+00:00", 1.0, 1.0, proposal, verdict)


def ask(strategy: str, attempts: list[Attempt], seed: int = 0) -> tuple[tuple[int, ...], str]:
    """The parents and the text of the prompt."""
    before = list(attempts)
    parents, messages = STRATEGIES[strategy](attempts, seed)
    assert attempts == before and STRATEGIES[strategy](attempts, seed) == (parents, messages), "not a pure function"
    assert [message["role"] for message in messages] == ["user"]
    return parents, messages[0]["content"]


PLAIN = ask("simple", [])[1]
PLAIN_OF = {name: ask(f"simple{WITHOUT_BOUNDS}", [])[1] if name.endswith(WITHOUT_BOUNDS) else PLAIN for name in STRATEGIES}

# ---------------------------------------------------------------------------------------------------------- strategies


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_first_prompt_holds_problem_interface_and_bounds(strategy: str) -> None:
    parents, text = ask(strategy, [])
    assert parents == () and text == PLAIN_OF[strategy]
    for part in ("11 integer coordinates", "min ||x - y|| >= max ||x||", "run_code()", "get_centers()", "points", "```python"):
        assert part in text
    assert "has 30 seconds, 2 GB of memory" in text
    for score in ("582", "600", "604", "868"):
        assert (score in text) is not strategy.endswith(WITHOUT_BOUNDS)
    assert "{{" not in text and "{%" not in text and "subset" not in text


def test_simple_feeds_nothing_back() -> None:
    assert ask("simple", [attempt(0), attempt(1, 22)], seed=5) == ((), PLAIN)


def test_refine_shows_the_program_that_failed_and_the_message_word_for_word() -> None:
    parents, text = ask("refine", [attempt(0, 22, CROSS), attempt(1, 0, "points = '{{ seed }} {% if %}'\n")])
    assert parents == (1,)
    assert text.startswith(PLAIN)
    assert FAR_OFF in text and "points = '{{ seed }} {% if %}'" in text
    assert CROSS not in text and "valid set of 22" not in text


def test_refine_asks_for_more_where_the_program_was_valid() -> None:
    parents, text = ask("refine", [attempt(0), attempt(1, 38, CROSS_AND_CUBE)])
    assert parents == (1,) and CROSS_AND_CUBE in text
    assert "valid set of 38 vectors" in text and FAR_OFF not in text


def test_refine_says_that_the_last_answer_held_no_program() -> None:
    cut = attempt(1, 0, None, "the answer was cut")
    parents, text = ask("refine", [attempt(0, 22, CROSS), cut])
    assert parents == (0,) and CROSS in text and "valid set of 22 vectors" in text
    assert "Your last answer held no program that could be run: the answer was cut" in text
    parents, text = ask("refine", [attempt(0, 0, None, "the answer was cut")])
    assert parents == () and "no program that could be run: the answer was cut" in text and "Your last program" not in text


def test_refine_goes_back_to_the_best_program_after_some_answers_without_progress() -> None:
    """The first best set is number 1; then valid sets that are no better, and failures."""
    points = [10, 30, 0, 30, 0, 12, 0, 0, 31, 0]
    attempts = [attempt(index, count, message=f"message {index}") for index, count in enumerate(points)]
    shown = [ask("refine", attempts[:count])[0] for count in range(1, len(points) + 1)]
    assert PATIENCE == 3
    #                 10    30    0     30    0: back 12   0     0: back 31   0
    assert shown == [(0,), (1,), (2,), (3,), (1,), (5,), (6,), (1,), (8,), (9,)]
    text = ask("refine", attempts[:5])[1]
    assert "Go back to the best program" in text and "valid set of 30 vectors" in text and "message 4" in text
    assert "Go back" not in ask("refine", attempts[:4])[1]


def test_refine_has_nowhere_to_go_back_to_while_nothing_is_valid() -> None:
    attempts = [attempt(index) for index in range(8)]
    assert [ask("refine", attempts[:count])[0] for count in range(1, 9)] == [(index,) for index in range(8)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_attempts_without_an_answer_change_no_prompt(strategy: str) -> None:
    answered = [attempt(index, index % 3, f"points = {index}\n") for index in range(5)]
    silent = attempt(5, 0, None, "the endpoint did not answer: HTTP 500: oops", answered=False)
    assert ask(strategy, [*answered, silent, silent], seed=3) == ask(strategy, answered, seed=3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_prompt_that_was_refused_is_followed_by_the_short_one(strategy: str) -> None:
    answered = [attempt(index, 22 + index) for index in range(ROUND)]
    refused = attempt(ROUND, 0, None, f"{REFUSED}: HTTP 400: too long", answered=False)
    assert ask(strategy, [*answered, refused]) == ((), PLAIN_OF[strategy])


@pytest.mark.parametrize("strategy", ["simple", "refine", "best_of_n", "hybrid"])
def test_without_bounds_a_prompt_lacks_what_is_known_and_nothing_else(strategy: str) -> None:
    attempts = [attempt(index, count) for index, count in enumerate([0, 10, 30, 0, 20])]
    for count in range(len(attempts) + 1):
        (parents, told), (same, untold) = (ask(name, attempts[:count]) for name in (strategy, f"{strategy}{WITHOUT_BOUNDS}"))
        missing = [line for line in told.splitlines() if line not in untold.splitlines()]
        assert parents == same and len(missing) == 2 and missing[0].startswith("What is known: 582")
        assert [line for line in untold.splitlines() if line not in told.splitlines()] == []


def test_best_of_n_asks_the_same_in_a_round_and_shows_the_best_of_the_rounds_before() -> None:
    points = [10, 30, 0, 20, 50, 0, 60, 0, 0]
    attempts = [attempt(index, count) for index, count in enumerate(points)]
    prompts = [ask("best_of_n", attempts[:count]) for count in range(len(points) + 1)]
    assert ROUND == 4
    assert [parents for parents, _ in prompts] == [()] * 4 + [(1,)] * 4 + [(6,)] * 2
    assert {text for _, text in prompts[:4]} == {PLAIN}
    assert len({text for _, text in prompts[4:8]}) == 1
    assert "# number 1\n" in prompts[4][1] and "valid set of 30 vectors" in prompts[4][1] and FAR_OFF not in prompts[4][1]
    assert "valid set of 60 vectors" in prompts[8][1]


def test_best_of_n_without_a_valid_program_asks_the_plain_question() -> None:
    assert ask("best_of_n", [attempt(index) for index in range(6)]) == ((), PLAIN)


def test_hybrid_shows_the_best_distinct_programs_and_the_last_failure() -> None:
    attempts = [
        attempt(0, 10),
        attempt(1, 0, message="the first failure"),
        attempt(2, 40, CROSS),
        attempt(3, 40, CROSS),
        attempt(4, 0, message=FAR_OFF),
        attempt(5, 20),
        attempt(6, 30),
    ]
    parents, text = ask("hybrid", attempts)
    assert POPULATION == 3 and sorted(parents) == [2, 5, 6]
    for count in (20, 30, 40):
        assert f"valid set of {count} vectors" in text
    assert "valid set of 10" not in text and text.count(CROSS) == 1
    assert FAR_OFF in text and "the first failure" not in text


def test_hybrid_varies_with_the_seed() -> None:
    """Which program comes first, and among programs of equal scores which ones are shown at all."""
    attempts = [attempt(0, 40), *(attempt(index, 22) for index in range(1, 7))]
    shown = [ask("hybrid", attempts, seed)[0] for seed in range(60)]
    assert all(0 in parents and len(set(parents)) == POPULATION for parents in shown)
    assert {parents[0] for parents in shown} == set(range(7))
    assert ask("hybrid", attempts, 1)[1] != ask("hybrid", attempts, 2)[1]


def test_hybrid_shows_the_failed_program_while_nothing_is_valid() -> None:
    parents, text = ask("hybrid", [attempt(0, 0, TOO_CLOSE), attempt(1, 0, None, "the answer was cut")])
    assert parents == (0,) and TOO_CLOSE in text and "the answer was cut" in text
    parents, text = ask("hybrid", [attempt(0, 0, None, "the answer was cut")])
    assert parents == () and "the answer was cut" in text


@pytest.mark.parametrize(("strategy", "before"), [("refine", 0), ("best_of_n", ROUND - 1), ("hybrid", 0)])
def test_long_programs_are_cut_and_the_prompt_says_so(strategy: str, before: int) -> None:
    long = "x = 1\n" * 10_000 + "points = []\n"
    text = ask(strategy, [*(attempt(index) for index in range(before)), attempt(before, 22, long)])[1]
    assert len(text) < LONGEST_PROGRAM + len(PLAIN) + 1000
    assert f"has {len(long) - 1} characters, of which the first {LONGEST_PROGRAM} are shown" in text
    assert "are shown" not in ask(strategy, [*(attempt(index) for index in range(before)), attempt(before, 22)])[1]


def test_a_program_with_fences_of_its_own_is_shown_whole() -> None:
    fenced = '"""\n```\nexample\n````\n"""\npoints = []\n'
    text = ask("refine", [attempt(0, 22, fenced)])[1]
    assert "\n`````python\n" in text and extract_program(text.removeprefix(PLAIN)) == (fenced, "")


# ---------------------------------------------------------------------------------------------- the program in an answer

PROGRAM = "def run_code():\n    return []\n"
OTHER = "points = [[1] * 11]\n"
USAGE = "points = run_code()\nprint(len(points))\n"
DOCSTRING = 'def run_code():\n    """Such as\n\n```\nrun_code()\n```\n"""\n    return []\n'


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("answer", "program"),
    [
        (f"Text.\n```python\n{PROGRAM}```\nMore text.", PROGRAM),
        (f"```python\n{OTHER}```\nBetter:\n```python\n{PROGRAM}```", PROGRAM),
        (f"```py\n{PROGRAM}```\n```text\npoints = 22\n```", PROGRAM),
        (f"```Python3 title=a.py\n{PROGRAM}\n\n```", PROGRAM),
        (f"```\n{PROGRAM}```", PROGRAM),
        (f"~~~python\n{PROGRAM}~~~", PROGRAM),
        (f"````python\n{PROGRAM}````", PROGRAM),
        (f"```python\r\n{PROGRAM}```\r\n".replace("\n", "\r\n").replace("\r\r", "\r"), PROGRAM),
        ("1. First:\n\n   ```python\n   def run_code():\n       return []\n   ```", PROGRAM),
        (PROGRAM, PROGRAM),
        (f"\n{OTHER}\n\n", OTHER),
        (f"```python\n{PROGRAM}```\nUse it so:\n```python\n{USAGE}```", PROGRAM),
        (f"```python\n{PROGRAM}```\nRun:\n```\n$ python a.py\n```", PROGRAM),
        (f"```\n{PROGRAM}```\nRun:\n```\n$ python a.py\n```", PROGRAM),
        (f"```python\n{PROGRAM}```\n```\nThis gives 582 points.", PROGRAM),
        (f"```\n{PROGRAM}```\n```\nThis gives 582 points.", PROGRAM),
        (f"```python\n{PROGRAM}```\n```python\n", PROGRAM),
        (f"<think>\n```python\n{OTHER}```\n</think>\n```python\n{PROGRAM}```", PROGRAM),
        (f"<think>\n```python\n{OTHER}\n</think>\n```python\n{PROGRAM}```", PROGRAM),
        (f"Let me see.\n```python\nx = [\n</think>\n\n```python\n{PROGRAM}```", PROGRAM),
        (f"<think>I close with </think> soon. Hm.</think>\n```python\n{PROGRAM}```", PROGRAM),
        (f"<think>a</think>\n```python\n{PROGRAM}```\n<think>\n```python\n{OTHER}```\n</think>\nDone.", PROGRAM),
        ("```python\npoints = ['<think>']\n```", "points = ['<think>']\n"),
        (f"<Thinking>a</Thinking><reasoning>b</reasoning>\n{PROGRAM}", PROGRAM),
        ("```python\nif True:\n    points = []\n```", "if True:\n    points = []\n"),
        ('```python\nimport re\npoints = re.findall("\\d", "1")\n```', 'import re\npoints = re.findall("\\d", "1")\n'),
        ("```python\nprint(1)\n```", "print(1)\n"),  # the verifier says what is missing
        ("```python\ns = 'a\u2028b'\npoints = []\n```", "s = 'a\u2028b'\npoints = []\n"),
    ],
)
def test_program_in_an_answer(answer: str, program: str) -> None:
    assert extract_program(answer) == (program, "")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "the answer is empty"),
        (" \n", "the answer is empty"),
        ("I cannot help.", "the answer holds no code block"),
        ("points", "the answer holds no code block"),
        ("print(582)", "the answer holds no code block"),
        ("Use `points = []`.", "the answer holds no code block"),
        ("```python\n```", "the answer holds no code block"),
        (f"```python\n{PROGRAM}", "the answer's last code block is not finished: it has no closing fence"),
        (f"```python\n{OTHER}```\nBetter:\n```python\n{PROGRAM}", "no closing fence"),
        (f"```\n{PROGRAM}", "no closing fence"),
        (f"````python\n{PROGRAM}```", "no closing fence"),
        ("```python\nx = 1\npoints = [1,\n```", "the program does not parse: line 2: '[' was never closed (`points = [1,`)"),
        (f"```python\n{PROGRAM}```\n```python\ndef run_code(:\n```", "the program does not parse: line 1: invalid syntax"),
        ("```python\n  points = 1\n x = 2\n```", "the program does not parse: line 1: unexpected indent"),
        ("```python\npoints = '\\d'\0\n```", "source code string cannot contain null bytes"),  # 3.11.2 puts ValueError before
        (f"```python\npoints = {'-' * 100_000}1\n```", "the program does not parse: it is nested too deeply"),
        (f"```python\n{DOCSTRING}```\nDone.", "the program does not parse: line 2: unterminated triple-quoted"),
        (f"<think>\n```python\n{PROGRAM}```\nBut", "the answer ends within its reasoning"),
        (f"<think>\n```python\n{PROGRAM}```\n</think>\n", "the answer holds no code block"),
    ],
)
def test_why_an_answer_holds_no_program(answer: str, reason: str) -> None:
    program, why = extract_program(answer)
    assert program is None and reason in why and "\n" not in why


PARTS = ["```", "```python", "~~~", "<think>", "</think>", PROGRAM, OTHER, "text", "\n", "  ", "`", '"""', "\\", "\0", "\u2028"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=12))
def test_any_answer_holds_a_program_or_a_reason(parts: list[str]) -> None:
    program, why = extract_program("".join(parts))
    assert (program is None) == bool(why)
    assert program is None or program.strip()


@pytest.mark.parametrize(
    "part", ["```\n", "```python\n", "<think>\n", "</think>", "```\nx\n", f"```python\n{PROGRAM}```\n", "(", "`"]
)
def test_answers_that_repeat_themselves_are_read_at_once(part: str) -> None:
    start = time.process_time()
    extract_program(part * (100_000 // len(part)))
    assert time.process_time() - start < 5
