"""Rows of local files and of datasets on the Hugging Face Hub."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from grpo.common.errors import UserError
from grpo.common.files import MOST_UNPACKED, parse_json, read_bytes
from grpo.common.imports import named_file
from grpo.common.records import is_text
from grpo.tasks.task import Settings

REVISION = Field(pattern=r"^[0-9a-f]{40}$")
_PART = re.compile(r"(.*?)(?:\[(?:(\d+)%)?:(?:(\d+)%)?\])?", re.S)  # a file, or a part of it in percent


class LocalFiles(Settings):
    """Two files, each JSONL, JSON, parquet or CSV by suffix, or parts of files (:func:`read_rows`).

    An evaluation needs no file to train on.
    """

    train: str | None = None
    validation: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of both, for :attr:`grpo.tasks.task.Task.own_files`."""
        return tuple(filter(None, (self.train, self.validation)))


def file_of(name: str) -> Path:
    """Find a file that a study names, or a part of it: ``FILE[:90%]``."""
    return named_file(_PART.fullmatch(name)[1])  # type: ignore[index]  # any name matches


@dataclass(frozen=True)
class Row:
    """One row of a source, with its place (``file:line``) and the source's key in params.yaml, for messages."""

    where: str
    values: dict[str, Any]
    key: str

    def value(self, *columns: str) -> Any:
        """Value of the first of ``columns`` that the row has; UserError if it has none of them."""
        if column := next((name for name in columns if name in self.values), None):
            return self.values[column]
        has = ", ".join(self.values) or "none"
        raise UserError(f"{self.where}: no column {' or '.join(map(repr, columns))} (columns: {has}). Check `{self.key}`.")

    def text(self, *columns: str) -> str:
        """A :meth:`value` as text; UserError also if it is neither valid UTF-8 text nor a number."""
        value = self.value(*columns)
        is_number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and math.isfinite(value)
        if is_number or (isinstance(value, str) and is_text(value)):
            return str(value)
        column = next(name for name in columns if name in self.values)
        raise UserError(f"{self.where}: column {column!r} holds {value!r}, not text. Correct the row.")

    def said(self, column: str, role: str) -> str:
        """Text of a column, or of the last message of this role in a column of messages (``role``, ``content``)."""
        messages = self.values.get(column)
        if not isinstance(messages, list):
            return self.text(column)
        of_role = [message for message in messages if isinstance(message, dict) and message.get("role") == role]
        if not of_role:
            raise UserError(f"{self.where}: column {column!r} has no message of the {role}. Correct it.")
        return replace(self, where=f"{self.where}: {column!r}", values=of_role[-1]).text("content")


