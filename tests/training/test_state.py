"""Saved states on disk, the lock between two processes, and the request to stop."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.common.errors import ToBeResumed
from grpo.common.files import dvc_hash, write_json
from grpo.common.world import stop_after_the_step
from grpo.study.kept import HASH, bring_back, keep_until_all_stored, keep_until_stored, remove_stored
from grpo.training.state import SavedState


class Counter:
    def __init__(self) -> None:
        self.value, self.tensor = 0, torch.zeros(1000)

    def count(self) -> None:
        self.value += 1
        self.tensor += 0.1

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": self.tensor}

    def restore(self, state: dict[str, Any]) -> None:
        self.value, self.tensor = state["value"], state["tensor"]


def run(folder: Path, until: int, every: int = 2, told: Callable[[], bool] = lambda: False) -> tuple[Counter, SavedState]:
    """Count on from the saved state, with a checkpoint at step 3."""
    counter, checkpoints = Counter(), folder / "checkpoints"
    for path in checkpoints.glob("*/*"):
        path.unlink()
    checkpoints.mkdir(exist_ok=True)
    with SavedState(folder / "state", every, {"counter": counter}, checkpoints, told) as saved:
        saved.restore()
        for step in range(saved.step + 1, until + 1):
            counter.count()
            if step == 3:
                (checkpoints / "best").mkdir(exist_ok=True)
                (checkpoints / "best" / "weights").write_text("of step 3")
            if saved.due(step):
                saved.save(step, {"step": step})
    return counter, saved


def states(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "state").iterdir())


def test_a_run_goes_on_from_its_newest_state(tmp_path: Path) -> None:
    run(tmp_path, until=7)
    assert states(tmp_path) == ["step-6"]
    counter, saved = run(tmp_path, until=6)
    assert (saved.step, saved.loop, counter.value) == (6, {"step": 6}, 6)
    assert torch.equal(counter.tensor, sum_of(6))
    assert (tmp_path / "checkpoints/best/weights").read_text() == "of step 3"


def sum_of(steps: int) -> torch.Tensor:
    total = torch.zeros(1000)
    for _ in range(steps):
        total += 0.1
    return total


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda state: os.truncate(state / "state.pt", 5000),
    "without its file": lambda state: (state / "state.pt").unlink(),
    "not what torch wrote": lambda state: (state / "state.pt").write_bytes(b"no zip"),
    "a file": lambda state: (shutil.rmtree(state), state.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_unreadable_state_is_gone(damage: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run starts anew, or from an older state, which a kill may have left behind."""
    run(tmp_path, until=4)
    shutil.copytree(tmp_path / "state/step-4", tmp_path / "older")
    run(tmp_path, until=6)
    (tmp_path / "older").rename(tmp_path / "state/step-4")
    (tmp_path / "state/step-x").mkdir()  # is left alone
    (tmp_path / "state/.step.draft/checkpoints").mkdir(parents=True)  # of a process that was killed while it wrote
    damage(tmp_path / "state/step-6")
    counter, saved = run(tmp_path, until=4)
    assert (saved.step, counter.value) == (4, 4)
    assert f"warning: {tmp_path}/state/step-6: cannot be read" in capsys.readouterr().out
    assert states(tmp_path) == [".step.draft", "step-4", "step-x"]
    damage(tmp_path / "state/step-4")
    assert run(tmp_path, until=0)[1].step == 0
    run(tmp_path, until=2)
    assert states(tmp_path) == ["step-2", "step-x"]


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    flush = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.1), flush(descriptor)))


def test_states_wait_for_the_one_before_and_are_sorted_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_disk(monkeypatch)
    run(tmp_path, until=11, every=1)
    assert states(tmp_path) == ["step-11"]  # as text, step-9 would come last
    assert run(tmp_path, until=11)[1].step == 11


def test_told_to_stop_the_state_is_whole_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_disk(monkeypatch)
    (tmp_path / "checkpoints").mkdir()
    saved = SavedState(tmp_path / "state", 100, {"counter": Counter()}, tmp_path / "checkpoints", lambda: True)
    assert saved.due(3)
    with pytest.raises(ToBeResumed, match="stopped after step 3; the state is saved"):
        saved.save(3)
    assert states(tmp_path) == ["step-3"]


