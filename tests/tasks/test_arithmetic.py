"""Generated word problems, recomputed from their text, and the documents with them."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.tasks.arithmetic import Arithmetic, WordProblem, word_problems
from grpo.tasks.formats import R1_ZERO
from grpo.tasks.rewards import r1_zero_reward_fn

SIGN = {"buys": 1, "finds": 1, "wins": 1, "loses": -1, "sells": -1, "gives away": -1}
SENTENCE = re.compile(r"On (\w+) (?:he|she) (buys|finds|wins|loses|sells|gives away) (\d+)\.")
WEEK = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]


def solve(question: str) -> tuple[list[str], list[int]]:
    """The expected steps and all intermediate results, from the question's text alone."""
    opening = re.match(r"(\w+) has (\d+) (\w+)\. ", question)
    assert opening is not None
    name, number, thing = opening.group(1), int(opening.group(2)), opening.group(3)
    closing = f" How many {thing} does {name} have?"
    assert question.endswith(closing)
    story = question[opening.end() : -len(closing)]
    changes = SENTENCE.findall(story)
    assert story == " ".join(m.group(0) for m in SENTENCE.finditer(story))  # nothing else is told
    assert [day for day, _, _ in changes] == WEEK[: len(changes)]
    steps, numbers = [], [number]
    for day, verb, amount in changes:
        after = number + SIGN[verb] * int(amount)
        steps.append(f"{day}: {number} {'+' if SIGN[verb] > 0 else '-'} {amount} = {after}.")
        number = after
        numbers.append(number)
    return steps, numbers


STEP = re.compile(r"(\w+): (\d+) ([+-]) (\d+) = (\d+)\.")


def errors_of(question: str, response: str) -> list[int]:
    """The error of each step of a solution, which goes on from the step before; at most one step is wrong."""
    steps, numbers = solve(question)
    number, errors = numbers[0], []
    for given, right in zip(STEP.findall(response), STEP.findall(" ".join(steps)), strict=True):
        day, before, sign, change, after = given
        assert (day, sign, change) == (right[0], *right[2:4]) and int(before) == number
        errors.append(int(after) - number - int(sign + change))
        number = int(after)
    assert int(re.findall(r"\d+", response)[-1]) == number  # a derailed solution states its own result
    assert sum(error != 0 for error in errors) <= 1
    return errors


def first(n: int, seed: int = 0, levels: int = 5, validation: bool = False) -> list[WordProblem]:
    return list(itertools.islice(word_problems(seed, levels, validation), n))


@pytest.mark.parametrize("validation", [False, True])
def test_steps_and_answer_follow_from_the_question(validation: bool) -> None:
    for problem in first(2000, seed=3, validation=validation):
        steps, numbers = solve(problem.question)
        assert problem.solution() == (" ".join(steps), numbers[-1])
        assert all(0 <= number <= 15 for number in numbers)
        assert numbers[0] >= 1
        assert all(1 <= abs(b - a) <= 9 for a, b in itertools.pairwise(numbers))


def test_answers_are_spread_over_the_range() -> None:
    answers = [problem.solution()[1] for problem in first(3000)]
    assert set(answers) == set(range(16))
    assert max(answers.count(a) for a in set(answers)) < 0.15 * len(answers)  # no one guess does well


def test_a_question_belongs_to_one_split_whatever_the_seed_and_comes_once() -> None:
    drawn = {seed: [p.question for p in first(3000, seed=seed, levels=1)] for seed in (0, 1)}
    assert all(len(set(questions)) == 3000 for questions in drawn.values()) and set(drawn[0]) != set(drawn[1])
    train = {*drawn[0], *drawn[1]}
    validation = {p.question for seed in (0, 1) for p in first(1500, seed=seed, levels=1, validation=True)}
    assert not train & validation


def load(**changes: Any) -> tuple[list[Problem], list[Problem]]:
    task = Arithmetic(**{"train_size": 300, "validation_size": 100, "levels": 4, "seed": 0} | changes)
    return task.problems("train"), task.problems("validation")


def test_problems_of_the_two_splits() -> None:
    train, validation = load()
    assert (len(train), len(validation)) == (300, 100)
    assert len({p.id for p in train + validation}) == 400
    assert not {p.question for p in train} & {p.question for p in validation}
    for problem in train + validation:
        _, numbers = solve(problem.question)
        assert problem.ground_truth == str(numbers[-1])
        assert problem.level == len(numbers) - 2
    assert load() == (train, validation)
    assert load(seed=1)[1] != validation
    some = [list(itertools.islice(documents(seed=seed), 50)) for seed in (1, 1, 2)]
    assert some[0] == some[1] and not set(some[1]) & set(some[2])
    assert load(train_size=10, validation_size=20) == (train[:10], validation[:20])  # a smaller study's is a part


