"""Errors that a user can correct.

The command line prints :class:`UserError`, errors of the operating system and :func:`explain_out_of_memory` as one message on
stderr, with exit code 2. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo.common.safe_text import on_terminal

IN_PHASE = "in the phase "  # beginning of a note that is added to exceptions: the phase of a run
RESUME_ME = 75  # exit code of ToBeResumed: EX_TEMPFAIL of sysexits.h, "try again later"


class UserError(Exception):
    """A mistake that the user can correct. The message says where, what is wrong and what to do."""

    def __str__(self) -> str:
        return on_terminal(super().__str__())  # it may quote what a stranger wrote


class ToBeResumed(Exception):
    """A run was told to stop and has saved its state; the same command continues it."""


class ActorLost(Exception):
    """An actor of an asynchronous run has died or hangs. The run can go on from its last saved state."""


class AlreadyReported(SystemExit):
    """This process ends because another one has failed and printed why."""


@contextmanager
def own_errors(what: str, only_exits: bool = False) -> Iterator[None]:
    """Turn exceptions of the study's own code into a UserError that names file and line. Usable as a decorator.

    Passed on: exceptions of this package, and exhausted memory, which the command line explains. An exit would end a run
    without a result, and often with exit code 0. ``what`` names the code, such as an import path. ``only_exits``: pass on all
    exceptions but exits.
    """
    try:
        yield
    except (UserError, ToBeResumed, AlreadyReported, KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as error:
        ends = f"{_place(error)} ends the program (exit code {error.code})"
        raise UserError(f"{what}: {ends}. Raise an error there instead of calling exit.") from error
    except BaseException as error:  # also a CancelledError, or a PanicException of Rust's libraries
        ours = not isinstance(error, TypeError | SyntaxError) and not _own_frames(error)
        if only_exits or ours or is_out_of_memory(error):
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


# Messages of torch's allocators, in several types of exceptions, and of the operating system.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|(CUDA|HIP|XPU) out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Cannot allocate memory"
)
TO_LOWER = {  # remedy by phase; in "waiting" the learner of an asynchronous run waits for rollouts
    **dict.fromkeys(("rollout", "waiting"), "Lower engine.max_batch_size or sampling_max_tokens"),
    "training": "Lower learner.max_tokens_per_microbatch, or set learner.gradient_checkpointing to true",
    "synchronization": "With vLLM, lower grpo.gpu_memory_utilization, or set engine.sleep_level to 2",
    "evaluation": "Lower engine.max_batch_size, evaluation.max_tokens or learner.max_tokens_per_microbatch",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the CPU or a GPU."""
    return isinstance(error, MemoryError) or bool(_OUT_OF_MEMORY.search(text_of(error)))


@contextmanager
def library_errors(message: Callable[[str], str]) -> Iterator[None]:
    """Turn any error of a library into a UserError with this message of its reason; pass on exhausted memory."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError(message(reason(error))) from error


def explain_out_of_memory(error: BaseException) -> str | None:
    """Explain in which phase memory ran out and which settings to lower; None for any other error."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    exhausted = next(filter(is_out_of_memory, chain), None)
    if exhausted is None:
        return None
    notes = [note for link in chain for note in getattr(link, "__notes__", ()) if note.startswith(IN_PHASE)]
    phase = notes[0].removeprefix(IN_PHASE) if notes else ""
    where = f"in the {phase} phase" if phase else "outside of a run's phases"
    remedy = f"{TO_LOWER.get(phase, 'Use a smaller model')}, or end other programs that use the memory"
    return f"out of memory {where} ({reason(exhausted)}). {remedy}."


def from_here(path: Path) -> Path:
    """Make a path relative to the working folder, if it is inside."""
    absolute, here = path.absolute(), Path.cwd()
    return absolute.relative_to(here) if absolute.is_relative_to(here) and absolute != here else path


def text_of(error: BaseException) -> str:
    """An error's message; empty if its class fails to make one."""
    try:
        return str(error)
    except Exception:
        return ""


def reason(error: BaseException) -> str:
    """Describe an error in one line."""
    if isinstance(error, UserError):
        return str(error)
    first = next((line.strip() for line in text_of(error).splitlines() if line.strip()), "")
    return on_terminal(f"{type(error).__name__}: {first}" if first else type(error).__name__)
