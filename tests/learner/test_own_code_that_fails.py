"""An exception in a study's own code is one message with its place; exhausted memory is passed on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo.common import imports
from grpo.common.errors import UserError
from grpo.common.imports import import_object
from grpo.common.records import Completion, Problem
from grpo.learner.advantages import own_advantages
from grpo.learner.losses import bind_loss
from grpo.tasks.rewards import apply_reward
from grpo.tasks.task import ScoredBatch, make_task

CODE = """\
import json
from grpo.tasks import Format, Task
def reward(completions, **columns): return [{}["level"] for one in completions]
async def later(completions, **columns): return json.loads("no")
def advantage(rewards, lengths): return rewards @ lengths
def loss(inputs): return 1 / 0
def full(completions, **columns): raise MemoryError
def ends(completions, **columns): raise SystemExit(0)
class Fails(Task):
    formats = {"plain": Format("{question}")}
    def problems(self, split): return []
    def verify(self, answers, problems): return [answers[9]]
class Refuses(Task):
    def __init__(self): open("rows.txt")
"""
PROBLEMS = [Problem("p/0", "1 + 1?", "2")]
SCORED = ScoredBatch([{"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}], [False])


@pytest.fixture
def folder(tmp_path: Path) -> None:
    (tmp_path / "fails_here.py").write_text(CODE)
    (tmp_path / "fails_at_once.py").write_text("import json\n1 / 0\n")
    (tmp_path / "no_python.py").write_text("x = 1\ny = = 2\n")
    imports.search_in(tmp_path)


def reward(name: str) -> ScoredBatch:
    return apply_reward(f"fails_here:{name}", ["A"], [Completion((1,), "a", (0.0,), "stop")], PROBLEMS, SCORED)


ONES = torch.ones(2, 3)
CASES: list[tuple[Callable[[], object], str, str]] = [
    (lambda: reward("reward"), "reward: fails_here:reward: ", "fails_here.py:3: KeyError: 'level'"),
    (lambda: reward("later"), "reward: fails_here:later: ", "fails_here.py:4: JSONDecodeError: "),
    (lambda: reward("ends"), "reward: fails_here:ends: ", "fails_here.py:8 ends the program (exit code 0)"),
    (
        lambda: own_advantages("fails_here:advantage", {}, ONES, ONES),
        "advantage: fails_here:advantage: ",
        ".py:5: RuntimeError: ",
    ),
    (lambda: bind_loss("fails_here:loss", {}), "loss_type: fails_here:loss: ", "fails_here.py:6: ZeroDivisionError: "),
    (
        lambda: make_task({"use": "fails_here:Fails"}, "tasks.main").score("plain", PROBLEMS, ["2"]),
        "",
        "fails_here.py:12: IndexError: ",
    ),
    (lambda: make_task({"use": "fails_here:Refuses"}, "tasks.main"), "tasks.main: ", "fails_here.py:14: FileNotFoundError: "),
    (lambda: import_object("fails_at_once:x"), "fails_at_once:x: ", "fails_at_once.py:2: ZeroDivisionError: "),
    (lambda: import_object("no_python:x"), "no_python:x: ", "no_python.py:2: SyntaxError: "),
]


@pytest.mark.parametrize(("call", "begins", "place"), CASES, ids=[place for _, _, place in CASES])
def test_an_exception_is_told_by_its_place(call: Callable[[], object], begins: str, place: str, folder: None) -> None:
    with pytest.raises(UserError) as told:
        call()
    message = str(told.value)
    assert message.startswith(begins) and place in message and "\n" not in message


def test_exhausted_memory_is_no_mistake_of_the_code(folder: None) -> None:
    with pytest.raises(MemoryError):
        reward("full")
