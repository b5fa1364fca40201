"""The data set of a task: prompts that are too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo.common.errors import UserError
from grpo.common.records import Problem, read_problems
from grpo.models.tokenizer import Tokenizer
from grpo.tasks.build import build_dataset, longest_prompt
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
