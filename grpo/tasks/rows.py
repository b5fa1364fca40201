"""Rows of local files and of datasets on the Hugging Face Hub."""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from grpo.common.errors import UserError
from grpo.common.files import parse_json
from grpo.common.imports import named_file
from grpo.common.records import is_text
from grpo.tasks.task import Split

# These datasets have no validation split on the Hub; as in the handouts, the test split is used.
HUB_SPLIT: dict[Split, str] = {"train": "train", "validation": "test"}
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # names of the formats in `datasets`
_PART = re.compile(r"(.*?)(?:\[(?:(\d+)%)?:(?:(\d+)%)?\])?", re.S)  # a file, or a part of it in percent


class LocalFiles(BaseModel):
    """Two files, each JSONL, JSON, parquet or CSV by suffix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    train: str
    validation: str


@dataclass(frozen=True)
class Row:
    """One row of a source, with its place (``file:line``) and the source's key in params.yaml, for messages."""

    where: str
    values: dict[str, Any]
    key: str

    def text(self, *columns: str) -> str:
        """Text of the first of ``columns`` that the row has.

        Raises:
            UserError: the row has none of them, or the value is neither valid UTF-8 text nor a number.
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


def read_rows(path: Path, key: str) -> list[Row]:
    """Read the rows of a JSONL, JSON, CSV or parquet file, by suffix.

    Numbers in text files stay text, because a number would turn ``007`` into ``7``.

    Args:
        key: key of the file in params.yaml.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file. Correct `{key}` in params.yaml, or put the file there.")
    if path.suffix == ".parquet":
        return _parquet_rows(path, key)
    read = _csv_rows if path.suffix == ".csv" else _json_rows
    return [Row(where, values, key) for where, values in read(path)]


def read_part(name: str, key: str) -> list[Row]:
    """Read the rows of a file in a study, or a part of them: ``FILE[:90%]`` and ``FILE[90%:]`` split a file.

    Arguments and errors as in :func:`read_rows`.
    """
    file, first, last = _PART.fullmatch(name).groups()  # type: ignore[union-attr]  # any name matches
    rows = read_rows(named_file(file), key)
    start, end = (len(rows) * int(share or otherwise) // 100 for share, otherwise in ((first, 0), (last, 100)))
    return rows[start:end]


def file_of(name: str) -> str:
    """The file in a name that may ask for a part of it."""
    return _PART.fullmatch(name)[1]  # type: ignore[index]


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file, one per line or in one list, each with its place."""
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
    """Yield the rows below the header, each with its first line."""
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


@dataclass(frozen=True)
class HubSource:
    """Rows on the Hub: a split, a part of a split (``train[:95%]``), or a single file.

    Attributes:
        revision: commit at which it is read.
        key: key of the source in params.yaml.
        config: configuration of a dataset that has several.
        file: a JSONL, JSON, parquet or CSV file, instead of a split.
    """

    hub: str
    revision: str | None
    key: str
    split: str = "train"
    config: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.hub, self.config, self.file or self.split)))

    def rows(self, columns: Iterable[str]) -> list[Row]:
        """Read the rows, with the values of ``columns`` exactly as in the files.

        Raises:
            UserError: the rows cannot be read, or `datasets` has changed the values of a column.
        """
        try:
            if self.file is not None:
                return read_rows(Path(self._downloaded(self.file)), f"{self.key}.file")
            found, format = self._load(columns)
        except UserError:
            raise
        except Exception as error:  # the type depends on the cause and on the release
            reason = next((line for line in str(error.__cause__ or error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(
                f"{self}: could not be read at revision {self.revision} ({reason}). Check what `{self.key}` names, the "
                "network, and for a gated dataset your token (HF_TOKEN); or use local files (see `studies/math-h100.yaml`)."
            ) from error
        for column in columns:
            type_ = str(getattr(found.features.get(column), "dtype", "mixed"))
            if format == "json" and column in found.column_names and "string" not in type_ and not type_.startswith("int"):
                raise UserError(
                    f"{self}: column {column!r}: `datasets` reads {type_} values of JSON, which may not be the text that "
                    f"stands there (1 beside 0.5 becomes 1.0). Download the files and name them in `{self.key}`."
                )
        return _arrow_rows(found.with_format("arrow")[:], str(self), self.key)

    def _downloaded(self, file: str) -> str:
        import huggingface_hub

        return str(huggingface_hub.hf_hub_download(self.hub, file, repo_type="dataset", revision=self.revision))

    def _load(self, columns: Iterable[str]) -> tuple[Any, str]:
        """Load the split, and find the format of its files."""
        import datasets

        datasets.disable_progress_bars()
        where = {"path": self.hub, "name": self.config, "revision": self.revision}
        format = str(datasets.load_dataset_builder(**where).info.builder_name)
        as_text = {"converters": dict.fromkeys(columns, str)} if format == "csv" else {}
        return datasets.load_dataset(**where, split=self.split, **as_text), format


def _parquet_rows(path: Path, key: str) -> list[Row]:
    import pyarrow.parquet

    try:
        return _arrow_rows(pyarrow.parquet.read_table(path), str(path), key)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(f"{path}: not a readable parquet file ({error}). Get it anew from where it came from.") from error


def _arrow_rows(table: Any, name: str, key: str) -> list[Row]:
    """Convert an Arrow table to rows, with the shortest text of half- and single-precision numbers (0.1 in float32 is 0.1)."""
    import numpy
    import pyarrow

    kinds = {pyarrow.float16(): numpy.float16, pyarrow.float32(): numpy.float32}
    for place, field in enumerate(table.schema):
        if kind := kinds.get(field.type):
            values = table.column(place).to_pylist()
            shortest = [None if value is None else float(str(kind(value))) for value in values]
            table = table.set_column(place, field.name, pyarrow.array(shortest, pyarrow.float64()))
    return [Row(f"{name} row {number}", values, key) for number, values in enumerate(table.to_pylist(), start=1)]
