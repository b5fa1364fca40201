"""Saved states of a run, from which it resumes after it was killed or stopped.

A state is a folder ``step-N``: everything that training has changed in N steps, and the checkpoints so far. It has a draft name
until it is complete; then the state before it is removed. States lie outside all stage outputs: DVC removes outputs before a
stage runs, and has no run cache for a stage whose outputs it leaves in place (``persist: true``).

The state of a model of 1.5 billion parameters (21.6 GB) takes much longer to write than to copy to CPU memory, so training
waits for the copy only, and a thread writes it.

The loops themselves draw from no global random generator. The order of the data and the sampling seeds depend on the run's
seed and the step only (:mod:`grpo.training.data`, :func:`grpo.rollout.engine.derive_seed`), and the learning rate on the
number of updates (:mod:`grpo.learner.optimizer`).
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from grpo.common.errors import ToBeResumed, is_out_of_memory, reason
from grpo.common.files import remove
from grpo.common.world import ALONE, World
from grpo.models.sharding import gather
from grpo.study.kept import link

STATE = "state.pt"
CHECKPOINTS = "checkpoints"


class Stateful(Protocol):
    """An object with a state that training changes."""

    def state(self) -> Any:
        """The state. Training may change its tensors, lists and mappings later."""

    def restore(self, state: Any) -> None:
        """Resume from a :meth:`state`."""


@runtime_checkable
class RemoteStateful(Protocol):
    """A :class:`Stateful` in another process, which writes and reads its own file in the state's folder."""

    def write_state(self, file: Path) -> Callable[[], None]:
        """Copy the current state and start writing it, while training continues; returns a function that waits for the end."""

    def read_state(self, file: Path) -> None:
        """Resume from a file."""


def copy_to_cpu(value: Any, keep: bool = True) -> Any:
    """Copy nested mappings, lists and tuples, with their tensors gathered from all processes into CPU memory.

    Training may then change the original. Other values, such as records, must be immutable and are not copied. A process that
    only contributes its shares of tensors (without ``keep``) gets None in their place.
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
    """``torch.save``, then flush to disk, so that the file survives a crash of the machine."""
    with file.open("wb") as opened:
        torch.save(content, opened)
        opened.flush()
        os.fsync(opened.fileno())


class RandomStates:
    """Python's, numpy's and torch's global generators, from which a study's own loss, reward or task may draw."""

    def state(self) -> dict[str, Any]:
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
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all(state["cuda"])


class SavedState:
    """A run's saved states on disk; the end of its ``with`` block waits for the state that is being written.

    ``step``: the step after which the run was resumed; 0 for a new run. ``loop``: the loop's own state there, as it was given
    to :meth:`save`.

    Args:
        folder: of this run in this configuration.
        every: steps from one state to the next.
        parts: the objects to save, by name.
        checkpoints: folder of the checkpoints so far, which are part of a state.
        told_to_stop: whether the run is to save its state and end after this step.
        world: the processes that train the run together. They differ only in their shares of sharded tensors; rank 0 saves for
            all of them and decides when.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        parts: Mapping[str, Stateful],
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
        """Restore all parts from the newest state, if there is one."""
        state = self.world.of_rank_0(self._newest() if self.world.rank == 0 else None)
        if state is None:
            return
        # With mmap, several processes share one copy of the file in memory.
        content = torch.load(state / STATE, map_location="cpu", weights_only=True, mmap=True)
        for name, part in self.parts.items():
            if isinstance(part, RemoteStateful):
                part.read_state(state / f"{name}.pt")
            else:
                part.restore(content["parts"][name])
        if self.world.rank == 0:
            shutil.copytree(state / CHECKPOINTS, self.checkpoints, symlinks=True, copy_function=link, dirs_exist_ok=True)
        self.step, self.loop = content["step"], content["loop"]

    def due(self, step: int) -> bool:
        """Whether a state is due after this step; raises as :meth:`finish`."""
        if self._writing is not None and self._writing.done():
            self.finish()
        return step % self.every == 0 or self.told_to_stop()

    def save(self, step: int, loop: dict[str, Any] | None = None) -> None:
        """Copy the state after ``step`` steps, with what the loop itself needs, and write it while training continues.

        Raises ToBeResumed: the run has been told to stop; the state is saved. Raises Exception: this state could not be copied,
        or the previous one not be written.
        """
        self.finish()
        if self.world.rank == 0:
            self._take(step, loop or {})
        else:  # rank 0 needs the shares of sharded tensors
            for part in self.parts.values():
                copy_to_cpu(part.state(), keep=False)
        if self.told_to_stop():
            self.finish()
            raise ToBeResumed(f"stopped after step {step}; the state is saved. Run the same command again to go on from there.")

    def _take(self, step: int, loop: dict[str, Any]) -> None:
        draft = self.folder / ".step.draft"
        remove(draft)
        draft.mkdir(parents=True)
        shutil.copytree(self.checkpoints, draft / CHECKPOINTS, symlinks=True, copy_function=link)
        elsewhere = {name: part for name, part in self.parts.items() if isinstance(part, RemoteStateful)}
        waits = [part.write_state(draft / f"{name}.pt") for name, part in elsewhere.items()]
        parts = {name: part.state() for name, part in self.parts.items() if name not in elsewhere}
        content = copy_to_cpu({"step": step, "loop": loop, "parts": parts})
        self._writing = self._thread.submit(self._write, draft, step, content, waits)

    def finish(self) -> None:
        """Wait until the last state is written; raise its error once. The state before it stays valid."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, draft: Path, step: int, content: dict[str, Any], waits: Sequence[Callable[[], None]]) -> None:
        """Write a state in the thread, and rename it when it is complete."""
        try:
            write_durably(draft / STATE, content)
            for wait in waits:
                wait()
            draft.replace(self.folder / f"step-{step}")
        except BaseException:
            remove(draft)
            raise
        for old in self._states()[:-1]:
            remove(old)

    def _newest(self) -> Path | None:
        """The newest state that can be read, or None; newer ones are removed."""
        for state in reversed(self._states()):
            try:
                for file in {state / STATE, *state.glob("*.pt")}:
                    torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                return state
            except Exception as error:  # torch raises many kinds for a file that is no state
                if isinstance(error, PermissionError) or is_out_of_memory(error):
                    raise
                tqdm.write(f"warning: {state}: cannot be read ({reason(error)}). Without an older state the run starts anew.")
                remove(state)
        return None

    def _states(self) -> list[Path]:
        """The states, oldest first. A name without a number is none of a state."""
        found = {path.name.removeprefix("step-"): path for path in self.folder.glob("step-*")}
        return [found[number] for number in sorted(filter(str.isdecimal, found), key=int)]
