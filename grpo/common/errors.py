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

IN_PHASE = "in the phase "  # beginning of a note that is added to exceptions: the phase of a run


class UserError(Exception):
    """A mistake that the user can correct. The message says where, what is wrong and what to do."""


class ToBeResumed(Exception):
    """A run was told to stop and has saved its state; the same command continues it."""


class ActorLost(Exception):
    """An actor of an asynchronous run has died or hangs. The run can go on from its last saved state."""


class AlreadyReported(SystemExit):
    """The end of this process, because another one has failed and printed why."""


@contextmanager
def no_exit(what: str) -> Iterator[None]:
    """Turn an end of the process by the study's own code into a UserError; also a decorator.

    ``sys.exit()`` in it, or a parser of arguments, would end a run without a result, and often with exit code 0. ``what`` names
    the code, such as an import path.
    """
    try:
        yield
    except AlreadyReported:
        raise
    except SystemExit as error:
        raise UserError(
            f"{what}: {_place(error)} ends the program (exit code {error.code}), and a run would end without a result. Raise"
            " an error there instead of calling exit; what a script does, such as reading its arguments, belongs below"
            ' `if __name__ == "__main__":`.'
        ) from error


@contextmanager
def own_errors(what: str) -> Iterator[None]:
    """:func:`no_exit`; and turn any other exception of the study's own code into a UserError with its place; a decorator too.

    Exceptions that the command line explains, such as a full disk or no memory, are passed on, and those of this package too:
    they went through no own code, and a call did not fail by its arguments (TypeError).
    """
    try:
        with no_exit(what):
            yield
    except (UserError, ToBeResumed):
        raise
    except Exception as error:
        ours = not isinstance(error, TypeError | SyntaxError) and not _own_frames(error)
        if ours or explain_os_error(error) or is_out_of_memory(error):
            raise
        at = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else _place(error)
        raise UserError(f"{what}: {at}: {reason(error)}. Correct it there, and run the same command again.") from error


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The calls of a traceback that are in the study's own code: neither of Python, nor of a package, nor of this one."""
    library = ("<", str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(library)]


def _place(error: BaseException) -> str:
    """FILE:LINE of the last call in the study's own code, else of the last one."""
    frames = _own_frames(error) or traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


RESUME_ME = 75  # its exit code: EX_TEMPFAIL of sysexits.h, "try again later"


# What a user can correct: a full, read-only or forbidden disk.
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
_DRAFT = re.compile(r"/\.([^/]+)\.draft(?:\.\w+)?(?=/|$)")  # name of a result while it is written


def explain_os_error(error: BaseException) -> str | None:
    """Explain an error of a full, read-only or forbidden disk; None for any other error."""
    in_rust = re.search(r"\(os error (\d+)\)", str(error))  # as safetensors passes it on
    number = error.errno if isinstance(error, OSError) else int(in_rust[1]) if in_rust else None
    path = getattr(error, "filename", None)
    if number not in _OF_THE_DISK or (path is None and number in (errno.EACCES, errno.EPERM)):
        return None  # without a path permission may have been denied to anything, such as a connection
    where = "" if path is None else f"{from_here(final(Path(os.fsdecode(path)).absolute()))}: "
    return f"{where}{os.strerror(number)}. Correct this, and run the same command again; finished work is kept."


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
