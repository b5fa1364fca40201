"""The saved state of a run: what it goes on from when it was killed or told to stop.

A state is a folder ``step-N`` with everything that training has changed in N steps, the checkpoints kept so far, and the
SHA-256 of each file. It is written beside, and gets its name when it is whole. The newest two are kept, so that there is one
left where the newest is damaged. States lie outside the outputs of all stages, which DVC removes before a stage runs.

Writing and hashing what a model of 1.5 billion parameters needs (21.6 GB) takes many times as long as copying it to the CPU's
memory: training waits for the copy only, and a thread writes it while training goes on.

Nothing else has to be saved: the order of the data and the seed of each sampling call depend on the run's seed and the step
alone (:mod:`grpo.training.order`, :func:`grpo.rollout.engine.derive_seed`), and the learning rate on how many updates there
were (:mod:`grpo.learner.schedule`).
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from grpo.common.errors import ToBeResumed, UserError, is_out_of_memory, reason
from grpo.common.files import read_json, remove, write_json
from grpo.common.world import ALONE, World
from grpo.models.sharding import gather
from grpo.study.kept import link

STATE = "state.pt"
CHECKPOINTS = "checkpoints"
CHECKSUMS = "sha256.json"
KEPT = 2


class Part(Protocol):
    """What has a state that training changes."""

    def state(self) -> Any:
        """The state; tensors, lists and mappings in it may change later."""
        ...

    def restore(self, state: Any) -> None:
        """Go on from a :meth:`state`."""
        ...


@runtime_checkable
class PartElsewhere(Protocol):
    """A :class:`Part` in another process, which writes and reads its state itself: a file in the state's folder."""

    def write_state(self, file: Path) -> None:
        """Take the state as it is now, and begin to write it; training may go on."""
        ...

    def is_written(self) -> bool:
        """Wait for the file. False where the process was lost meanwhile; then this state does not count."""
        ...

    def saved(self, file: Path) -> None:
        """The state is whole, and its file has this name."""
        ...

    def read_state(self, file: Path) -> None:
        """Go on from a file."""
        ...


def copy_to_cpu(value: Any, keep: bool = True) -> Any:
    """A copy of nested mappings, lists and tuples, and of the tensors in them, these in the CPU's memory, and whole.

    Training may go on and change the original. Anything else, such as a record, is taken for something that never changes.

    Args:
        keep: False in a process that only hands over its shares of tensors; it gets none.
    """
    if isinstance(value, Tensor):
        whole = gather(value.detach())
        return whole.to("cpu", copy=True) if keep else None
    if isinstance(value, Mapping):
        return {key: copy_to_cpu(each, keep) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_to_cpu(each, keep) for each in value)
    return value


def write_durably(file: Path, content: Any) -> None:
    """``torch.save``; the file is on the disk when this ends, for the case that the machine itself goes down."""
    with file.open("wb") as opened:
        torch.save(content, opened)
        opened.flush()
        os.fsync(opened.fileno())


