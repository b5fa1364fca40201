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
def only_one(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock file, so that no two processes work on the same thing.

    Uses a POSIX lock: it ends with the process, however that ends, is not inherited by children, and works over NFS.

    Args:
        what: the other process, as the subject of the message, such as ``another search``.

    Raises:
        UserError: another process holds the lock, or the file system has no locks.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still_at(lock, file):  # its holder removed it after it was opened here
                raise BlockingIOError
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise UserError(
                    f"{lock}: the file system has no locks ({error.strerror}). Put the project on a local disk, NFS 4 with its "
                    "lock service, or Lustre mounted with `flock`."
                ) from None
            if not isinstance(error, BlockingIOError | PermissionError):  # the system decides which of the two
                raise
            file.seek(0)
            holder = file.read().strip() or "just started"
            raise UserError(f"{what} is already running ({holder}). Wait for it, or end it and run this again.") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _is_still_at(path: Path, file: IO[str]) -> bool:
    """Whether ``path`` is still the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
