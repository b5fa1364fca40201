"""What MATH and GSM8K share: reading rows from local JSONL files or from the Hub, and the checks on what was read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.grader.grader import check_ground_truth
from grpo.study.sections import DownloadedTask, HubDataset

Split = Literal["train", "validation"]

# The Hub's datasets have no split named validation; as in the handouts, the test split serves as one.
HUB_SPLIT: dict[Split, str] = {"train": "train", "validation": "test"}


@dataclass(frozen=True)
class Row:
    """One row of a source, and for messages where it stands (``file:line``) and where params.yaml names the source."""

    where: str
    values: dict[str, Any]
    key: str = "task.source"

    def text(self, *columns: str) -> str:
        """The first of ``columns`` that the row has, as text.

        Raises:
            UserError: it has none of them, or what it has is neither text nor a number.
        """
        for column in columns:
            if column in self.values:
                value = self.values[column]
                if isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value):
                    return str(value)
                if isinstance(value, str):
                    return value
                raise UserError(f"{self.where}: column {column!r} holds {value!r}, not text. Correct the row.")
        has = ", ".join(self.values) or "none"
        raise UserError(f"{self.where}: no column {' or '.join(map(repr, columns))} (columns: {has}). Check `{self.key}`.")


MakeProblem = Callable[[Row, Split, int], Problem]


def load_task(task: DownloadedTask, hub_files: list[str], make: MakeProblem) -> tuple[list[Problem], list[Problem]]:
    """Read, convert and check both splits.

    Args:
        hub_files: the parquet files of one split on the Hub, with ``{split}`` where its name belongs.
        make: turns a row into a problem, given the split and the row's number in it (from 0).

    Returns:
        train and validation as the source has them; :func:`grpo.tasks.overlap.separate` checks one against the other.

    Raises:
        UserError: a file or a column is missing, a row is not usable, a split is empty, or the numbers of rows are
            not those in ``task.expected``.
    """
    splits: dict[Split, list[Problem]] = {}
    for split in HUB_SPLIT:
        problems = [make(row, split, number) for number, row in enumerate(_rows(task, split, hub_files))]
        if not problems:
            raise UserError(f"task.source: the {split} split of {task.name} is empty. Check the source.")
        expected = getattr(task.expected, split) if task.expected else len(problems)
        if len(problems) != expected:
            raise UserError(
                f"task.expected.{split}: {expected} problems expected, but the source has {len(problems)}. "
                "Check that `task.source` is the dataset you mean, or correct the number."
            )
        splits[split] = problems
    return splits["train"], splits["validation"]


def load_solutions(
    task: DownloadedTask, hub_files: list[str], make: MakeProblem, solution_of: Callable[[Row], str]
) -> list[tuple[Problem, str]]:
    """The training problems, each with the solution that its row holds; arguments and errors as of :func:`load_task`."""
    rows = _rows(task, "train", hub_files)
    return [(make(row, "train", number), solution_of(row)) for number, row in enumerate(rows)]


def checked_problem(row: Row, problem: Problem) -> Problem:
    """``problem``, if its question is not blank and its ground truth is one the grader accepts.

    Raises:
        UserError: it is not; the message names the row.
    """
    if not problem.question.strip():
        raise UserError(f"{row.where}: the question is empty. Correct or remove the row.")
    try:
        check_ground_truth(problem.ground_truth)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    return problem


def _rows(task: DownloadedTask, split: Split, hub_files: list[str]) -> list[Row]:
    if isinstance(task.source, HubDataset):
        names = [name.format(split=HUB_SPLIT[split]) for name in hub_files]
        return [
            row
            for name in names
            for row in _read_parquet(
                download(task.source.hub, name, task.source.revision, "task.source"), f"{task.source.hub}/{name}"
            )
        ]
    return read_jsonl(Path(getattr(task.source, split)), f"task.source.{split}")


def read_jsonl(path: Path, key: str) -> list[Row]:
    """The rows of a JSONL file.

    Args:
        key: where params.yaml names the file.

    Raises:
        UserError: the file is missing, or a line is no JSON object.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file. Correct `{key}` in params.yaml, or put the file there.")
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
                raise UserError(f"{path}:{number}: not valid JSON ({error}). Correct or remove the line.") from error
            if not isinstance(values, dict):
                raise UserError(f"{path}:{number}: expected a JSON object with named columns. Correct or remove the line.")
            rows.append(Row(f"{path}:{number}", values, key))
    return rows


def download(repo: str, name: str, revision: str, key: str) -> Path:
    """Fetch one file of a Hub dataset at its fixed revision, or take it from the Hub's local cache.

    Args:
        key: the section of params.yaml that names it.

    Raises:
        UserError: it cannot be had.
    """
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repo, name, repo_type="dataset", revision=revision))
    except Exception as error:
        # Which exceptions mean "no network", "no such file" or "no access" has changed between releases of the client.
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UserError(
            f"{repo}: could not download {name} at revision {revision} ({type(error).__name__}: {reason}). "
            f"Check the network, the names under `{key}`, and, for a gated dataset, your token (HF_TOKEN); or use local "
            "files (see `studies/math-h100.yaml`)."
        ) from error


def _read_parquet(path: Path, name: str) -> list[Row]:
    import pandas

    try:
        records = pandas.read_parquet(path).to_dict("records")
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(f"{path}: not a readable parquet file ({error}). Delete it and download it again.") from error
    return [Row(f"{name} row {number}", {str(k): v for k, v in record.items()}) for number, record in enumerate(records)]
