"""Lock files."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from grpo.common.errors import UserError


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
