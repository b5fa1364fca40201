"""The saved state of a run: what it goes on from when it was killed or told to stop.

A state is a folder ``step-N`` with everything that training has changed in N steps, the checkpoints kept so far, and the
SHA-256 of each file. It is written beside, and gets its name when it is whole. The newest two are kept, so that there is one
left where the newest is damaged. States lie outside the outputs of all stages, which DVC removes before a stage runs.

Nothing else has to be saved: the order of the data and the seed of each sampling call depend on the run's seed and the step
alone (:mod:`grpo.training.order`, :func:`grpo.rollout.engine.derive_seed`), and the learning rate is constant.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from grpo.errors import ToBeResumed, UserError
from grpo.files import read_json, write_json

STATE = "state.pt"
CHECKPOINTS = "checkpoints"
CHECKSUMS = "sha256.json"
KEPT = 2


class Part(Protocol):
    """What has a state that training changes."""

    def state(self) -> Any:
        """The state; what it refers to may change later."""
        ...

    def restore(self, state: Any) -> None:
        """Go on from a :meth:`state`."""
        ...


class RandomStates:
    """Python's, numpy's and torch's random generators."""

    def state(self) -> dict[str, Any]:
        """See :class:`Part`."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}

    def restore(self, state: dict[str, Any]) -> None:
        """See :class:`Part`."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all(state["cuda"])


class SavedState:
    """A run's states on disk.

    Args:
        folder: of this run in this very configuration.
        every: a state is saved after so many steps.
        parts: what is saved, by name.
        checkpoints: folder of the checkpoints kept so far, which belong to the state.
        told_to_stop: whether the run is to end after this step, with its state saved.

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
    ):
        self.folder, self.every, self.parts, self.checkpoints = folder, every, parts, checkpoints
        self.told_to_stop = told_to_stop
        self.step = 0
        self.loop: dict[str, Any] = {}

    def restore(self) -> None:
        """Bring all parts to where the newest whole state has them, if there is one."""
        for state in reversed(self._states()):
            if damage := _damage(state):
                tqdm.write(f"warning: {state}: {damage}. The state before it is used, or else the run starts anew.")
                shutil.rmtree(state, ignore_errors=True)
                continue
            content = torch.load(state / STATE, map_location="cpu", weights_only=False)  # our own file, just checked
            for name, part in self.parts.items():
                part.restore(content["parts"][name])
            shutil.copytree(state / CHECKPOINTS, self.checkpoints, copy_function=_link, dirs_exist_ok=True)
            self.step, self.loop = content["step"], content["loop"]
            return

    def due(self, step: int) -> bool:
        """Whether the state is to be saved after this step."""
        return step % self.every == 0 or self.told_to_stop()

    def save(self, step: int, loop: dict[str, Any] | None = None) -> None:
        """Save the state after ``step`` steps.

        Args:
            loop: what the loop itself needs to go on.

        Raises:
            ToBeResumed: the run has been told to stop.
        """
        draft = self.folder / ".step.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            shutil.copytree(self.checkpoints, draft / CHECKPOINTS, copy_function=_link)
            content = {"step": step, "loop": loop or {}, "parts": {name: part.state() for name, part in self.parts.items()}}
            with (draft / STATE).open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())  # before it gets its name, for the case that the machine itself goes down
            write_json(draft / CHECKSUMS, _checksums(draft))
            draft.replace(self.folder / f"step-{step}")
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        for old in self._states()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        if self.told_to_stop():
            raise ToBeResumed(f"stopped after step {step}; the state is saved. Run the same command again to go on from there.")

    def _states(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def _link(source: str, target: str) -> None:
    """A second name for a file that is never written again, or a copy where the file system has no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


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
    except UserError:
        return "its list of checksums is missing or damaged"
    found = _checksums(state)
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    return f"{', '.join(wrong)} damaged or missing" if wrong else None
