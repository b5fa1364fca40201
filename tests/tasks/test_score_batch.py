"""Rewards of responses, one by one and in batches, against verdicts by hand: tricks, truths, answers that take too long."""

from __future__ import annotations

import subprocess
import sys
import threading
import timeit
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from training_parts import setup_of

from grpo.common.errors import UserError
from grpo.common.records import Completion, Problem, Rollout
from grpo.evaluation.evaluate import OTHER, category, summarize
from grpo.grader import process
from grpo.grader.extract import last_boxed
from grpo.grader.grader import cheap_verdict, check_ground_truth, full_verdict, is_equivalent
from grpo.grader.process import Grade, GraderProcess, grade_batch
from grpo.grader.symbolic import too_complex
from grpo.rollout.sampling import score_rollouts
from grpo.study.config import GrpoConfig
from grpo.tasks.graded import GradedTask
from grpo.tasks.rewards import question_only_reward_fn, r1_zero_reward_fn, score_by_task
from grpo.tasks.task import Format, ScoredBatch, Task
from grpo.training import step

RIGHT, WRONG, TIMED_OUT = Grade(True), Grade(False), Grade(False, timed_out=True)

ZERO = {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}
FORM_ONLY = ZERO | {"format_reward": 1.0}
FULL = {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}

REWARD_FNS = {"r1_zero": r1_zero_reward_fn, "question_only": question_only_reward_fn}


def score(format: str, responses: Sequence[str], truths: Sequence[str]) -> ScoredBatch:
    return GradedTask().score(format, [Problem("p", "q", truth) for truth in truths], responses)


PROMPT = (Path(process.__file__).parents[1] / "tasks/prompts" / "r1_zero.prompt").read_text()
RESPONSES = {
    "r1_zero": [
        ("</think> <answer>5</answer>", "5", FULL), (PROMPT + " 2+3 </think> <answer>5</answer>", "5", FULL),
        (PROMPT, "5", ZERO), (PROMPT, "answer here", ZERO), (PROMPT + " it is 5", "answer here", ZERO),
        (PROMPT + "</think> <answer>5", "5", ZERO), ("5 </answer> </think> <answer>5", "5", ZERO),
        ("</think> <answer>4</answer>5</answer>", "5", FORM_ONLY), ("</think> <answer>4</answer>5</answer>", "45", FORM_ONLY),
        ("</think> <answer>5<answer>4</answer></answer>", "5", FORM_ONLY), ("</think> <answer> </answer>", "5", FORM_ONLY),
        ("</think> <answer>4 or 5 or 6</answer>", "5", FORM_ONLY), ("</think> <answer>4, 5</answer>", "5", FORM_ONLY),
        (r"</think> <answer>\boxed{5} \boxed{4}</answer>", "5", FORM_ONLY), ("<answer>5</answer> </think> <answer>", "5", ZERO),
        (r"</think> <answer>\frac{\sqrt2}{2}</answer>", ["1", r"\frac{1}{\sqrt{2}}"], FULL),
        (r"</think> <answer>\sqrt{5}</answer>", (5, 2.5), FORM_ONLY), ("", "5", ZERO), ("5", "5", ZERO),
        (r"</think> <answer> \boxed{5} </answer>", "5", FULL), ("</think> <answer>6</answer>", "5", FORM_ONLY),
        ("</think> <answer>5</answer></answer>", "5", FULL), ("</think> <answer>5</answer>\n</answer> so", "5", FULL),
        ("</think> <answer>6</answer></answer>", "5", FORM_ONLY), ("</think> <answer>5</answer> or </answer>", "5", FORM_ONLY),
        ("</think> <answer>6</answer> no: <answer>5</answer>", "5", FULL), ("</think> <answer>5</answer> end", "5", FULL),
        ("<answer>5</answer>", "5", ZERO), ("</think><answer>5</answer>", "5", ZERO), (r"\boxed{5}", "5", ZERO),
        ("</think> <answer>5</answer> and <answer>5", "5", ZERO), ("</think> <answer>2+3</answer>", "5", FORM_ONLY),
    ],
    "question_only": [
        (r"\boxed{4} or \boxed{5}", "5", FORM_ONLY), (r"\boxed{5} and \boxed{5}", "5", FULL), (r"\fbox{5}", "5", FULL),
        (r"\boxed{5", "5", ZERO), ("</think> <answer>5</answer>", "5", ZERO), (r"\boxed{4}, no: \boxed{5}", "5", FULL),
        (r"\boxed{5}, no: \boxed{4}", "5", FORM_ONLY), (r"\boxed{}", "5", FORM_ONLY),
        (r"\boxed{4 or 5}", "5", FORM_ONLY), ("5", "5", ZERO), (r"\boxed{5}\boxed{", "5", ZERO),
        (r"\boxed{x(x+2)}", "x^2+2x", FULL), (r"\boxed{0.2}", Fraction(1, 5), FULL),
    ],
}  # fmt: skip


