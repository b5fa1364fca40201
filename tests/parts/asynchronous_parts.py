"""What the tests of asynchronous training give to the Ray actors: real ones, and slow, stuck or made-up ones."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from state_parts import saved_every
from training_parts import NoMlflow, by, context, problems, setup_of

from grpo.common.records import Completion, Rollout
from grpo.learner.learner import Learner
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.rollout.engine import SamplingParams
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.methods import Asynchronous, GrpoConfig
from grpo.tasks.formats import QUESTION_ONLY
from grpo.tracking.run_log import RunLog
from grpo.training.asynchronous import actors as actors_module
from grpo.training.asynchronous.loop import train_grpo_asynchronously
from grpo.training.asynchronous.start import start_actors

CONFIG = GrpoConfig(
    n_grpo_steps=8,
    learning_rate=3e-3,
    rollout_batch_size=16,
    train_batch_size=16,
    group_size=4,
    gradient_accumulation_steps=1,
    sampling_max_tokens=5,
    sampling_min_tokens=0,
    loss_type="grpo_clip",
    prompt="question_only",
)


def asynchronous(config: GrpoConfig = CONFIG, **settings: Any) -> GrpoConfig:
    return config.model_copy(update={"asynchronous": Asynchronous(**settings)})


# ------------------------------------------------------------------------------------------------------------ in the actors


class Process:
    """The file in which an actor's process notes its number, so that a test can end it."""

    def __init__(self, folder: Path, role: str):
        self.file = folder / f"{role}.pid"

    def note(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(str(os.getpid()))

    def kill(self) -> bool:
        """End it as the kernel would; False if it has ended already."""
        try:
            os.kill(int(self.file.read_text()), signal.SIGKILL)
        except (OSError, ValueError):
            return False
        return True


def nap(longest: float) -> None:
    """Sleep for a random time; what is computed does not depend on it."""
    if longest:
        time.sleep(random.random() * longest)


class NappingEngine(TransformersEngine):
    naps = 0.0

    def generate(self, *arguments: Any, **named: Any) -> Any:
        nap(self.naps)
        return super().generate(*arguments, **named)


class RecordingLearner(Learner):
    """Remembers, as part of its state, what it was trained on: (policy version, token ids) of each rollout."""

    naps = 0.0

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.trained: list[tuple[int, tuple[int, ...]]] = []

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        nap(self.naps)
        self.trained += [(r.completion.policy_version, r.completion.token_ids) for r in rollouts]
        return super().update(rollouts)

    def state(self) -> dict[str, Any]:
        return super().state() | {"trained": list(self.trained)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.trained = list(state["trained"])


def make_generator(folder: Path, notes: Path, naps: float) -> tuple[Any, Any, Any]:
    Process(notes, "generator").note()
    torch.set_num_threads(1)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    engine = NappingEngine(model, tokenizer)
    engine.naps = naps
    return engine, model, tokenizer


def make_learner(folder: Path, notes: Path, naps: float, config: GrpoConfig) -> tuple[Learner, Callable[[Path], None]]:
    Process(notes, "learner").note()
    torch.set_num_threads(1)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    learner = RecordingLearner(model, config, tokenizer.pad_token_id)
    learner.naps = naps
    return learner, lambda target: save_checkpoint(target, model, tokenizer)


def make_slowly_writing_learner(folder: Path, notes: Path, config: GrpoConfig) -> tuple[Learner, Callable[[Path], None]]:
    """Its states take for ever where there is a file "slow"."""
    write = actors_module.write_durably

    def slowly(file: Path, content: Any) -> None:
        while (notes / "slow").exists():
            time.sleep(0.05)
        write(file, content)

    actors_module.write_durably = slowly
    return make_learner(folder, notes, 0.0, config)


class Reward:
    """1 for a text with a T in it."""

    def __init__(self, notes: Path):
        self.notes = notes

    def __call__(self, text: str, _: str) -> dict[str, float]:
        Process(self.notes, "scorer").note()
        found = float("T" in text)
        return {"reward": found, "format_reward": 1.0, "answer_reward": found}


# ------------------------------------------------------------------------------------- made-up ones, which take a fixed time


class FixedTimeEngine:
    """Samples nothing, in a fixed time."""

    def __init__(self, seconds: float):
        self.seconds, self.policy_version = seconds, 0

    def synchronize(self, model: Any, policy_version: int) -> None:
        self.policy_version = policy_version

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int) -> list[list[Completion]]:
        time.sleep(self.seconds)
        return [[Completion((1, 2), "T", (-1.0, -1.0), "stop", self.policy_version)] * n for _ in prompts]


class FixedTimeLearner:
    """Learns nothing, in a fixed time."""

    def __init__(self, seconds: float):
        self.seconds, self.model = seconds, torch.nn.Linear(4, 4)

    def drift(self, rollouts: Any) -> dict[str, float]:
        return {}

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        time.sleep(self.seconds)
        return {"loss": 0.0, "skipped_update": 0.0}

    def state(self) -> dict[str, Any]:
        return {}


def make_fixed_time_generator(folder: Path, seconds: float) -> tuple[Any, Any, Any]:
    return FixedTimeEngine(seconds), SimpleNamespace(load_state_dict=lambda state: None), load_tokenizer(folder)


def make_fixed_time_learner(seconds: float) -> tuple[Any, Any]:
    return FixedTimeLearner(seconds), lambda target: None


class StuckEngine(FixedTimeEngine):
    """Hangs at its second batch, once in a lifetime."""

    def __init__(self, notes: Path):
        super().__init__(0.0)
        self.calls, self.file = 0, notes / "was-stuck"

    def generate(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == 2 and not self.file.exists():
            self.file.write_text("")
            time.sleep(3600)
        return super().generate(*arguments, **named)


def make_stuck_generator(folder: Path, notes: Path) -> tuple[Any, Any, Any]:
    return StuckEngine(notes), SimpleNamespace(load_state_dict=lambda state: None), load_tokenizer(folder)


def slow_to_start(notes: Path) -> Any:
    (notes / "starting").touch()
    time.sleep(3600)


# -------------------------------------------------------------------------------------------------------------- in the test


@contextmanager
def ray_cluster(**environment: str) -> Iterator[str]:
    """The address of a Ray cluster of its own, with room for the three actors of one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--num-cpus=3", f"--port={port}"]
    inherited = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"}
    process = subprocess.Popen(
        [*start, "--include-dashboard=false", "--disable-usage-stats"],
        env=inherited | environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert any("Ray runtime started" in line for line in process.stdout)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()  # which ends the processes of this cluster, and of no other (`ray stop` ends all)
        process.wait(60)


def run(
    config: GrpoConfig,
    generator: Callable[[], Any],
    learner: Callable[[], Any],
    folder: Path,
    meanwhile: Any = None,
    save_every: int = 10,
    sends: bool = False,
) -> tuple[RunLog, dict[str, Any], dict[str, int]]:
    """Train asynchronously.

    Args:
        meanwhile: called with the actors once they have started.
        save_every: the run's state is saved after so many steps.
        sends: the learner sends its weights itself.

    Returns:
        the log, the learner's final state, and how often each actor was started again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(folder, NoMlflow())  # type: ignore[arg-type]
    one = {"num_cpus": 1.0}
    setup = setup_of(config, problems(10), QUESTION_ONLY, score=by(Reward(folder)))
    with start_actors(setup, generator, learner, one, one, sends) as (pipeline, remote):
        if meanwhile is not None:
            meanwhile(pipeline, remote)
        with saved_every(save_every, folder, {"learner": remote}) as saved:  # whose thread asks the learner
            train_grpo_asynchronously(pipeline, context(config, log, saved, engine=pipeline, learner=remote))
        remote.write_state(folder / "end.pt")
        assert remote.is_written()
        state = torch.load(folder / "end.pt", weights_only=True)
        restarts = {worker.name: worker.restarts for worker in (pipeline.generator, pipeline.scorer, remote.worker)}
    log.close()
    return log, state, restarts
