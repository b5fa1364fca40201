"""One process at a time."""

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

    A POSIX lock: it ends with the process, however that ends, is not passed on to its children, and works over NFS.

    Raises:
        UserError: another process holds it, or there are no locks here.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still_at(lock, file):  # its holder removed it after we had opened it
                raise BlockingIOError
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise UserError(
                    f"{lock}: the file system has no locks ({error.strerror}). Put the project on one that has: a local disk,"
                    " NFS 4 with its lock service, Lustre mounted with `flock`."
                ) from None
            if not isinstance(error, BlockingIOError | PermissionError):  # one of the two, depending on the system
                raise
            file.seek(0)
            holder = file.read().strip() or "just started"
            raise UserError(f"{what} is at work already ({holder}). Wait for it, or end it and run this again.") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _is_still_at(path: Path, file: IO[str]) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