@pytest.mark.parametrize("prompt", ["r1_zero", "question_only"])
def test_a_batch_is_rewarded_like_its_responses_one_by_one(prompt: str) -> None:
    responses, truths, rewards = map(list, zip(*RESPONSES[prompt] * 3, strict=True))
    assert [REWARD_FNS[prompt](r, t) for r, t in zip(responses, truths, strict=True)] == rewards
    assert REWARD_FNS[prompt](responses[0], truths[0], fast=False) == rewards[0]
    texts = [(r, t, reward) for r, t, reward in zip(responses, truths, rewards, strict=True) if isinstance(t, str)]
    responses, truths, rewards = map(list, zip(*texts, strict=True))
    batch = score(prompt, responses, truths)
    assert batch.rewards == rewards
    assert not any(batch.out_of_time)
    assert len({id(reward) for reward in batch.rewards}) == len(rewards)  # changing one changes no other


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (0.1, "0.1"), (5.0, "5"), (1e-07, "0.0000001"), (1e22, "10000000000000000000000"), (-0.0, "0"), (Fraction(1, 3), "1/3"),
        (7, "7"), ([3, 4.0, "x"], "4"), ((3, 4), "3"), (10**400, "1" + "0" * 400),
    ],
)  # fmt: skip
def test_ground_truths_may_be_numbers(truth: object, answer: str) -> None:
    assert REWARD_FNS["question_only"](rf"\boxed{{{answer}}}", truth) == FULL
    assert REWARD_FNS["question_only"](rf"\boxed{{{answer}1}}", truth) == FORM_ONLY


def test_a_batch_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        score("r1_zero", ["", ""], ["5"])
    with pytest.raises(UserError, match=r"no_such_prompt: no such format .*r1_zero, question_only"):
        score("no_such_prompt", [], [])


def test_integers_start_no_process_and_cheap_verdicts_import_no_computer_algebra() -> None:
    script = """
import os, sys
from grpo.common.records import Problem
from grpo.tasks.graded import GradedTask
from grpo.tasks.rewards import r1_zero_reward_fn
responses = [f"</think> <answer>{i}</answer>" for i in range(5000)]
assert r1_zero_reward_fn(responses[7], 7)["reward"] == 1.0
problems = [Problem("p", "q", str(i // 2)) for i in range(5000)]
assert sum(r["reward"] for r in GradedTask().score("r1_zero", problems, responses).rewards) == 1
from grpo.grader.grader import cheap_verdict
assert cheap_verdict("1/2", "0.5") and cheap_verdict("2x^2+4x", "2x(x+2)") and cheap_verdict("x>3", "(3,oo)")
assert not {"sympy", "math_verify", "torch"} & set(sys.modules)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    sys.exit(0)
sys.exit("there is a child process")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# Notes each call in a file beside it. An answer is equal if it is the truth; "endless" takes forever.
NOTING = """
from pathlib import Path

calls = Path(__file__).with_name("calls")

