"""Atomic writes and validated reads of result files, and lock files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeVar

from grpo.common.errors import UserError, from_here, reason

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")


@contextmanager
def exclusive_lock(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock file, so that only one process at a time does this work.

    Uses a POSIX lock: the system releases it when the process ends for any reason, children do not inherit it, and it
    works over NFS.

    Args:
        what: subject of the error message, such as ``another search``.

    Raises:
        UserError: another process holds the lock, or the file system has no locks.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still_at(lock, file):  # the holder removed the file after this process opened it
                raise BlockingIOError
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise UserError(
                    f"{lock}: the file system has no locks ({error.strerror}). Put the project on a local disk, NFS 4 with its "
                    "lock service, or Lustre mounted with `flock`."
                ) from None
            if not isinstance(error, BlockingIOError | PermissionError):  # a held lock raises either, depending on the system
                raise
            file.seek(0)
            holder = file.read().strip() or "just started"
            raise UserError(f"{what} is already running ({holder}). Wait for it, or end it and run this again.") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _is_still_at(path: Path, file: IO[str]) -> bool:
    """Whether ``path`` still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------------------------------------------------- writing


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder to write into; it replaces ``target`` if the block ends without an exception.

    Raises:
        UserError: another process writes this folder.
    """
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


def require_writable(folder: Path, option: str) -> None:
    """Check before the work that a folder for its results can be made and written; a UserError names its ``option``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option} {folder}: cannot be written ({error.strerror}). Name another folder.") from error
    with suppress(OSError):  # it holds earlier results
        folder.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. If two processes write it at once, the later text stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except BaseException:
        remove(draft)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, with keys in order and all digits of floats."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


# ------------------------------------------------------------------------------------------------------------- reading

# `made_by` is the stage that makes a file; messages name it.


def damaged(path: Path, what: object, made_by: str, line: int | None = None) -> UserError:
    """Make the error for a damaged result file; ``what`` is wrong with it."""
    where = f"{path}:{line}" if line else str(path)
    return UserError(f"{where}: damaged ({what}). {how_to_restore(path, made_by)}")


def how_to_restore(path: Path, made_by: str) -> str:
    """Say how to restore a damaged result: data/ is kept by DVC, reports/ by git. ``made_by`` is empty if no stage makes it."""
    if not made_by:
        return "Make it again."
    anew = f"`dvc repro -f -s {made_by}` to make it again."  # without -s, -f would run all earlier stages too
    command = {"data": "dvc checkout --force", "reports": "git checkout HEAD --"}.get(from_here(path).parts[0])
    return f"Run `{command} {from_here(path)}` to bring the stored copy back, or {anew}" if command else f"Run {anew}"


def read_text(path: Path, made_by: str) -> str:
    """Read a text file; UserError if it is missing or holds something else."""
    try:
        return path.read_bytes().decode("utf-8")
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
    """Read a file with one JSON object per line, of which ``parse`` makes a record.

    Raises:
        UserError: the file is missing or empty, or ``parse`` refuses a line.
    """
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

    text = read_text(path, made_by)
    header, *rows = text.removesuffix("\n").split("\n")
    names = header.split(",")
    if missing := [column for column in columns if column not in names]:
        raise damaged(path, f"{', '.join(missing)} missing", made_by, line=1)
    for number, row in enumerate(rows, start=2):
        try:
            numbers = [float(cell or "nan") for cell in row.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != len(names):
            raise damaged(path, f"not {len(names)} numbers", made_by, number)
    if not rows or not text.endswith("\n"):  # the last number may be cut off
        raise damaged(path, "cut off", made_by, line=len(rows) + 1)
    return pd.read_csv(io.StringIO(text))


# -------------------------------------------------------------------------------------------------------------- digests


def files_digest(path: Path) -> str:
    """SHA-256 (first 16 hex digits) over the names and contents of a file, or of all files in a folder except __pycache__."""
    total = hashlib.sha256()
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in (p for p in found if "__pycache__" not in p.relative_to(path).parts):
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def dvc_hash(folder: Path) -> str:
    """Compute the hash of a folder as DVC 3 writes it into dvc.lock: the MD5 of the list of its files with theirs."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    listed = []
    for name, path in sorted(files.items()):
        with path.open("rb") as file:
            listed.append({"md5": hashlib.file_digest(file, "md5").hexdigest(), "relpath": name})
    return hashlib.md5(json.dumps(listed).encode(), usedforsecurity=False).hexdigest() + ".dir"
