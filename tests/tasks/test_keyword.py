"""Keyword inclusion: pairs, grammar and documents, and recognition of keywords in a response."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.common.records import Completion, Problem, Rollout
from grpo.tasks.build import build_dataset
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

BEFORE, AFTER = KEYWORD.template.split("{question}")


def documents(seed: int, keyword_share: float, in_full: int = 0) -> Iterator[tuple[str, str]]:
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
    assert done.stdout.strip() == f"{keyword_pairs(3)} {next(documents(3, 0.5))}"
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
    for prompt, response in itertools.islice(documents(2, share), n):
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
    drawn = list(itertools.islice(documents(2, 0.0, in_full=200), 400))
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
    for prompt, response in itertools.islice(documents(0, 0.5), 50):
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