def grade(answer, truth):
    with calls.open("a") as file:
        file.write(answer + "\\n")
    while answer == "endless":
        pass
    return answer == truth
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Make the default process run NOTING, without shortcuts before it; the result lists its calls."""
    (tmp_path / "noting.py").write_text(NOTING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "cheap_verdict", lambda answer, truth: None)
    grader = GraderProcess("noting:grade", time_limit_s=0.1)
    monkeypatch.setattr(process, "default_process", lambda: grader)
    yield lambda: (tmp_path / "calls").read_text().split()
    grader.end()


def test_equal_pairs_of_a_batch_are_graded_once(calls: Callable[[], list[str]]) -> None:
    pairs = [("a", "a"), ("b", "a"), ("a", "a"), ("c", "c"), ("a", "a"), ("endless", "a"), ("endless", "a")]
    assert grade_batch(pairs) == [RIGHT, WRONG, RIGHT, RIGHT, RIGHT, TIMED_OUT, TIMED_OUT]
    assert sorted(calls()) == ["a", "b", "c", "endless"]
    assert grade_batch([]) == []


def test_training_and_evaluation_count_the_answers_that_ran_out_of_time(calls: Callable[[], list[str]]) -> None:
    answers = ["1", "endless", "2", "endless"]
    completions = [Completion((7,), rf"\boxed{{{answer}}}", (0.0,), "stop") for answer in answers]
    config = GrpoConfig(rollout_batch_size=4, train_batch_size=4, group_size=2, gradient_accumulation_steps=1)
    reward = partial(score_by_task, GradedTask(), "question_only")
    sampled = [Rollout(Problem("p", "q", "1"), (5,), completion) for completion in completions]
    _, metrics = step.rewards_and_advantages(setup_of(config, score=reward), sampled)
    assert [rollout.rewards["reward"] for rollout in sampled] == [1.0, 0.0, 0.0, 0.0]
    # Of the first group 1 and 0: half a reward from the mean, and a standard deviation of sqrt(1/2). The second has no signal.
    assert [rollout.advantage for rollout in sampled] == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0, 0.0], abs=1e-5)
    assert [rollout.timed_out for rollout in sampled] == [False, True, False, True]
    assert metrics["train/grader_timeouts"] == 2
    again = [Rollout(Problem("p", "q", "1"), (5,), completion) for completion in completions]
    score_rollouts(reward, again)
    assert summarize(again)["grader_timeouts"] == 2
    assert sorted(calls()) == ["1", "1", "2", "2", "endless", "endless"]  # each once a batch: nothing is graded one by one


class Sharing(Task):
    """The score of an answer is the share of the truth that it is as long as; what is longer cannot be judged in time."""

    formats = {"plain": Format("{question}")}

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        shares = [len(answer) / len(problem.ground_truth) for answer, problem in zip(answers, problems, strict=True)]
        return [share if share <= 1 else float("nan") for share in shares]


def test_a_verifier_may_give_parts_of_a_reward_and_run_out_of_time() -> None:
    asked = [Problem("p", "q", truth) for truth in ("abcd", "abc", "ab", "ab")]
    scored = Sharing().score("plain", asked, ["a", "abc", "abc", " "])
    assert [reward["reward"] for reward in scored.rewards] == [0.25, 1.0, 0.0, 0.0]
    assert [reward["answer_reward"] for reward in scored.rewards] == [0.25, 1.0, 0.0, 0.0]
    assert [reward["format_reward"] for reward in scored.rewards] == [1.0, 1.0, 1.0, 0.0]
    assert scored.out_of_time == [False, False, True, False]


@pytest.mark.parametrize(
    ("sum_of_parts", "score"),
    [
        *((sum([0.1] * 10), 1.0), (0.7 + 0.2 + 0.1 + 3e-16, 1.0), (0.1 + 0.2 - 0.3, 0.0)),
        *((sum([np.float32(0.1)] * 10), 1.0), (sum([torch.tensor(0.1)] * 10), 1.0)),
    ],
)
def test_a_score_that_rounding_keeps_from_0_or_1_is_0_or_1(
    monkeypatch: pytest.MonkeyPatch, sum_of_parts: float, score: float
) -> None:
    """So it counts as right, and is not refused as more than 1."""
    assert sum_of_parts != score
    monkeypatch.setattr(Sharing, "verify", lambda *_: [sum_of_parts])
    (rewards,) = Sharing().score("plain", [Problem("p", "q", "a")], ["a"]).rewards
    assert rewards == {"format_reward": 1.0, "answer_reward": score, "reward": score}
    assert category(rewards | {"answer_reward": sum_of_parts}) == category(rewards) != OTHER


@pytest.mark.parametrize("scores", [[], [0.5, 0.5], [1.5], [-0.1], [float("inf")]])
def test_a_verifier_that_gives_something_else_is_named(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> None:
    monkeypatch.setattr(Sharing, "verify", lambda *_: scores)
    with pytest.raises(UserError, match=r"Sharing\.verify: expected a number from 0 to 1, or NaN, for each of 1 answers"):
        Sharing().score("plain", [Problem("p", "q", "a")], ["a"])


# --------------------------------------------------------------------------------------------------------- the grader by itself


VERDICTS = YAML(typ="safe", pure=True).load(Path(__file__).with_name("verdicts.yaml"))


def test_what_only_computer_algebra_reads_is_left_open() -> None:
    assert cheap_verdict(r"\sec^{-1}(2)", r"\frac{\pi}{3}") is None
    assert full_verdict(r"\sec^{-1}(2)", r"\frac{\pi}{3}")
    assert not full_verdict(r"\max(5,4)", "5")


def test_integers_take_under_20_microseconds() -> None:
    calls = 2000
    best = min(timeit.repeat(lambda: is_equivalent("1234", "1235"), number=calls, repeat=5))
    assert best / calls < 20e-6


PIECES = [
    r"\frac", "{", "}", "(", ")", "[", "]", ",", "1", "23", "x", "^", "_", "-", "=", "\\", r"\text{", "or ", "and ", " ", ".",
    r"\sqrt", "!", "%", "$", r"\left", r"\cup", r"\pm", r"\{", "\x00", "\n", "①", "²", "<", "units", r"\circ", r"\$", "\ud800",
    "9^9", r"\begin{pmatrix}", "&",
]  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    answer=st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    truth=st.sampled_from(["5", "(1,2)", "x^2+1", "1,2"]),
)
def test_no_string_makes_the_grader_raise(answer: str, truth: str) -> None:
    assert is_equivalent(answer, truth) in (True, False)
    assert is_equivalent(truth, answer) in (True, False)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^9}", "100000!", "2^{99999}", "((x+1)^{99})^{99}", "(" * 20 + "x" + ")" * 20, "x+" * 200, r"\sum_{n=1}^{9} n",
        "1" * 60,
    ],
)  # fmt: skip
def test_the_gate_keeps_hostile_expressions_from_the_parser(text: str) -> None:
    assert too_complex(text)


def test_symbolic_comparison_works_outside_the_main_thread() -> None:
    results: list[bool] = []
    pairs = [(r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"), (r"\sqrt{3}", r"\sqrt{2}")]
    thread = threading.Thread(target=lambda: results.extend(is_equivalent(a, t) for a, t in pairs))
    thread.start()
    thread.join()
    assert results == [True, False]


@pytest.mark.parametrize("truth", VERDICTS["unusable_truths"])
def test_unusable_ground_truths_are_refused(truth: str) -> None:
    with pytest.raises(UserError):
        check_ground_truth(truth)


@pytest.mark.parametrize("truth", VERDICTS["usual_truths"])
def test_usual_ground_truths_are_accepted(truth: str) -> None:
    check_ground_truth(truth)
    assert is_equivalent(truth, truth)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"), (r"\boxed{1} then \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"), (r"\fbox{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed 5$.", "5"), (r"\boxed{}", ""), ("none", None), (r"\boxed", None),
        (r"\boxed{1} and \boxed{2", None), (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        (r"\boxed{1}, \boxed{2}, or \boxed{3}", "1, 2, 3"),
        (r"\boxed{1}\text{ and }\boxed{\frac{1}{2}}.", r"1, \frac{1}{2}"), (r"\boxed{2} and \boxed{2}", "2"),
        (r"\boxed{1} so \boxed{2}", "2"), (r"\boxed{1}\boxed{2}", "2"),
        (r"\boxed{0}, so \boxed{1} and \boxed{2}", "1, 2"), (r"\boxedfoo{1}", None),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
)  # fmt: skip
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_no_alternatives_are_a_mistake() -> None:
    with pytest.raises(UserError, match="empty list"):
        r1_zero_reward_fn("</think> <answer>5</answer>", [])


def test_a_whole_number_given_as_a_float_is_that_number() -> None:
    assert r1_zero_reward_fn("</think> <answer>5_{10}</answer>", 5.0)["reward"] == 1.0  # "5.0" would not be
