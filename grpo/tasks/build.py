"""The ``dataset`` stage: a task's problems, checked and split."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError, own_errors
from grpo.common.files import atomic_folder, files_digest, write_jsonl
from grpo.common.records import Problem, write_records
from grpo.tasks.rows import LocalFiles
from grpo.tasks.task import LIMIT, SPLITS, Split, Task, find_format

PromptTokens = Callable[[Problem], int]
_LAYOUT = re.compile(r"(?<!\\)\\[,!]|\s+")


def build_dataset(
    task: Task, folder: Path, needed: Mapping[Split, Mapping[str, int]], prompt_tokens: PromptTokens | None = None
) -> dict[str, Any]:
    """Load or generate the problems, refuse overlapping splits, and write train.jsonl and validation.jsonl.

    Returns the report: sizes, levels, dropped problems, skipped rows if there are any, and a digest of each split. Raises
    UserError: a missing source, an overlap, a ground truth that the task cannot read, or too few problems.

    Args:
        needed: for each split the numbers of problems that the study requires, by key of params.yaml.
        prompt_tokens: length of a problem's longest prompt; required if the task has ``max_prompt_tokens``.
    """
    problems: dict[Split, list[Problem]] = {split: problems_of(task, split) for split in SPLITS}
    problems["train"], dropped = separate(task, problems["train"], problems["validation"])
    skipped = {split: task.skipped(split) for split in SPLITS}
    left_out: dict[str, Any] = {
        f"skipped_in_{split}": {"rows": len(rows), "first": rows[0]} for split, rows in skipped.items() if rows
    }
    if task.max_prompt_tokens is not None:
        assert prompt_tokens is not None
        for split in SPLITS:
            problems[split], too_long = within(problems[split], task.max_prompt_tokens, prompt_tokens)
            left_out[f"dropped_from_{split}_as_too_long"] = too_long
    _require_enough(problems, needed, left_out)
    with atomic_folder(folder) as draft:
        described: dict[str, Any] = {split: _write(draft / f"{split}.jsonl", problems[split]) for split in SPLITS}
        for split in SPLITS:
            if pairs := task.prompts_and_answers(problems[split]):
                rows = ({"prompt": prompt, "answer": answer} for prompt, answer in pairs)
                write_jsonl(draft / f"{split}_prompt_answer.jsonl", rows)
    return {**described, "dropped_from_train_as_overlap": dropped, **left_out}


def problems_of(task: Task, split: Split) -> list[Problem]:
    """A task's problems; a UserError names file and line where a task of the user's own fails."""
    with own_errors(f"{task.params_key}, {type(task).__name__}.problems"):
        return task.problems(split)


def check_local_data(task: Task, needed: Mapping[Split, Mapping[str, int]]) -> None:
    """Raise UserError if the ``dataset`` stage would refuse a task's local files, but for prompts that are too long.

    Data on the Hub is not read, and what a task generates is not made.
    """
    if isinstance(getattr(task, "files", None) or getattr(task, "source", None), LocalFiles):
        problems = {split: problems_of(task, split) for split in SPLITS}
        problems["train"], _ = separate(task, problems["train"], problems["validation"])
        _require_enough(problems, needed, {})


def _require_enough(
    problems: Mapping[Split, Sequence[Problem]], needed: Mapping[Split, Mapping[str, int]], left_out: Mapping[str, Any]
) -> None:
    few = [
        f"{key}: {wanted} problems are asked for, but the {split} split has {len(problems[split])}{_without(left_out, split)}"
        for split, asked in needed.items()
        for key, wanted in asked.items()
        if len(problems[split]) < wanted
    ]
    if few:
        raise UserError(f"{'; '.join(few)}. Lower {'it' if len(few) == 1 else 'them'}, or use a larger source.")


def separate(task: Task, train: list[Problem], validation: list[Problem]) -> tuple[list[Problem], list[str]]:
    r"""Check that ids are unique and that the two splits share no question.

    Questions are compared without white space, ``\,``, ``\!`` and case, in which copies of a question often differ. ``task``:
    with ``drop_overlap``, shared questions are removed from ``train`` instead of refused. Returns the problems to train on, and
    the ids that were removed. Raises UserError if an id occurs twice, the splits share a question that is not to be removed, or
    nothing is left to train on.
    """
    twice = [id_ for id_, count in Counter(problem.id for problem in (*train, *validation)).items() if count > 1]
    if twice:
        raise UserError(f"ids occur more than once: {reprlib.repr(twice)}. Make them unique in the source files.")
    held_out = {layout_free(problem.question) for problem in validation}
    shared = [problem.id for problem in train if layout_free(problem.question) in held_out]
    if shared and not task.drop_overlap:
        remedy = f"`drop_overlap = True` in the class {type(task).__name__}"
        if "drop_overlap" in inspect.signature(type(task)).parameters:
            remedy = f"`{task.params_key}.drop_overlap: true`"
        raise UserError(
            f"{len(shared)} questions of the training set are also in the validation set: {reprlib.repr(shared)}. Set {remedy} "
            "to leave them out of training, or remove them from one of the source files."
        )
    dropped = set(shared)
    kept = [problem for problem in train if problem.id not in dropped]
    if not kept:
        raise UserError("every training question is also a validation question. Is the same data given for both splits?")
    return kept, shared


def layout_free(question: str) -> str:
    """Normalize a text by removing layout and case, in which copies often differ."""
    return _LAYOUT.sub("", question).casefold()


def _without(left_out: Mapping[str, Any], split: Split) -> str:
    """What a split has lost, for a message: unusable rows and long prompts."""
    skipped, too_long = left_out.get(f"skipped_in_{split}"), left_out.get(f"dropped_from_{split}_as_too_long")
    reasons = [f"{skipped['rows']} unusable rows"] if skipped else []
    reasons += [f"{len(too_long)} prompts above {LIMIT}"] if too_long else []
    return f" without {' and '.join(reasons)}" if reasons else ""


def within(problems: Sequence[Problem], limit: int, prompt_tokens: PromptTokens) -> tuple[list[Problem], list[str]]:
    """Split problems: those whose prompts have at most ``limit`` tokens, and the ids of the others."""
    too_long = dict.fromkeys(problem.id for problem in problems if prompt_tokens(problem) > limit)
    return [problem for problem in problems if problem.id not in too_long], list(too_long)


def longest_prompt(task: Task, formats: Sequence[str], tokenizer: Any, problem: Problem) -> int:
    """Number of tokens of a problem's prompt in the format that makes it longest.

    With the longest, arms with different formats keep the same problems.
    """
    asked = [find_format(task, name) for name in formats]
    return max(len(format.encode(tokenizer, format.prompt_of(problem))) for format in asked)


def _write(file: Path, problems: list[Problem]) -> dict[str, Any]:
    """Write problems, and return their number, levels and digest."""
    write_records(file, problems)
    levels = Counter(problem.level for problem in problems)
    counts = {str(level): levels[level] for level in sorted(levels)}
    return {"problems": len(problems), "levels": counts, "digest": files_digest(file)}