def read_rows(name: str, key: str) -> list[Row]:
    """Read the rows of a study's JSONL, JSON, CSV or parquet file, or a part of them: ``FILE[:90%]`` and ``FILE[90%:]``.

    Numbers in text files stay text, where `datasets` would turn ``007`` into ``7``, and 1 beside 0.5 into 1.0. ``key``: key of
    the file in params.yaml. Raises UserError if the file is missing, cannot be read, or has no rows.
    """
    path, (_, first, last) = file_of(name), _PART.fullmatch(name).groups()  # type: ignore[union-attr]
    if not path.is_file():
        raise UserError(f"{path}: no such file. Correct `{key}` in params.yaml, or put the file there.")
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: cannot be read. Use a suffix of {', '.join(FORMATS)}.")
    try:
        rows = [Row(f"{path}{place}", values, key) for place, values in FORMATS[path.suffix](path)]
    except (ValueError, OSError, csv.Error) as error:
        raise UserError(
            f"{path}: not valid {path.suffix[1:].upper()} ({error}). Correct the file or remove the row."
        ) from error
    if not rows:
        raise UserError(f"{path}: has no rows. Add some, or name another file in `{key}`.")
    start, end = (len(rows) * int(share or otherwise) // 100 for share, otherwise in ((first, 0), (last, 100)))
    return rows[start:end]


Places = Iterator[tuple[str, dict[str, Any]]]  # each row with its place in the file


def _json_rows(path: Path) -> Places:
    """Yield the objects of a file, one per line or in one list."""
    content = read_bytes(path).decode("utf-8-sig")
    as_text: dict[str, Any] = {"parse_int": str, "parse_float": str}
    if content.lstrip().startswith("["):
        yield from ((f" row {i}", _object(value)) for i, value in enumerate(parse_json(content, **as_text), start=1))
        return
    for number, line in enumerate(content.split("\n"), start=1):
        try:
            if line.strip():
                yield f":{number}", _object(parse_json(line, **as_text))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object with named columns")
    return value


def _csv_rows(path: Path) -> Places:
    """Yield the rows below the header, each with its last line."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = list(filter(None, reader.fieldnames or ()))  # spreadsheets leave several columns without a name
        if len(set(names)) < len(names):
            raise ValueError(f"a column is there twice: {', '.join(names)}")
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"line {reader.line_num}: the number of cells is not that of the columns")
            yield f":{reader.line_num}", row


def _parquet_rows(path: Path) -> Places:
    import pyarrow.parquet

    sizes = (batch.nbytes for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024))
    most = max(MOST_UNPACKED, 100 * path.stat().st_size)  # a small file may hold one text many times
    if any(size > most for size in accumulate(sizes)):
        raise ValueError(f"its rows have more than {most:,} bytes")
    return _arrow_rows(pyarrow.parquet.read_table(path))


def _arrow_rows(table: Any) -> Places:
    """Yield the rows of an Arrow table; half- and single-precision numbers have their shortest text (0.1 in float32 is 0.1)."""
    import pyarrow

    for place, field in enumerate(table.schema):
        if field.type in (pyarrow.float16(), pyarrow.float32()):
            short = field.type.to_pandas_dtype()
            values = [None if value is None else float(str(short(value))) for value in table.column(place).to_pylist()]
            table = table.set_column(place, field.name, pyarrow.array(values, pyarrow.float64()))
    return ((f" row {number}", values) for number, values in enumerate(table.to_pylist(), start=1))


FORMATS: dict[str, Callable[[Path], Places]] = {
    **dict.fromkeys((".jsonl", ".json"), _json_rows),
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
}


class HubDataset(Settings):
    """A dataset on the Hugging Face Hub at a fixed revision.

    ``held_out`` is for a dataset without configurations and test split, such as qwedsacf/competition_math: that many fixed
    random rows become the validation split.
    """

    hub: str
    revision: str = REVISION
    held_out: PositiveInt | None = None

    def rows(self, split: str, columns: Iterable[str], key: str, config: str | None = None) -> list[Row]:
        """Read the rows of a split, or of a part of it (``train[:95%]``), with the values of ``columns`` as in the files.

        Raises UserError if the rows cannot be read, or `datasets` has changed the values of a column. ``key``: key of the
        source in params.yaml. ``config``: configuration of a dataset that has several.
        """
        import datasets

        datasets.disable_progress_bars()
        name = " ".join(filter(None, (self.hub, config, split)))
        where = {"path": self.hub, "name": config, "revision": self.revision}
        with on_the_hub(name, self.revision, key):
            format = str(datasets.load_dataset_builder(**where).info.builder_name)
            as_text = {"converters": dict.fromkeys(columns, str)} if format == "csv" else {}
            read: Any = datasets.load_dataset(**where, split=split, **as_text)
        for column in columns:
            type_ = str(getattr(read.features.get(column), "dtype", read.features.get(column)))
            if format == "json" and column in read.column_names and "string" not in type_ and not type_.startswith("int"):
                raise UserError(
                    f"{name}: column {column!r}: `datasets` reads {type_} values of JSON, which may not be the text that "
                    f"stands there (1 beside 0.5 becomes 1.0). Download the files and name them in `{key}`."
                )
        return [Row(f"{name}{place}", values, key) for place, values in _arrow_rows(read.with_format("arrow")[:])]


@contextmanager
def on_the_hub(name: str, revision: str, key: str) -> Iterator[None]:
    """Turn any error of reading from the Hub, whose type depends on the cause and on the release, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = next((line for line in str(error.__cause__ or error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"{name}: could not be read at revision {revision} ({reason}). Check what `{key}` names, the network, and for a "
            "gated dataset your token (HF_TOKEN); or use local files (see `studies/math-h100.yaml`)."
        ) from error