# ------------------------------------------------------------------------------------------------------------- documents


def documents(levels: int = 4, seed: int = 1, **shares: float) -> Iterator[tuple[str, str]]:
    task = Arithmetic(train_size=4096, validation_size=512, levels=levels, seed=0)
    return task.documents(seed, **{"r1_zero_share": 0.78, "complete_form_share": 0.07, "guess_share": 0.1} | shares)


ENDINGS = re.compile(
    r"(?P<complete> </think> <answer>\d+</answer>)$|(?P<incomplete> \\boxed\{\d+\}| </think> \\boxed\{\d+\}"
    r"| </think> The answer is \d+\.| <answer>\d+</answer>| </think> <answer>\d+)$"
)


def test_no_document_holds_a_validation_question() -> None:
    _, validation = load(validation_size=512)
    held_out = {p.question for p in validation}
    before, after = R1_ZERO.template.split("{question}")
    for prompt, _ in itertools.islice(documents(), 3000):
        question = prompt if not prompt.startswith(before) else prompt.removeprefix(before).removesuffix(after)
        solve(question)  # it is a question and nothing else
        assert question not in held_out
        assert zlib.crc32(question.encode()) % 5 != 0  # nor one of any other study's


def test_shares_of_documents_are_the_settings() -> None:
    n = {"native": 0, "r1_zero": 0}
    guessed, derailed, endings = dict(n), 0, []
    shares = {"r1_zero_share": 0.5, "guess_share": 0.6, "native_guess_share": 0.3, "derailed_share": 0.2}
    for prompt, response in itertools.islice(documents(**shares, complete_form_share=0.4), 4000):
        in_r1_zero = re.search(r"User: (.*)\nAssistant: <think>$", prompt)
        kind = "r1_zero" if in_r1_zero else "native"
        question = in_r1_zero.group(1) if in_r1_zero else prompt
        n[kind] += 1
        if in_r1_zero:
            endings.append(ENDINGS.search(response))
        if ": " not in response:
            guessed[kind] += 1
            assert 0 <= int(re.findall(r"\d+", response)[-1]) <= 15
            continue
        errors = errors_of(question, response)
        derailed += any(errors)
        if not in_r1_zero and not any(errors):
            steps, numbers = solve(question)
            assert response == f" {' '.join(steps)} \\boxed{{{numbers[-1]}}}"
    shown = sum(n.values()) - sum(guessed.values())
    assert len({re.sub(r"\d+", "", ending.group()) for ending in endings if ending}) == 6 and all(endings)
    for count, total, share in (
        (sum(ending is not None and ending["complete"] is not None for ending in endings), n["r1_zero"], 0.4),
        (guessed["r1_zero"], n["r1_zero"], 0.6),
        (guessed["native"], n["native"], 0.3),
        (derailed, shown, 0.2),
        (n["r1_zero"], 4000, 0.5),
    ):
        assert abs(count / total - share) <= 4 * (share * (1 - share) / total) ** 0.5


# ---------------------------------------------------------------------------------------------------------------- traces


@pytest.mark.parametrize(("share", "fewest", "most"), [(0.0, 0, 0), (0.4, 338, 462), (1.0, 1000, 1000)])  # 4 deviations
def test_as_many_traces_as_asked_go_wrong_by_one_step(share: float, fewest: int, most: int) -> None:
    task = Arithmetic(train_size=1000, validation_size=100, levels=4, seed=3)
    traces = task.traces("r1_zero", 1000, share, seed=0)
    assert [problem for problem, _ in traces] == task.problems("train")
    wrong = [
        (place, error)
        for problem, response in traces
        for place, error in enumerate(errors_of(problem.question, response))
        if error
    ]
    assert fewest <= len(wrong) <= most
    assert not wrong or ({error for _, error in wrong} == {1, 2, 3} and {place for place, _ in wrong} == {0, 1, 2, 3, 4})
    for problem, response in traces[:200]:
        reward = r1_zero_reward_fn(response, problem.ground_truth)
        assert reward["format_reward"] == 1.0 and reward["reward"] == float(not any(errors_of(problem.question, response)))


def test_the_seed_decides_which_traces_go_wrong() -> None:
    task = Arithmetic(train_size=200, validation_size=100, levels=4, seed=3)
    first = task.traces("r1_zero", 100, 0.4, seed=0)
    assert first == task.traces("r1_zero", 200, 0.4, seed=0)[:100] != task.traces("r1_zero", 200, 0.4, seed=1)[:100]
    with pytest.raises(UserError, match=r"examples: 201 traces .* train_size is 200\. Lower"):
        task.traces("r1_zero", 201, 0.4, seed=0)
