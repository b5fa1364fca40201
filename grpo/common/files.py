"""Atomic writes and validated reads of result files, and lock files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from grpo.common.errors import UserError, reason

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

# The largest that is read of what may come from elsewhere.
MOST_BYTES = 2**34  # of a file of text
MOST_UNPACKED = 2**30  # bytes of the rows of a packed file, or a hundred times its own if that is more
MOST_NODES, MOST_DEPTH = 200_000, 100  # of a YAML file, with its aliases replaced


@contextmanager
def exclusive_lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file until the process ends; UserError about ``what``, such as ``another search``, if it is held already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise UserError(f"{path}: is a link, and a lock would be written where it leads. Remove it.")
    try:
        lock = FileLock(path, mode=0o666).acquire(timeout=0)  # less the umask, which may leave it to a group
    except Timeout:
        holder = path.read_text(encoding="utf-8").strip()
        raise UserError(f"{what} is already running ({holder}). Wait for it, or end it and run this again.") from None
    with lock:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder to write into; it replaces ``target`` at the end; UserError if another process writes it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft, old, lock = (target.with_name(f".{target.name}.{kind}") for kind in ("draft", "old.draft", "draft.lock"))
    with exclusive_lock(lock, f"{target}: another process that writes it"):
        try:
            for left_by_a_kill in (draft, old):
                remove(left_by_a_kill)
            draft.mkdir()
            yield draft
            if target.exists():  # moved, not removed: a kill would leave half of it
                target.replace(old)
            draft.replace(target)
        finally:
            for finished in (draft, old):
                remove(finished)
            lock.unlink(missing_ok=True)


def note_that_off(folder: Path, key: str) -> None:
    """Write into a stage's output that ``key`` of params.yaml is off. Git drops an empty folder, and DVC warns of it."""
    write_text(folder / "README.md", f"There is nothing here, as `{key}` in params.yaml is off.\n")


def remove(path: Path) -> None:
    """Remove a file or folder; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def require_writable(folder: Path) -> None:
    """Raise OSError if a folder cannot be made or written."""
    folder.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=folder).close()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. If two processes write it at once, the later text stays."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically; a link in its place is replaced and not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except BaseException:
        remove(draft)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, with keys in order and all digits of floats."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, records: Iterable[Any]) -> None:
    """Write one JSON value per line atomically, with all digits of floats."""
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write a table atomically; an apostrophe stands before a text that a spreadsheet would compute, such as ``=1+1``."""
    begins = ("=", "+", "-", "@")
    safe = table.map(lambda cell: f"'{cell}" if isinstance(cell, str) and cell.startswith(begins) else cell)
    write_text(path, safe.to_csv(index=False, lineterminator="\n"))


def damaged(path: Path, what: object, made_by: str, line: int | None = None) -> UserError:
    """Make the error for a damaged result file of the stage ``made_by``; ``what`` is wrong with it."""
    where = f"{path}:{line}" if line else str(path)
    return UserError(f"{where}: damaged ({what}). {how_to_restore(path, made_by)}")


def how_to_restore(path: Path, made_by: str) -> str:
    """Say how to restore a damaged result. ``made_by`` is empty if no stage makes it."""
    # Without -s, -f would run all earlier stages too.
    return f"docs/faults.md says how to restore it, or run `dvc repro -f -s {made_by}`." if made_by else "Make it again."


def read_bytes(path: Path) -> bytes:
    """Read a file of text; UserError if it is no plain file (a pipe would be waited for) or has too many bytes."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
        raise UserError(f"{path}: {about.st_size:,} bytes, or no plain file; at most {MOST_BYTES:,} are read. Replace it.")
    return path.read_bytes()


def require_own(folder: Path, inside: Iterable[Path]) -> None:
    """Raise ValueError if one of these paths in ``folder`` is a link to a place elsewhere.

    The caches of the Hub (``blobs/HASH``, beside ``snapshots/REVISION``) and of DVC (``md5/HA/SH``) count as its own.
    """
    home = folder.resolve()
    of_hub = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for path in inside:
        target = path.resolve()
        if not (target.is_relative_to(home) or target.parent == of_hub or target.parent.parent.name == "md5"):
            raise ValueError(f"{path.name} is a symbolic link to a file elsewhere; put the file itself in its place")


def read_text(path: Path, made_by: str) -> str:
    """Read a text file; UserError if it is missing or holds something else."""
    try:
        return read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Run `dvc repro {made_by}` to make it.") from None
    except UnicodeDecodeError as error:
        raise damaged(path, error, made_by, line=error.object[: error.start].count(b"\n") + 1) from error


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON; every error is a ValueError."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, made_by: str, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Read a JSON object; UserError if the file is missing or damaged, or lacks one of ``keys``."""
    text = read_text(path, made_by)
    try:
        value: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise damaged(path, error, made_by) from error
    require_keys(path, value, keys, made_by)
    return value


def require_keys(path: Path, value: Any, keys: Iterable[str], made_by: str) -> None:
    """Raise UserError unless ``value``, read from ``path``, has these keys; without keys it may be anything."""
    missing = [key for key in keys if not isinstance(value, dict) or key not in value]
    if missing:
        raise damaged(path, f"{', '.join(missing)} missing", made_by)


def read_jsonl(path: Path, made_by: str, parse: Callable[[Any], T]) -> list[T]:
    """Read a file with one JSON object per line, of which ``parse`` makes a record; UserError if it is missing or wrong."""
    records = []
    # Not splitlines(), which also splits at characters such as U+2028; JSON allows these in strings.
    for number, line in enumerate(read_text(path, made_by).removesuffix("\n").split("\n"), start=1):
        try:
            records.append(parse(parse_json(line)))
        except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
            raise damaged(path, reason(error), made_by, number) from error
    return records


def read_csv(path: Path, made_by: str, columns: Iterable[str]) -> pd.DataFrame:
    """Read a table of numbers; UserError if the file is missing, empty or damaged, or lacks one of ``columns``."""
    import pandas as pd
    from pandas.api.types import is_numeric_dtype

    text = read_text(path, made_by)
    try:
        table = pd.read_csv(io.StringIO(text))
    except ValueError as error:
        raise damaged(path, reason(error), made_by) from error
    if missing := [column for column in columns if column not in table]:
        raise damaged(path, f"{', '.join(missing)} missing", made_by)
    # Without a line break at the end, the last number may be cut off.
    whole = text.endswith("\n") and len({line.count(",") for line in text.splitlines()}) == 1
    if not whole or table.empty or not all(map(is_numeric_dtype, table.dtypes)):
        raise damaged(path, "not a whole table of numbers", made_by)
    return table


def files_digest(path: Path) -> str:
    """SHA-256 (first 16 hex digits) over the names and contents of a file, or of all files in a folder except __pycache__."""
    total = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in (p for p in files if "__pycache__" not in p.relative_to(path).parts):
        with file.open("rb") as opened:
            total.update(file.name.encode() + b"\0" + hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()[:16]


def dvc_hash(folder: Path) -> str:
    """Compute the hash of a folder as DVC 3 writes it into dvc.lock: the MD5 of the list of its files with theirs."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    listed = []
    for name, path in sorted(files.items()):
        with path.open("rb") as file:
            listed.append({"md5": hashlib.file_digest(file, "md5").hexdigest(), "relpath": name})
    return hashlib.md5(json.dumps(listed).encode(), usedforsecurity=False).hexdigest() + ".dir"