class RandomStates:
    """Python's, numpy's and torch's random generators."""

    def state(self) -> dict[str, Any]:
        """See :class:`Part`."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        numpy: Any = np.random.get_state()
        name, key, *rest = numpy
        return {
            "python": random.getstate(),
            "numpy": (name, key.tolist(), *rest),  # an array would need numpy's code to be read
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See :class:`Part`."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all(state["cuda"])


class SavedState:
    """A run's states on disk. To be used in a ``with`` block, whose end waits for the state that is being written.

    Args:
        folder: of this run in this very configuration.
        every: a state is saved after so many steps.
        parts: what is saved, by name.
        checkpoints: folder of the checkpoints kept so far, which belong to the state.
        told_to_stop: whether the run is to end after this step, with its state saved.
        world: the processes that train the run together. Rank 0 saves for all, who are equal but for their shares of what is
            sharded, and decides when.

    Attributes:
        step: how many steps were done when the run was taken up; 0 where it is new.
        loop: what the loop itself gave to :meth:`save`, where the run was taken up.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        parts: Mapping[str, Part],
        checkpoints: Path,
        told_to_stop: Callable[[], bool] = lambda: False,
        world: World = ALONE,
    ):
        self.folder, self.every, self.parts, self.checkpoints = folder, every, parts, checkpoints
        self.told_to_stop: Callable[[], bool] = lambda: world.of_rank_0(told_to_stop())
        self.world = world
        self.step = 0
        self.loop: dict[str, Any] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def restore(self) -> None:
        """Bring all parts to where the newest whole state has them, if there is one."""
        state = self.world.of_rank_0(self._newest() if self.world.rank == 0 else None)
        if state is None:
            return
        # Several processes have the file in memory once.
        content = _load(state / STATE, mmap=self.world.size > 1)
        for name, part in self.parts.items():
            if isinstance(part, PartElsewhere):
                part.read_state(state / f"{name}.pt")
            else:
                part.restore(content["parts"][name])
        if self.world.rank == 0:
            shutil.copytree(state / CHECKPOINTS, self.checkpoints, copy_function=link, dirs_exist_ok=True)
        self.step, self.loop = content["step"], content["loop"]

    def due(self, step: int) -> bool:
        """Whether the state is to be saved after this step.

        Raises:
            Exception: the last one could not be written; see :meth:`finish`.
        """
        if self._writing is not None and self._writing.done():
            self.finish()
        return step % self.every == 0 or self.told_to_stop()

    def save(self, step: int, loop: dict[str, Any] | None = None) -> None:
        """Take the state after ``step`` steps, and have it written while the run goes on.

        Args:
            loop: what the loop itself needs to go on.

        Raises:
            ToBeResumed: the run has been told to stop; the state is saved.
            Exception: this state could not be taken, or the one before not written; see :meth:`finish`.
        """
        self.finish()
        if self.world.rank == 0:
            self._take(step, loop or {})
        else:  # of what is sharded, rank 0 needs the others' shares
            for part in self.parts.values():
                copy_to_cpu(part.state(), keep=False)
        if self.told_to_stop():
            self.finish()
            raise ToBeResumed(f"stopped after step {step}; the state is saved. Run the same command again to go on from there.")

    def _take(self, step: int, loop: dict[str, Any]) -> None:
        """Take the state, and hand it to the thread."""
        draft = self.folder / ".step.draft"
        remove(draft)
        draft.mkdir(parents=True)
        try:
            shutil.copytree(self.checkpoints, draft / CHECKPOINTS, copy_function=link)
            for name, part in self._elsewhere().items():
                part.write_state(draft / f"{name}.pt")
            parts = {name: part.state() for name, part in self.parts.items() if not isinstance(part, PartElsewhere)}
            content = copy_to_cpu({"step": step, "loop": loop, "parts": parts})
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._writing = self._thread.submit(self._write, draft, step, content)

    def finish(self) -> None:
        """Wait until the last state is written.

        Raises:
            Exception: it could not be, which is raised once; the state before it counts.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, draft: Path, step: int, content: dict[str, Any]) -> None:
        """In the thread: write a state, and give it its name when it is whole."""
        try:
            write_durably(draft / STATE, content)
            if not all(part.is_written() for part in self._elsewhere().values()):
                tqdm.write(
                    f"warning: the state after step {step} was lost with the process that wrote it; the one before counts."
                )
                shutil.rmtree(draft, ignore_errors=True)
                return
            write_json(draft / CHECKSUMS, _checksums(draft))
            whole = draft.replace(self.folder / f"step-{step}")
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        for name, part in self._elsewhere().items():
            part.saved(whole / f"{name}.pt")
        for old in self._states()[:-KEPT]:
            remove(old)

    def _elsewhere(self) -> dict[str, PartElsewhere]:
        return {name: part for name, part in self.parts.items() if isinstance(part, PartElsewhere)}

    def _newest(self) -> Path | None:
        """The newest whole state, if there is one; what is damaged is removed."""
        for state in reversed(self._states()):
            if not (damage := _damage(state)):
                return state
            tqdm.write(f"warning: {state}: {damage}. The state before it is used, or else the run starts anew.")
            remove(state)
        return None

    def _states(self) -> list[Path]:
        """Oldest first, and before them what is called like a state but has no number."""

        def number(path: Path) -> int:
            text = path.name.removeprefix("step-")
            return int(text) if text.isdecimal() else -1

        return sorted(self.folder.glob("step-*"), key=number)


def _checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a state, by its path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != CHECKSUMS:
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _damage(state: Path) -> str | None:
    """What is wrong with a state, or None."""
    try:
        wanted = read_json(state / CHECKSUMS, made_by="")
    except (UserError, IsADirectoryError, NotADirectoryError):
        wanted = None
    if not isinstance(wanted, dict) or not (state / CHECKPOINTS).is_dir():
        return "its list of checksums or its folder of checkpoints is missing or damaged"
    found = _checksums(state)
    if wrong := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        return f"{', '.join(wrong)} damaged or missing"
    try:
        contents = {path.name: _load(path, mmap=True) for path in state.glob("*.pt")}
        step, _, _ = (contents[STATE][key] for key in ("step", "loop", "parts"))
    except PermissionError:
        raise
    except Exception as error:  # whatever a file makes torch raise that is whole but no state
        if is_out_of_memory(error):
            raise
        return f"cannot be read ({reason(error)})"
    return None if state.name == f"step-{step}" else f"it is the state after step {step}"


def _load(file: Path, mmap: bool) -> Any:
    """What :func:`write_durably` wrote.

    Args:
        mmap: tensors stay in the file until they are used.
    """
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
