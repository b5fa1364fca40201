"""Errors that a user can correct, and messages for full disks, missing permissions and exhausted memory.

The command line prints :class:`UserError` and what :func:`explain_os_error` and :func:`explain_out_of_memory` recognise as one
message on stderr, with exit code 2. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Beginnings of notes that are added to exceptions:
WHILE_WRITING = "while writing "  # the file or folder
IN_PHASE = "in the phase "  # the phase of a run


class UserError(Exception):
    """A mistake that the user can correct. The message says where, what is wrong and what to do."""


class ToBeResumed(Exception):
    """A run was told to stop and has saved its state; the same command continues it."""


class AlreadyReported(SystemExit):
    """The end of this process, because another one has failed and printed why."""


@contextmanager
def no_exit(what: str) -> Iterator[None]:
    """Turn an end of the process by the study's own code into a UserError; also a decorator.

    ``sys.exit()`` in it, or a parser of arguments, would end a run without a result, and often with exit code 0.

    Args:
        what: the code that runs in the block, such as an import path.
    """
    try:
        yield
    except AlreadyReported:
        raise
    except SystemExit as error:
        raise UserError(
            f"{what}: {place_of(error)} ends the program (exit code {error.code}), and a run would end without a result. Raise"
            " an error there instead of calling exit; what a script does, such as reading its arguments, belongs below"
            ' `if __name__ == "__main__":`.'
        ) from error


def place_of(error: BaseException) -> str:
    """FILE:LINE that raised an exception, outside of Python's own library."""
    library = (sysconfig.get_path("stdlib"), "<")
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f"{frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith(library)), "")


RESUME_ME = 75  # its exit code: EX_TEMPFAIL of sysexits.h, "try again later"


# By error number: what is wrong, and what to do.
_DENIED = ("permission denied", "Change who may read and write it (`ls -ld` shows it)")
_REFUSED = {
    errno.ENOSPC: ("no space left on the disk", "Free some (`df -h` shows how much there is)"),
    errno.EDQUOT: ("the disk quota is used up", "Free some space, or have the quota raised"),
    errno.EFBIG: ("the file would be larger than is allowed here", "Raise the limit (`ulimit -f` shows it)"),
    errno.EROFS: ("cannot be written, since the disk is read-only", "Make it writable, or move the project to another disk"),
    errno.ENAMETOOLONG: ("the name is too long for a file", "Shorten it"),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
}
_OF_FOLDERS = {errno.EROFS, errno.EACCES, errno.EPERM}  # for a file that does not exist, its folder is the cause
_NOT_ON_DISK = ("/proc/", "/sys/", "/dev/")
# Ray, libraries written in Rust and many others pass the system's errors on as text only.
_AS_TEXT = re.compile(r"""\[Errno (\d+)\][^:'\n]*(?:: '([^'\n]+)')?|\(os error (\d+)\)(?: at path "([^"\n]+)")?""")
_DRAFT = re.compile(r"/\.([^/]+)\.draft(?:\.\w+)?(?=/|$)")  # name of a result while it is written


def explain_os_error(error: BaseException) -> str | None:
    """Explain an error of a full, read-only or forbidden disk, and what to do; None for any other error."""
    chain = list(_chain(error))
    notes = [note for one in chain for note in getattr(one, "__notes__", ()) if note.startswith(WHILE_WRITING)]
    for number, path in (fact for one in chain for fact in _facts(one)):
        denied = _REFUSED.get(number) is _DENIED
        if number not in _REFUSED or (denied and (path is None or path.startswith(_NOT_ON_DISK))):
            continue  # without a path, permission may have been denied to anything, such as a connection
        wrong, remedy = _REFUSED[number]
        noted = notes[0].removeprefix(WHILE_WRITING) if notes else ""  # "": the working folder
        where = Path(noted if path is None else path).absolute()
        if path is not None and number in _OF_FOLDERS:
            where = next(place for place in (where, *where.parents) if os.path.lexists(place))
        where = final(where)
        return f"{from_here(where)}: {wrong}. {remedy}, and run the same command again; finished work is kept."
    return None


# Messages of torch's allocators, in several types of exceptions.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|(CUDA|HIP|XPU) out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
_OF_SAMPLING = "Lower engine.max_batch_size or sampling_max_tokens"
TO_LOWER = {  # remedy by phase
    "rollout": _OF_SAMPLING,
    "waiting": _OF_SAMPLING,  # the learner of an asynchronous run waits for rollouts
    "training": (
        "Lower learner.max_tokens_per_microbatch (where that is null, raise gradient_accumulation_steps), or set "
        "learner.gradient_checkpointing to true"
    ),
    "synchronization": "With vLLM, lower grpo.gpu_memory_utilization, or set engine.sleep_level to 2",
    "evaluation": "Lower engine.max_batch_size, evaluation.max_tokens or learner.max_tokens_per_microbatch",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the CPU or a GPU."""
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return no_memory or bool(_OUT_OF_MEMORY.search(str(error)))


def explain_out_of_memory(error: BaseException) -> str | None:
    """Explain in which phase memory ran out and which settings to lower; None for any other error."""
    chain = list(_chain(error))
    found = next((one for one in chain if is_out_of_memory(one)), None)
    if found is None:
        return None
    notes = [note for one in chain for note in getattr(one, "__notes__", ()) if note.startswith(IN_PHASE)]
    phase = notes[0].removeprefix(IN_PHASE) if notes else None
    where = f"in the {phase} phase" if phase else "outside of a run's phases, such as while a model is loaded"
    remedy = TO_LOWER.get(phase or "", "Use a smaller model")
    return (
        f"out of memory {where} ({reason(found)}). {remedy}, or end other programs that use the memory. With the same settings "
        "the same command continues from the last saved state; with other settings the run starts again."
    )


def final(path: Path) -> Path:
    """The place of a file once the folder that is being written is complete."""
    return Path(_DRAFT.sub(r"/\1", str(path)))


def from_here(path: Path) -> Path:
    """Make a path relative to the working folder, if it is inside."""
    absolute, here = path.absolute(), Path.cwd()
    return absolute.relative_to(here) if absolute.is_relative_to(here) and absolute != here else path


def reason(error: BaseException) -> str:
    """Describe an error in one line."""
    if isinstance(error, UserError):
        return str(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _facts(error: BaseException) -> Iterator[tuple[int, str | None]]:
    """Yield the numbers of the system errors in an exception, each with its path if known."""
    if isinstance(error, OSError) and error.errno is not None:
        known = isinstance(error.filename, str | bytes)
        yield error.errno, os.fsdecode(error.filename) if known else None
        return
    for match in _AS_TEXT.finditer(str(error)):
        number, path, rust_number, rust_path = match.groups()
        yield int(number or rust_number), path or rust_path
