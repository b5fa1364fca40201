"""No text of a model or of a stranger takes a reader of texts more than a moment, however it repeats itself."""

from __future__ import annotations

import inspect
import pkgutil
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import product
from time import process_time
from typing import Any

import pytest

import grpo
from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.tasks.downloaded import Gsm8k, Math
from grpo.tasks.formats import CHAT
from grpo.tasks.graded import GradedTask
from grpo.tasks.keyword_inclusion import Keyword
from grpo.tasks.rows import LocalFiles, Row

LENGTH = 30_000
SECONDS = 0.5  # of CPU; linear readers take hundredths, quadratic ones minutes
UNITS = [
    " ", "\t", "\n", "\r\n", " \n", "`", "~", "```\n", "`\n", "1", "1 ", "1,", "0.", "9/", "-1 ", "1 + ", "1 + 1 = ", "a",
    "é", "(", "[", "{", "{}", "}", "\\boxed{", "\\boxed {{}", "\\frac{1}{", "<", "<<", "<think>", "<think>\n", "</think>",
    "</think> <answer>", "<answer>", "</answer>", "####", "|", "| a ", "-", "- ", "> ", "^", "$", "*", "**a", "_", "![",
    "[a](", "](b)", "\\", "\\,", "&", "points:", "points = ", "points: a = ", "def run_code", ":", "=", "=\n", "apple",
    "apple, ", ".", "\u2028", "\x1b[", "\x00", "<a ", "<!--", "&#",
]  # fmt: skip
# What may stand before and after: the beginning of something that the repeated text never ends.
BEFORE = ["", "x", "```", "points:", "1", "</think> <answer>", "\\boxed{", "<<", "Level "]
AFTER = ["", "x", "`\n", "}"]
GIVEN = {"ground_truth": "1", "truth": "1", "keywords": ["apple", "red"], "arms": ["a"]}  # beside the text
NAMES = {"response", "answer", "text", "question", "reply", "message"}
ELSEWHERE = {"grpo.discovery.verifier.verify_text"}  # in a process with limits


def texts() -> Iterator[str]:
    rng = random.Random(0)
    for before, unit, after in [*product([""], UNITS, ["x", "`\n"]), *product(BEFORE, [" ", "1", "~"], AFTER)]:
        yield before + unit * (LENGTH // len(unit)) + after
    for _ in range(20):
        yield "".join(rng.choices(UNITS, k=LENGTH // 4))


def readers() -> dict[str, Callable[[str], Any]]:
    """Public functions that take a text first, but for those of the grader, and further readers by name."""
    found: dict[str, Callable[[str], Any]] = {}
    for module in pkgutil.walk_packages(grpo.__path__, "grpo."):
        if module.name.startswith("grpo.grader") or module.name.endswith("__main__"):
            continue
        for name, function in inspect.getmembers(import_module(module.name), inspect.isfunction):
            first, *others = [*inspect.signature(function).parameters.values(), None]
            given = {one.name: GIVEN.get(one.name) for one in others if one and one.default is one.empty and one.kind < 2}
            takes_text = first and first.name in NAMES and "str" in str(first.annotation) and None not in given.values()
            if takes_text and function.__module__ == module.name and name[0] != "_":
                found[f"{module.name}.{name}"] = partial(function, **given)
    problem = Problem("1", "apple, red", "apple, red")
    gsm8k, math = (kind(source=LocalFiles(train="a", validation="b")) for kind in (Gsm8k, Math))
    row = {"problem": "1 + 1 = ?", "subject": "", "answer": "2"}
    return found | {
        "Keyword.verify": lambda text: Keyword(0).verify([text], [problem]),
        "Keyword.pieces": Keyword(0).pieces,
        "Format.question_of": CHAT.question_of,
        "GradedTask.rewrite": lambda text: GradedTask().rewrite(text, "r1_zero", "chat"),
        "Gsm8k.solution": lambda text: gsm8k.solution(Row("", {"answer": f"{text}#### 1"}, "")),
        "Math.problem": lambda text: math.problem(Row("", row | {"level": text}, ""), "train", 0),
    }


READERS = {name: read for name, read in readers().items() if name not in ELSEWHERE}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_text_takes_linear_time(name: str) -> None:
    for text in ("", *texts()):  # the first call imports what the reader needs
        start = process_time()
        with suppress(UserError, ValueError, RecursionError):
            READERS[name](text)
        assert not text or process_time() - start < SECONDS, text[:20]
