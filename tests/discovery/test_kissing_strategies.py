"""Prompts to a language model, and the program extracted from its answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.discovery.log import Attempt, Proposal
from grpo.discovery.strategies import BASELINE, REFUSED, ROUND, STRATEGIES, TURNS, extract_program, messages_of
from grpo.discovery.verifier import Verification

FAR_OFF = "Minimum squared distance 36 < maximum squared norm 40: points 3 and 17 of {{ 2 }} & <b>"


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

    def refuse(self) -> None:
        self.add(0, None, None, f"{REFUSED}: HTTP 400: too long")


# ---------------------------------------------------------------------------------------------------------- strategies


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
    search.refuse()
    assert search.held() == ((1,) if len(long) > 1 else ())
    search.refuse()
    assert search.texts() == [BASELINE]
    search.add(5)
    search.add(6)  # it goes on from there, whatever was refused before
    assert len(search.held()) == {"best_of_n": 0, "conversation": 2, "hybrid": 0}[strategy]


# ---------------------------------------------------------------------------------------------- the program in an answer

PROGRAM = "def run_code():\n    return []\n"
OTHER = "points = [[1] * 11]\n"
USAGE = "points = run_code()\nprint(len(points))\n"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("answer", "program", "reason"),
    [
        (f"Text.\n```python\n{PROGRAM}```\nMore text.", PROGRAM, ""),
        (f"```\n{PROGRAM}```", PROGRAM, ""),
        ("1. First:\n\n   ```python\n   def run_code():\n       return []\n   ```", PROGRAM, ""),
        (PROGRAM, PROGRAM, ""),
        (f"```python\n{PROGRAM}```\nUse it so:\n```python\n{USAGE}```", PROGRAM, ""),
        (f"```python\n{PROGRAM}```\n```python\n", PROGRAM, ""),
        (f"<think>\n```python\n{OTHER}```\n</think>\n```python\n{PROGRAM}```", PROGRAM, ""),
        (f"<think>I close with </think> soon. Hm.</think>\n```python\n{PROGRAM}```", PROGRAM, ""),
        (f"<think>a</think>\n```python\n{PROGRAM}```\n<think>\n```python\n{OTHER}```\n</think>\nDone.", PROGRAM, ""),
        ("```python\nprint(1)\n```", "print(1)\n", ""),  # the verifier says what is missing
        ("", None, "is empty"),
        ("I cannot help.", None, "holds no code block"),
        (f"```python\n{PROGRAM}", None, "last code block is not finished: it has no closing fence"),
        (f"````python\n{PROGRAM}```", None, "no closing fence"),
        (f"<think>\n```python\n{PROGRAM}```\nBut", None, "ends within its reasoning"),
    ],
)
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
