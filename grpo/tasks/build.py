"""The ``dataset`` stage: a task's problems, checked and split."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import files_digest, whole_folder, write_text
from grpo.common.records import Problem, write_records
from grpo.tasks.splits import separate
from grpo.tasks.task import LIMIT, SPLITS, Split, Task, find_format

PromptTokens = Callable[[Problem], int]


def build_dataset(
    task: Task,
    folder: Path,
    needed: Mapping[Split, Mapping[str, int]],
    prompt_tokens: PromptTokens | None = None,
    also: Mapping[str, list[Problem]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Load or generate the problems, refuse overlapping splits, and write train.jsonl and validation.jsonl.

    Args:
        needed: for each split the numbers of problems that the study requires, by key of params.yaml.
        prompt_tokens: length of a problem's longest prompt; required if the task has ``max_prompt_tokens``.
        also: further evaluation sets from :func:`evaluation_set`; each is written to also-NAME.jsonl.

    Returns:
        the report: sizes, levels, dropped problems, skipped rows if there are any, and a digest of each split.

    Raises:
        UserError: a missing source, an overlap, a ground truth that the task cannot read, or too few problems.
    """
    train, validation, dropped = separate(
        task.problems("train"),
        task.problems("validation"),
        task.drop_overlap,
        _how_to_drop_overlap(task),
        [problem for problems in also.values() for problem in problems],
    )
    problems: dict[Split, list[Problem]] = {"train": train, "validation": validation}
    left_out: dict[str, Any] = {f"skipped_in_{split}": _counted(rows) for split in SPLITS if (rows := task.skipped(split))}
    if task.max_prompt_tokens is not None:
        assert prompt_tokens is not None
        for split in SPLITS:
            problems[split], too_long = within(problems[split], task.max_prompt_tokens, prompt_tokens)
            left_out[f"dropped_from_{split}_as_too_long"] = too_long
    for split, asked in needed.items():
        for key, wanted in asked.items():
            if len(problems[split]) < wanted:
                raise UserError(
                    f"params.yaml: {key}: {wanted} problems are asked for, but the {split} split has {len(problems[split])}"
                    f"{_without(left_out, split)}. Lower it, or use a larger source."
                )
    with whole_folder(folder) as draft:
        for split in SPLITS:
            write_records(draft / f"{split}.jsonl", problems[split])
            if pairs := task.prompts_and_answers(problems[split]):
                lines = [json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) for prompt, answer in pairs]
                write_text(draft / f"{split}_prompt_answer.jsonl", "\n".join(lines) + "\n")
        described: dict[str, Any] = {
            split: _describe(problems[split]) | {"digest": files_digest(draft / f"{split}.jsonl")} for split in SPLITS
        }
        for name, further in also.items():
            file = draft / f"also-{name}.jsonl"
            write_records(file, further)
            described.setdefault("also", {})[name] = _describe(further) | {"digest": files_digest(file)}
    return {**described, "dropped_from_train_as_overlap": dropped, **left_out}


def evaluation_set(task: Task, size: int, prompt_tokens: PromptTokens) -> list[Problem]:
    """The first ``size`` validation problems of a task whose prompts are not too long.

    Raises:
        UserError: there are fewer.
    """
    problems = task.problems("validation")
    if task.max_prompt_tokens is not None:
        problems, _ = within(problems, task.max_prompt_tokens, prompt_tokens)
    if len(problems) < size:
        raise UserError(
            f"params.yaml: {task.params_key}.problems: {size} problems are asked for, but there are {len(problems)}. Lower it."
        )
    return problems[:size]


def within(problems: Sequence[Problem], limit: int, prompt_tokens: PromptTokens) -> tuple[list[Problem], list[str]]:
    """Split problems: those whose prompts have at most ``limit`` tokens, and the ids of the others."""
    long = {problem.id for problem in problems if prompt_tokens(problem) > limit}
    return [problem for problem in problems if problem.id not in long], [p.id for p in problems if p.id in long]


def longest_prompt(task: Task, formats: Sequence[str], tokenizer: Any, problem: Problem) -> int:
    """Number of tokens of a problem's prompt in the format that makes it longest.

    With the longest, arms with different formats keep the same problems.
    """
    asked = [find_format(task, name) for name in formats]
    return max(len(format.encode(tokenizer, format.prompt(problem.question))) for format in asked)


def _counted(rows: Sequence[str]) -> dict[str, Any]:
    return {"rows": len(rows), "first": rows[0]}


def _without(left_out: Mapping[str, Any], split: Split) -> str:
    skipped, too_long = left_out.get(f"skipped_in_{split}"), left_out.get(f"dropped_from_{split}_as_too_long")
    reasons = [f"{skipped['rows']} unusable rows"] if skipped else []
    reasons += [f"{len(too_long)} prompts above {LIMIT}"] if too_long else []
    return f" without {' and '.join(reasons)}" if reasons else ""


def _how_to_drop_overlap(task: Task) -> str:
    if "drop_overlap" in inspect.signature(type(task)).parameters:
        return f"Set `{task.params_key}.drop_overlap: true`"
    return f"Set `drop_overlap = True` in the class {type(task).__name__}"


def _describe(problems: list[Problem]) -> dict[str, Any]:
    levels = Counter(problem.level for problem in problems)
    return {"problems": len(problems), "levels": {str(level): levels[level] for level in sorted(levels)}}
