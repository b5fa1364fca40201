"""The one exception type for mistakes a user can make.

The command line turns it into a single message on stderr and exit code 2, and so it does with what the disk refuses
(:func:`explain_os_error`) and with memory that runs out (:func:`explain_out_of_memory`). Every other exception is a bug of ours
and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

WHILE_WRITING = "while writing "  # begins the note that an exception gets where the file or folder at hand is known

IN_PHASE = "in the phase "  # begins the note that an exception gets in a phase of a run


class UserError(Exception):
    """A mistake the user can mend. The message says what is wrong, where, and what to do about it."""


class ToBeResumed(Exception):
    """A run was told to stop and has saved its state; the same command goes on from there."""


RESUME_ME = 75  # its exit code: EX_TEMPFAIL of sysexits.h, "try again later"


# What the disk may refuse: what is wrong, and what to do about it.
_DENIED = ("permission denied", "Change who may read and write it (`ls -ld` shows it)")
_REFUSED = {
    errno.ENOSPC: ("no space left on the disk", "Free some (`df -h` shows how much there is)"),
    errno.EDQUOT: ("the disk quota is used up", "Free some space, or have the quota raised"),
    errno.EFBIG: ("the file would be larger than is allowed here", "Raise the limit (`ulimit -f` shows it)"),
    errno.EROFS: ("cannot be written, since the disk is read-only", "Make it writable, or move the project to another disk"),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
}
_OF_FOLDERS = {errno.EROFS, errno.EACCES, errno.EPERM}  # a file that is not there yet is refused by its folder
_NOT_ON_DISK = ("/proc/", "/sys/", "/dev/")
# Libraries written in Rust, Ray and many others pass the system's errors on as text only.
_AS_TEXT = re.compile(r"""\[Errno (\d+)\][^:'\n]*(?:: '([^'\n]+)')?|\(os error (\d+)\)(?: at path "([^"\n]+)")?""")
_DRAFT = re.compile(r"/\.([^/]+)\.draft(?:\.\w+)?(?=/|$)")  # what a result is called until it is whole


def explain_os_error(error: BaseException) -> str | None:
    """What a user can do about an error, where a disk is full or must not be read or written; None for any other error."""
    chain = list(_chain(error))
    notes = [note for one in chain for note in getattr(one, "__notes__", ()) if note.startswith(WHILE_WRITING)]
    for number, path in (fact for one in chain for fact in _facts(one)):
        denied = _REFUSED.get(number) is _DENIED
        if number not in _REFUSED or (denied and (path is None or path.startswith(_NOT_ON_DISK))):
            continue  # without a path permission may have been denied to anything, such as a connection
        wrong, remedy = _REFUSED[number]
        noted = notes[0].removeprefix(WHILE_WRITING) if notes else ""  # "" is the working folder
        where = Path(noted if path is None else path).absolute()
        if path is not None and number in _OF_FOLDERS:
            where = next(place for place in (where, *where.parents) if os.path.lexists(place))
        where = Path(_DRAFT.sub(r"/\1", str(where)))
        return f"{from_here(where)}: {wrong}. {remedy}, and run the same command again; what was finished is kept."
    return None


# As torch's allocators say it, in exceptions of several kinds.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|(CUDA|HIP|XPU) out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
_OF_SAMPLING = "Lower engine.max_batch_size or sampling_max_tokens"
TO_LOWER = {
    "rollout": _OF_SAMPLING,
    "waiting": _OF_SAMPLING,  # of an asynchronous run's learner, for rollouts
    "training": (
        "Lower learner.max_tokens_per_microbatch (where that is null, raise gradient_accumulation_steps), or set "
        "learner.gradient_checkpointing to true"
    ),
    "synchronization": "Lower grpo.gpu_memory_utilization, or set engine.sleep_level to 2, where vLLM samples",
    "evaluation": "Lower engine.max_batch_size, evaluation.max_tokens or learner.max_tokens_per_microbatch",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left, the processor's or a GPU's."""
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return no_memory or bool(_OUT_OF_MEMORY.search(str(error)))


def explain_out_of_memory(error: BaseException) -> str | None:
    """Where memory ran out and which settings to lower; None for any other error."""
    chain = list(_chain(error))
    found = next((one for one in chain if is_out_of_memory(one)), None)
    if found is None:
        return None
    notes = [note for one in chain for note in getattr(one, "__notes__", ()) if note.startswith(IN_PHASE)]
    phase = notes[0].removeprefix(IN_PHASE) if notes else None
    where = f"in the {phase} phase" if phase else "outside of a run's phases, such as while a model is loaded"
    remedy = TO_LOWER.get(phase or "", "Use a smaller model")
    return (
        f"out of memory {where} ({reason(found)}). {remedy}, or end what else needs memory. With the same settings, the same "
        "command goes on from a run's last saved state; with others, a run begins anew."
    )


def from_here(path: Path) -> Path:
    """A path relative to the working folder, where it lies in it."""
    absolute, here = path.absolute(), Path.cwd()
    return absolute.relative_to(here) if absolute.is_relative_to(here) and absolute != here else path


def reason(error: BaseException) -> str:
    """An error in one line, for a message that says what it means."""
    if isinstance(error, UserError):
        return str(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came from."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _facts(error: BaseException) -> Iterator[tuple[int, str | None]]:
    """The numbers of the system's errors that an exception stands for, each with its path where that is known."""
    if isinstance(error, OSError) and error.errno is not None:
        known = isinstance(error.filename, str | bytes)
        yield error.errno, os.fsdecode(error.filename) if known else None
        return
    for match in _AS_TEXT.finditer(str(error)):
        number, path, rust_number, rust_path = match.groups()
        yield int(number or rust_number), path or rust_path