def test_the_run_goes_on_while_its_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written state does not include changes that training makes meanwhile."""
    going_on, flush = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (going_on.wait(60), flush(descriptor)))
    counter, checkpoints = Counter(), tmp_path / "checkpoints"
    (checkpoints / "best").mkdir(parents=True)
    (checkpoints / "best" / "weights").write_text("of step 3")
    counter.count()
    with SavedState(tmp_path / "state", 1, {"counter": counter}, checkpoints) as saved:
        saved.save(1, {"waiting": [counter.tensor]})
        assert states(tmp_path) == [".step.draft"]
        for _ in range(5):
            counter.count()
        shutil.rmtree(checkpoints / "best")
        going_on.set()
    assert states(tmp_path) == ["step-1"]
    again = SavedState(tmp_path / "state", 1, {"counter": counter}, checkpoints)
    again.restore()
    assert counter.value == 1 and torch.equal(counter.tensor, sum_of(1)) and torch.equal(again.loop["waiting"][0], sum_of(1))
    assert (checkpoints / "best" / "weights").read_text() == "of step 3"


def test_a_state_that_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    run(tmp_path, until=2)
    monkeypatch.setattr(os, "fsync", full_disk)
    with SavedState(tmp_path / "state", 50, {"counter": Counter()}, tmp_path / "checkpoints") as saved:
        saved.save(50)
        with pytest.raises(OSError, match="No space left"):
            for _ in range(600):
                assert not saved.due(51)
                time.sleep(0.1)
        assert states(tmp_path) == ["step-2"]
        monkeypatch.undo()
        saved.save(60)  # it was told once
    assert states(tmp_path) == ["step-60"]


class Elsewhere:
    """A part of another process, which dies while it writes its state after the first one."""

    states = 0

    def write_state(self, file: Path) -> Callable[[], None]:
        self.states += 1
        torch.save(self.states, file)

        def wait() -> None:
            if self.states > 1:
                raise ConnectionError

        return wait

    def read_state(self, file: Path) -> None:
        self.states = torch.load(file)


def test_a_state_that_a_part_elsewhere_did_not_finish_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    part = Elsewhere()
    with SavedState(tmp_path / "state", 1, {"part": part}, tmp_path / "checkpoints") as saved:  # type: ignore[dict-item]
        saved.save(1)
        saved.save(2)
        with pytest.raises(ConnectionError):
            saved.finish()
        assert states(tmp_path) == ["step-1"]
        saved.restore()
    assert part.states == saved.step == 1
    os.truncate(tmp_path / "state/step-1/part.pt", 10)  # is part of the state
    again = SavedState(tmp_path / "state", 1, {"part": part}, tmp_path / "checkpoints")  # type: ignore[dict-item]
    again.restore()
    assert again.step == 0 and states(tmp_path) == []


@pytest.mark.parametrize("error", [PermissionError("not yours"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_state_that_another_process_could_read_is_kept(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    run(tmp_path, until=2)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(type(error)):
        run(tmp_path, until=2)
    assert states(tmp_path) == ["step-2"]


def test_a_first_ctrl_c_ends_nothing_and_a_second_one_everything(capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with stop_after_the_step() as told_to_stop:
        assert not told_to_stop()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # as a scheduler sends them
            signal.raise_signal(number)
        assert told_to_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert capfd.readouterr().err.count("asked to stop: finishing the step") == 1


def test_the_results_of_each_seed_are_kept_until_their_stage_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC stores the folder of all of them, and never one of a seed alone."""
    monkeypatch.chdir(tmp_path)
    Path("dvc.yaml").touch()
    for seed in "01":
        write_json(Path("timing") / seed / "timing.json", {"seed": seed})
        keep_until_stored(Path("state") / seed / "one", Path("timing") / seed, [Path("timing") / seed])
    one, result = Path("state/0/one"), Path("timing/0/timing.json")
    assert one.joinpath("results", result).samefile(result) and not bring_back(one, result.parent)  # nothing is missing
    shutil.rmtree("timing/0")
    assert not bring_back(Path("state/2/one"), result.parent) and not result.exists()
    assert bring_back(one, result.parent) and json.loads(result.read_text()) == {"seed": "0"}
    keep_until_all_stored(Path("state"), Path("timing"))
    Path("dvc.lock").write_text(dvc_hash(Path("timing/0")))
    remove_stored(Path("state"))
    assert len([*Path("state").rglob(HASH)]) == 2
    Path("dvc.lock").write_text(dvc_hash(Path("timing")))
    shutil.rmtree("timing/0")  # as `dvc repro -f` does, to train it again
    assert not bring_back(one, result.parent) and not result.exists() and len([*Path("state").rglob(HASH)]) == 1
    remove_stored(Path("state"))
    assert not [*Path("state").rglob(HASH)]
    Path("dvc.yaml").unlink()
    write_json(one / "state.json", {})
    keep_until_stored(one, Path("timing/0"))
    assert not one.exists()  # without a pipeline nothing stores it
