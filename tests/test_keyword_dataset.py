"""The keyword dataset: from the grammar or from a model, read back as problems, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from grpo.evaluation.keyword_dataset import build_keyword_dataset, degenerate_shares, read_keyword_problems

from grpo.common.errors import UserError
from grpo.common.records import Completion, Problem, Rollout
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.sections import Keyword
from grpo.tasks.formats import load_prompt
from grpo.tasks.keyword import ADJECTIVES, NOUNS, TEMPLATES

BEFORE, AFTER = load_prompt("keyword").split("{question}")
WORDS = len(NOUNS) + len(ADJECTIVES)
PAIRS = WORDS * (WORDS - 1) // 2
FILES = {"train": paths.train("keyword"), "validation": paths.validation("keyword")}


def with_answers(study: Study, answers: str, seed: int = 0) -> Study:
    values = {"model": study.keyword.model, "answers": answers, "seed": seed}
    return study.model_copy(update={"keyword": Keyword.model_validate(values)})


@pytest.fixture
def study(mini_study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """In an empty project folder."""
    monkeypatch.chdir(tmp_path)
    return with_answers(mini_study, "grammar")


def records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def asked(prompt: str) -> list[str]:
    """The words that a prompt asks for."""
    assert prompt.startswith(BEFORE) and prompt.endswith(AFTER)
    return prompt[len(BEFORE) : len(prompt) - len(AFTER)].split(", ")


def holds(answer: str, words: Sequence[str]) -> bool:
    """As whole words, whatever their case."""
    return set(words) <= set(re.findall(r"[a-z]+", answer.lower()))


# --------------------------------------------------------------------------------------------------------- the grammar


def test_every_pair_is_asked_once_four_fifths_of_them_in_training(study: Study) -> None:
    report = build_keyword_dataset(study)
    splits = {split: records(path) for split, path in FILES.items()}
    pairs = {split: [frozenset(asked(record["prompt"])) for record in of] for split, of in splits.items()}
    everything = pairs["train"] + pairs["validation"]
    assert len(set(everything)) == len(everything) == PAIRS
    assert {len(pair) for pair in everything} == {2}
    assert {word for pair in everything for word in pair} == {*NOUNS, *ADJECTIVES}
    assert (len(pairs["train"]), len(pairs["validation"])) == (round(0.8 * PAIRS), PAIRS - round(0.8 * PAIRS))
    for split, of in splits.items():
        assert all(list(record) == ["prompt", "answer"] for record in of)
        assert all(holds(record["answer"], asked(record["prompt"])) for record in of)
        assert report[split] | {"digest": ""} == {"pairs": len(of), "examples": len(of), "digest": ""}
    assert report["answers"] == "grammar"
    assert json.loads(paths.KEYWORD_REPORT.read_text()) == report
    # Sentences of many kinds: each begins as one of the templates does.
    assert len({record["answer"] for of in splits.values() for record in of}) > len(TEMPLATES) * 50


def test_the_dataset_depends_on_its_seed_only(study: Study) -> None:
    def digests(seed: int) -> list[str]:
        report = build_keyword_dataset(with_answers(study, "grammar", seed))
        return [report[split]["digest"] for split in FILES]

    first = digests(0)
    assert digests(1)[0] != first[0] and digests(1)[1] != first[1]
    assert digests(0) == first


def test_prompts_read_back_as_problems(study: Study) -> None:
    build_keyword_dataset(study)
    for split, path in FILES.items():
        problems = read_keyword_problems(path)
        texts = [", ".join(asked(record["prompt"])) for record in records(path)]
        assert [(problem.question, problem.ground_truth) for problem in problems] == [(text, text) for text in texts]
        assert len({problem.id for problem in problems}) == len(problems)
        assert all(f"/{split}/" in problem.id for problem in problems)


# ------------------------------------------------------------------------------------------------------------- reading

GOOD = {"prompt": f"{BEFORE}apple, red{AFTER}", "answer": "A red apple."}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "null",
        '{"answer": "A red apple."}',
        json.dumps({"prompt": 3}),
        json.dumps({"prompt": "Write about apple, red."}),
        json.dumps({"prompt": f"{BEFORE}apple, , red{AFTER}"}),
        json.dumps({"prompt": BEFORE + AFTER}),
        "",
    ],
)
def test_a_damaged_line_is_named_with_the_remedy(tmp_path: Path, line: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(UserError, match=r"train\.jsonl:2: .*dvc repro -f -s keyword_dataset"):
        read_keyword_problems(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: no such file\. Run `dvc repro keyword_dataset`"):
        read_keyword_problems(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match=r"empty\.jsonl:1: damaged.*dvc repro -f -s keyword_dataset"):
        read_keyword_problems(tmp_path / "empty.jsonl")


# ----------------------------------------------------------------------------------------------------------- the model


class StubEvaluator:
    """Answers every third problem right with its second sample, every third with its third, and the others never."""

    never = False
    made: list[StubEvaluator]

    def __init__(self, study: Study, checkpoint: Path):
        assert checkpoint == paths.model("keyword")
        self.tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
        self.asked: list[tuple[str, int, int]] = []
        self.forgotten = 0
        StubEvaluator.made.append(self)

    def sample(self, problems: Sequence[Problem], prompt: str, n: int = 1) -> list[list[Rollout]]:
        self.asked.append((prompt, n, len(problems)))
        return [[self._answer(i, k, problem) for k in range(n)] for i, problem in enumerate(problems)]

    def _answer(self, i: int, k: int, problem: Problem) -> Rollout:
        first, second = problem.ground_truth.split(", ")
        right = i % 3 < 2 and k > i % 3 and not self.never
        text = f"{k}: {first} {second}." if right else f"{k}: {first} only."
        reward = {"format_reward": 1.0, "answer_reward": float(right), "reward": float(right)}
        ids = tuple(map(ord, f"{BEFORE}{problem.question}{AFTER}"))
        return Rollout(problem, ids, Completion((1,), text, (0.0,), "stop"), reward)

    def forget_chunks(self) -> None:
        self.forgotten += 1


@pytest.fixture
def by_model(study: Study, monkeypatch: pytest.MonkeyPatch) -> Study:
    StubEvaluator.made = []
    monkeypatch.setattr("grpo.evaluation.checkpoint.CheckpointEvaluator", StubEvaluator)
    return with_answers(study, "model").model_copy(update={"grpo": study.grpo.model_copy(update={"group_size": 4})})


def test_of_a_models_answers_the_first_right_one_is_kept(by_model: Study) -> None:
    report = build_keyword_dataset(by_model)
    assert report["answers"] == "model"
    for split, path in FILES.items():
        of, pairs = records(path), report[split]["pairs"]
        assert pairs in (round(0.8 * PAIRS), PAIRS - round(0.8 * PAIRS))
        # Of each three problems the first two have an answer.
        assert report[split]["examples"] == len(of) == sum(i % 3 < 2 for i in range(pairs))
        assert all(list(record) == ["prompt", "answer"] for record in of)
        assert all(holds(record["answer"], asked(record["prompt"])) for record in of)
        assert [record["answer"][0] for record in of[:4]] == ["1", "2", "1", "2"]
        assert len(read_keyword_problems(path)) == len(of)
    calls = [call for evaluator in StubEvaluator.made for call in evaluator.asked]
    assert sorted(calls) == sorted(("keyword", 4, report[split]["pairs"]) for split in FILES)
    assert all(evaluator.forgotten for evaluator in StubEvaluator.made)


def test_a_model_that_never_holds_the_keywords_is_refused(by_model: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubEvaluator, "never", True)
    with pytest.raises(UserError, match=r"keyword\.answers: .*none of its answers to the train prompts.*`answers: grammar`"):
        build_keyword_dataset(by_model)
    assert not paths.train("keyword").exists() and not paths.KEYWORD_REPORT.exists()


# --------------------------------------------------------------------------------------------------- kinds of responses


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
    assert degenerate_shares(rollouts) == {"lists_only": 0.4, "repeats_prompt": 0.2, "is_sentence": 0.2}
