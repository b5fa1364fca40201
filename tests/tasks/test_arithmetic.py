"""The two generated tasks: arithmetic in words, and keywords to include."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo.common.errors import UserError
from grpo.common.records import Completion, Problem, Rollout
from grpo.tasks.arithmetic import Arithmetic, WordProblem, word_problems
from grpo.tasks.build import build_dataset
from grpo.tasks.formats import R1_ZERO
from grpo.tasks.keyword_inclusion import (
    ADJECTIVES,
    KEYWORD,
    NOUNS,
    TEMPLATES,
    Keyword,
    degenerate,
    is_sentence,
    keyword_inclusion_reward_fn,
    keyword_pairs,
    keywords_of,
    sentence,
)
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


# ------------------------------------------------------------------------------------------------------------------- keywords


BEFORE, AFTER = KEYWORD.template.split("{question}")


def keyword_documents(seed: int, keyword_share: float, in_full: int = 0) -> Iterator[tuple[str, str]]:
    return Keyword(seed).documents(seed, keyword_share, in_full)


def asked(prompt: str) -> list[str]:
    """The keywords in a prompt."""
    assert prompt.startswith(BEFORE) and prompt.endswith(AFTER)
    return prompt[len(BEFORE) : len(prompt) - len(AFTER)].split(", ")


# ----------------------------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_pairs_are_all_there_are_cut_at_four_fifths(seed: int) -> None:
    training, held_out = keyword_pairs(seed)
    n = len(NOUNS) + len(ADJECTIVES)
    assert 5 * len(training) == 4 * (len(training) + len(held_out))
    assert len(training) + len(held_out) == n * (n - 1) // 2
    unordered = [{frozenset(pair) for pair in pairs} for pairs in (training, held_out)]
    assert not unordered[0] & unordered[1]
    assert unordered[0] | unordered[1] == {frozenset(pair) for pair in itertools.combinations(NOUNS + ADJECTIVES, 2)}
    assert {word for pair in training for word in pair} == set(NOUNS + ADJECTIVES)  # none is new in a held-out pair


def test_pairs_are_the_same_in_another_process() -> None:
    program = "from grpo.tasks.keyword_inclusion import *\nprint(keyword_pairs(3), next(Keyword(3).documents(3, 0.5)))"
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == f"{keyword_pairs(3)} {next(keyword_documents(3, 0.5))}"
    assert keyword_pairs(4) != keyword_pairs(3)


def test_problems_ask_for_their_pair_and_are_split_as_the_pairs_are() -> None:
    for split, pairs in zip(("train", "validation"), keyword_pairs(5), strict=True):
        made = Keyword(5).problems(split)
        assert made[5].id == f"keyword/{split}/5"
        assert made[5].question == made[5].ground_truth == f"{pairs[5][0]}, {pairs[5][1]}"
        assert [tuple(keywords_of(problem.ground_truth)) for problem in made] == pairs
    assert KEYWORD.prompt("apple, red") == "Write a sentence that includes the words: apple, red."


# --------------------------------------------------------------------------------------------------------------- grammar


def test_a_sentence_includes_the_keywords_asked_for_whatever_the_pair() -> None:
    rng = random.Random(0)
    for pair in itertools.chain(*keyword_pairs(0)):
        text = sentence(rng, pair)
        assert keyword_inclusion_reward_fn(text, pair)["reward"] == 1.0
        assert degenerate(text, pair) == {"lists_only": 0.0, "repeats_prompt": 0.0, "is_sentence": 1.0}


def test_mutilated_sentences_are_none() -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = sentence(rng)
        words = text.split()
        assert is_sentence(text)
        for other in (text[:-1], text + " " + text, text + "\n", text.lower(), text.replace(words[2], "zebra")):
            assert not is_sentence(other)
        for others in (words[1:], words[:2] + words[3:], words[::-1]):
            assert not is_sentence(" ".join(others))
    assert is_sentence("The red apple lies near the clock.")
    assert not is_sentence("The red apple lies near the apple.")  # no word twice
    assert not any(map(is_sentence, ("", *TEMPLATES)))


# ------------------------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7, 1.0])
def test_documents_ask_for_training_pairs_and_use_each_keyword_as_often_as_asked(share: float) -> None:
    n, (training, _) = 3000, keyword_pairs(2)
    allowed = set(training)
    used = both = 0.0
    for prompt, response in itertools.islice(keyword_documents(2, share), n):
        keywords = asked(prompt)
        assert tuple(keywords) in allowed
        assert response.startswith(" ")
        assert is_sentence(response[1:])
        of_this = sum(keyword_inclusion_reward_fn(response, [keyword])["reward"] for keyword in keywords)
        used, both = used + of_this, both + (of_this == 2)
    # 4 standard deviations; more where the words that fill the sentence happen to be a keyword, of 16 adjectives or 40 nouns
    spread = 4 * (share * (1 - share) / (2 * n)) ** 0.5
    assert -spread <= used / (2 * n) - share <= spread + 0.1 * (1 - share)
    assert abs(both / n - share**2) < 0.1  # each independently of the other


def test_the_first_documents_use_all_keywords() -> None:
    drawn = list(itertools.islice(keyword_documents(2, 0.0, in_full=200), 400))
    right = [keyword_inclusion_reward_fn(r, asked(p))["reward"] for p, r in drawn]
    assert sum(right[:200]) == 200
    assert sum(right[200:]) < 20 and right[200] == 0.0


def test_traces_hold_the_keywords_of_the_training_problems() -> None:
    traces = Keyword(0).traces("keyword", seed=0)
    assert [problem for problem, _ in traces] == Keyword(0).problems("train")
    for problem, response in traces:
        assert set(asked(KEYWORD.prompt(problem.question))) <= set(re.findall(r"[a-z]+", response.lower()))
        assert response[0] == " " and is_sentence(response[1:])
    assert traces == Keyword(0).traces("keyword", seed=0) != Keyword(0).traces("keyword", seed=1)
    assert len({response for _, response in traces}) > len(TEMPLATES) * 50


def test_the_data_set_has_prompts_and_answers_as_the_handout_prints_them(tmp_path: Path) -> None:
    build_dataset(Keyword(0), tmp_path / "keyword", {})
    files = [tmp_path / f"keyword/{split}_prompt_answer.jsonl" for split in ("train", "validation")]
    train, held_out = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert len(train) == round(0.8 * len(train + held_out))
    for row in train + held_out:
        assert set(row) == {"prompt", "answer"} and row["prompt"].startswith("Write a sentence that includes the words: ")
        assert keyword_inclusion_reward_fn(row["answer"], asked(row["prompt"]))["reward"] == 1.0


def test_pieces_are_words_with_their_space_and_lose_nothing() -> None:
    pieces = Keyword(0).pieces
    assert pieces("the words: apple, red.\n The") == ["the", " words", ":", " apple", ",", " red", ".", "\n", " The"]
    for prompt, response in itertools.islice(keyword_documents(0, 0.5), 50):
        assert "".join(pieces(prompt + response)) == prompt + response


# ------------------------------------------------------------------------------------------------------------ degenerate


@pytest.mark.parametrize(
    ("response", "lists_only", "repeats_prompt"),
    [
        ("apple, red", 1, 0), ("red apple with an apple or a red", 1, 0), ("red apple falls, falls, falls", 1, 0),
        ("A red apple falls down", 1, 0), ("A red apple falls down slowly", 0, 0), ("apple, apple", 0, 0),
        ("The reddish apple", 0, 0), (" Write a sentence that includes the words: apple, red.", 0, 1),
        ("a SENTENCE  that includes\nthe words", 0, 1), ("It includes the words : red", 0, 1),
        ("It includes the words red and apple.", 0, 0),
    ],
)  # fmt: skip
def test_lists_and_repeated_requests_are_told_from_sentences(response: str, lists_only: int, repeats_prompt: int) -> None:
    expected = {"lists_only": lists_only, "repeats_prompt": repeats_prompt, "is_sentence": 0}
    assert degenerate(response, ["apple", "red"]) == expected


# ---------------------------------------------------------------------------------------------------------------- reward


@pytest.mark.parametrize(
    ("response", "keywords", "reward"),
    [
        ("Two apples", ["apple"], 0), ("An infrared lamp", ["red"], 0), ("red_1", ["red"], 0), ("red2", ["red"], 0),
        ("(red), \"apple\"!", ["red", "apple"], 1), ("red.apple", ["red", "apple"], 1), ("red\napple", ["apple", "red"], 1),
        ("a red-hot pan", ["red"], 1), ("a red hot pan", ["red-hot"], 0), ("the apple's core", ["apple"], 1),
        ("RED ApPlE", ["red", "aPPle"], 1), ("ÉTÉ", ["été"], 1), ("étés", ["été"], 0), ("red", ["red", "Red"], 1),
        ("red red", ["red", "apple"], 0), ("some ice cream", ["ice cream"], 1), ("nice cream", ["ice cream"], 0),
        ("It is a.c here", ["a.c"], 1), ("(x", ["(x"], 1), ("x", [".*"], 0), ("red", (" red ",), 1),
    ],
)  # fmt: skip
def test_what_counts_as_a_keyword(response: str, keywords: list[str], reward: int) -> None:
    expected = {"format_reward": 1.0, "answer_reward": float(reward), "reward": float(reward)}
    assert keyword_inclusion_reward_fn(response, keywords) == expected


@pytest.mark.parametrize("keywords", ["red", "", [], [" "], ["red", ""]])
def test_what_is_no_list_of_keywords_is_refused(keywords: Any) -> None:
    with pytest.raises(UserError, match="keywords: expected a list of at least one word"):
        keyword_inclusion_reward_fn("red", keywords)


def test_responses_are_scored_by_their_problems_keywords() -> None:
    problem = Problem("k", "apple, red", "apple, red")
    responses = [" A red apple.", " A red pineapple.", " ", ""]
    scored = Keyword(0).score("keyword", [problem] * 4, responses)
    assert [tuple(reward.values()) for reward in scored.rewards] == [(1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0,) * 3, (0.0,) * 3]
    assert scored.rewards == [keyword_inclusion_reward_fn(response, ["apple", "red"]) for response in responses]


def test_shares_of_degenerate_responses_by_hand() -> None:
    texts = [
        "Today the apple lies near my red",  # cut off: no sentence of the grammar
        "apple, red",
        "red and apple",
        "My red apple lies near the ball.",
        f"{BEFORE}apple, red",
    ]
    rollouts = [
        Rollout(Problem("k", "apple, red", "apple, red"), (1,), Completion((1,), text, (0.0,), "stop"), {}) for text in texts
    ]
    assert Keyword(0).measures(rollouts) == {"lists_only": 0.4, "repeats_prompt": 0.2, "is_sentence": 0.2}
