"""The ``dataset`` stage: the problems of a task, checked and split."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import files_digest, whole_folder, write_text
from grpo.common.records import Problem, write_records
from grpo.tasks.splits import separate
from grpo.tasks.task import SPLITS, Split, Task


def build_dataset(task: Task, folder: Path, needed: Mapping[Split, Mapping[str, int]]) -> dict[str, Any]:
    """Load or generate the problems, refuse an overlap of the splits, and write train.jsonl and validation.jsonl.

    Args:
        needed: for each split how many problems the study's settings ask for, each by its place in params.yaml.

    Returns:
        the report: sizes, levels, dropped problems, and a digest of each split.

    Raises:
        UserError: a missing source, an overlap, a ground truth that the task cannot read, or too few problems.
    """
    train, validation, dropped = separate(
        task.problems("train"), task.problems("validation"), task.drop_overlap, _how_to_drop_overlap(task)
    )
    problems: dict[Split, list[Problem]] = {"train": train, "validation": validation}
    for split, asked in needed.items():
        for key, wanted in asked.items():
            if len(problems[split]) < wanted:
                raise UserError(
                    f"params.yaml: {key}: {wanted} problems are asked for, but the {split} split has {len(problems[split])}. "
                    "Lower it, or use a larger source."
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
    return {**described, "dropped_from_train_as_overlap": dropped}


def _how_to_drop_overlap(task: Task) -> str:
    if "drop_overlap" in inspect.signature(type(task)).parameters:
        return f"Set `{task.params_key}.drop_overlap: true`"
    return f"Set `drop_overlap = True` in the class {type(task).__name__}"


def _describe(problems: list[Problem]) -> dict[str, Any]:
    levels = Counter(problem.level for problem in problems)
    return {"problems": len(problems), "levels": {str(level): levels[level] for level in sorted(levels)}}
