"""The data set of a task: prompts that are too long, and further evaluation sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo.common.errors import UserError
from grpo.common.records import Problem, read_problems
from grpo.models.tokenizer import Tokenizer
from grpo.tasks.build import build_dataset, evaluation_set, longest_prompt
from grpo.tasks.task import Format, Split, Task, make_task


class Words(Task):
    """Questions of one, two, three... words."""

    formats = {"short": Format("{question}"), "long": Format("Tell me, please: {question}")}

    def __init__(self, longest: int, first: int = 1):
        self.longest, self.first = longest, first

    def problems(self, split: Split) -> list[Problem]:
        word = {"train": "old", "validation": "new"}[split]
        return [Problem(f"{split}/{n}", " ".join([word] * n), "") for n in range(self.first, self.longest + 1)]


def words(problem: Problem) -> int:
    return len(problem.question.split())


def task(**settings: object) -> Task:
    return make_task({"use": "test_build:Words", **settings}, "tasks.main")


def test_prompts_above_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    report = build_dataset(task(longest=5, max_prompt_tokens=3), tmp_path / "made", {"train": {"grpo.x": 3}}, words)
    for split in ("train", "validation"):
        assert [p.id for p in read_problems(tmp_path / f"made/{split}.jsonl")] == [f"{split}/{n}" for n in (1, 2, 3)]
        assert report[f"dropped_from_{split}_as_too_long"] == [f"{split}/4", f"{split}/5"] and report[split]["problems"] == 3
    with pytest.raises(UserError, match=r"grpo\.x: 4 .* split has 3 without 2 prompts above max_prompt_tokens\. Lower"):
        build_dataset(task(longest=5, max_prompt_tokens=3), tmp_path / "few", {"train": {"grpo.x": 4}}, words)
    assert not (tmp_path / "few").exists()
    skipping = task(longest=5, max_prompt_tokens=3)
    skipping.skipped = lambda split: ["row 7: no answer"]  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"split has 3 without 1 unusable rows and 2 prompts above max_prompt_tokens\."):
        build_dataset(skipping, tmp_path / "few", {"train": {"grpo.x": 4}}, words)
    with pytest.raises(UserError, match=r"grpo\.x: 6 .* split has 5\. Lower"):
        build_dataset(task(longest=5), tmp_path / "few", {"train": {"grpo.x": 6}})
    without = build_dataset(task(longest=5), tmp_path / "all", {})
    assert without["train"]["problems"] == 5 and "dropped_from_train_as_too_long" not in without


def test_a_prompt_is_as_long_as_in_the_format_in_which_it_is_longest(tokenizer: Tokenizer) -> None:
    problem = Problem("p", "Mia has 3 apples.", "3")
    lengths = {
        name: len(tokenizer(format.prompt(problem.question), add_special_tokens=False)["input_ids"])
        for name, format in Words.formats.items()
    }
    assert lengths["short"] < lengths["long"] == longest_prompt(task(longest=1), ["short", "long"], tokenizer, problem)
    assert longest_prompt(task(longest=1), ["short"], tokenizer, problem) == lengths["short"]


def test_a_further_set_is_held_out_of_training(tmp_path: Path) -> None:
    """Its problems keep their ids, and its questions are left out of training."""
    further = evaluation_set(task(longest=9, first=7), 2, words)
    report = build_dataset(task(longest=3), tmp_path / "made", {}, words, {"hard": further})
    assert read_problems(tmp_path / "made/also-hard.jsonl") == further and [p.id for p in further] == [
        "validation/7",
        "validation/8",
    ]
    assert report["also"]["hard"]["problems"] == 2 and report["train"]["problems"] == 3
    trained = {"old": [Problem("o", "Old  old", "")]}  # the second training question, laid out otherwise
    with pytest.raises(UserError, match=r"1 questions .* in the validation set or in evaluation\.also: .*train/2"):
        build_dataset(task(longest=3), tmp_path / "refused", {}, words, trained)
    dropping = task(longest=3)
    dropping.drop_overlap = True
    assert build_dataset(dropping, tmp_path / "fewer", {}, words, trained)["dropped_from_train_as_overlap"] == ["train/2"]
    with pytest.raises(UserError, match=r"tasks\.main\.problems: 3 problems are asked for, but there are 2"):
        evaluation_set(task(longest=9, max_prompt_tokens=2), 3, words)
