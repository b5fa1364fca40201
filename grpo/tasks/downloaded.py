"""Rows of files and of the Hub: reading them, and the checks on what was read."""

from __future__ import annotations

import codecs
import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from grpo.common.errors import UserError
from grpo.common.files import parse_json
from grpo.common.imports import named_file
from grpo.common.records import Problem, is_text
from grpo.grader.grader import check_ground_truth
from grpo.tasks.graded import GradedTask, worked_response
from grpo.tasks.task import Split

# The Hub's datasets have no split named validation; as in the handouts, the test split serves as one.
HUB_SPLIT: dict[Split, str] = {"train": "train", "validation": "test"}


@dataclass(frozen=True)
class Row:
    """One row of a source, and for messages where it stands (``file:line``) and where params.yaml names the source."""

    where: str
    values: dict[str, Any]
    key: str

    def text(self, *columns: str) -> str:
        """The first of ``columns`` that the row has, as text.

        Raises:
            UserError: it has none of them, or what it has is neither text that UTF-8 can hold nor a number.
        """
        for column in columns:
            if column in self.values:
                value = self.values[column]
                if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and math.isfinite(value):
                    return str(value)
                if isinstance(value, str) and is_text(value):
                    return value
                raise UserError(f"{self.where}: column {column!r} holds {value!r}, not text. Correct the row.")
        has = ", ".join(self.values) or "none"
        raise UserError(f"{self.where}: no column {' or '.join(map(repr, columns))} (columns: {has}). Check `{self.key}`.")


class HubDataset(BaseModel):
    """A dataset on the Hugging Face Hub at one fixed revision."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    hub: str
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")


class LocalFiles(BaseModel):
    """Two JSONL files with the columns of the Hub dataset."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    train: str
    validation: str


class Counts(BaseModel):
    """How many problems each split must have; anything else means that the source changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    train: PositiveInt
    validation: PositiveInt


class Downloaded(GradedTask):
    """Problems from a source of rows; a subclass says what its rows hold.

    Args:
        source: where the rows are; its splits may overlap (``drop_overlap``).
        expected: how many there are, to notice when they are others.
    """

    name: ClassVar[str]
    hub_files: ClassVar[list[str]]  # the parquet files of one split on the Hub, with {split} where its name belongs

    def __init__(self, source: HubDataset | LocalFiles, expected: Counts | None = None, drop_overlap: bool = False):
        self.source, self.expected, self.drop_overlap = source, expected, drop_overlap

    def problem(self, row: Row, split: Split, number: int) -> Problem:
        """What a row holds, given the split and the row's number in it (from 0)."""
        raise NotImplementedError

    def solution(self, row: Row) -> str:
        """The worked solution that a row holds."""
        raise NotImplementedError

    def problems(self, split: Split) -> list[Problem]:
        """Read, convert and check a split, as the source has it (``validation`` is its test split).

        Raises:
            UserError: a file or a column is missing, a row is not usable, the split is empty, or the number of rows is not that
                in ``expected``.
        """
        problems = [self.problem(row, split, number) for number, row in enumerate(self._rows(split))]
        if not problems:
            raise UserError(f"{self.params_key}.source: the {split} split of {self.name} is empty. Check the source.")
        expected = getattr(self.expected, split) if self.expected else len(problems)
        if len(problems) != expected:
            raise UserError(
                f"{self.params_key}.expected.{split}: {expected} problems expected, but the source has {len(problems)}. "
                f"Check that `{self.params_key}.source` is the dataset you mean, or correct the number."
            )
        return problems

    def traces(self, format: str) -> list[tuple[Problem, str]]:  # type: ignore[override]
        """The training problems with the solutions that come with them. All are right."""
        solved = [(self.problem(row, "train", number), self.solution(row)) for number, row in enumerate(self._rows("train"))]
        return [(problem, worked_response(format, steps, problem.ground_truth)) for problem, steps in solved]

    def _rows(self, split: Split) -> list[Row]:
        key = f"{self.params_key}.source"
        if isinstance(self.source, LocalFiles):
            return read_rows(named_file(getattr(self.source, split)), f"{key}.{split}")
        hub, revision = self.source.hub, self.source.revision
        names = [name.format(split=HUB_SPLIT[split]) for name in self.hub_files]
        return [row for name in names for row in _read_parquet(download(hub, name, revision, key), f"{hub}/{name}", key)]


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


def read_rows(path: Path, key: str) -> list[Row]:
    """The rows of a JSONL, JSON, CSV or parquet file, by its ending.

    Numbers of a text file are the text that stands there: no type is inferred, which would turn ``007`` into ``7``.

    Args:
        key: where params.yaml names the file.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file. Correct `{key}` in params.yaml, or put the file there.")
    if path.suffix == ".parquet":
        return _read_parquet(path, str(path), key)
    read = _csv_rows if path.suffix == ".csv" else _json_rows
    return [Row(where, values, key) for where, values in read(path)]


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, one a line or in one list, each with its place."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if content.lstrip().startswith(b"["):
        objects = ((f"{path} row {number}", value) for number, value in enumerate(_parse(content, str(path)), start=1))
    else:
        lines = ((f"{path}:{number}", line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip())
        objects = ((where, _parse(line, where)) for where, line in lines)
    for where, values in objects:
        if not isinstance(values, dict):
            raise UserError(f"{where}: expected a JSON object with named columns. Correct or remove it.")
        yield where, values


def _parse(text: bytes, where: str) -> Any:
    try:
        return parse_json(text, parse_int=str, parse_float=str)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        raise UserError(f"{where}: not valid JSON ({error}). Correct or remove it.") from error


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows below the header, each with the line that it begins in."""
    header: list[str] = []
    line = 1
    try:
        rows = csv.reader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline=""), strict=True)
        for row in rows:
            if header and row and len(row) != len(header):
                raise ValueError(f"{len(row)} cells, but {len(header)} columns")
            if header and row:
                yield f"{path}:{line}", dict(zip(header, row, strict=True))
            header, line = header or row, rows.line_num + 1
    except (csv.Error, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not valid CSV in UTF-8 ({error}). Correct or remove the row.") from error


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


def _read_parquet(path: Path, name: str, key: str) -> list[Row]:
    import pyarrow.parquet

    try:
        return rows_of(pyarrow.parquet.read_table(path), name, key)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(f"{path}: not a readable parquet file ({error}). Get it anew from where it came from.") from error


def rows_of(table: Any, name: str, key: str) -> list[Row]:
    """The rows of an Arrow table. What has few digits keeps them: 0.1 in float32 is 0.1, not 0.10000000149011612."""
    import numpy
    import pyarrow

    kinds = {pyarrow.float16(): numpy.float16, pyarrow.float32(): numpy.float32}
    for place, field in enumerate(table.schema):
        if kind := kinds.get(field.type):
            values = table.column(place).to_pylist()
            shortest = [None if value is None else float(str(kind(value))) for value in values]
            table = table.set_column(place, field.name, pyarrow.array(shortest, pyarrow.float64()))
    return [Row(f"{name} row {number}", values, key) for number, values in enumerate(table.to_pylist(), start=1)]
