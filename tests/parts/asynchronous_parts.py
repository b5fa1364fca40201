"""What the tests of asynchronous training give to the Ray actors: engines and learners that may be slow or stuck."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import training_parts
from training_parts import NoMlflow, by, contains_a_t, context, problems, saved_every, setup_of

from grpo.learner.learner import Learner
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.config import Asynchronous, GrpoConfig
from grpo.tasks.formats import QUESTION_ONLY
from grpo.tasks.task import Format
from grpo.tracking.run_log import RunLog
from grpo.training.asynchronous.actors import Weights
from grpo.training.asynchronous.loop import train_grpo_asynchronously
from grpo.training.asynchronous.start import start_actors

CONFIG = training_parts.CONFIG.model_copy(
    update={
        "n_grpo_steps": 8,
        "learning_rate": 3e-3,
        "rollout_batch_size": 16,
        "train_batch_size": 16,
        "group_size": 4,
        "sampling_max_tokens": 5,
        "loss_type": "grpo_clip",
    }
)


def asynchronous(config: GrpoConfig = CONFIG, **settings: Any) -> GrpoConfig:
    return config.model_copy(update={"asynchronous": Asynchronous(**settings)})


# ------------------------------------------------------------------------------------------------------------ in the actors


def after_a_nap(work: Callable[..., Any], seconds: float, notes: Path) -> Callable[..., Any]:
    """Sleep before the work, and append start and end (s on a clock that all processes of a machine share) to a file."""

    def napping(*arguments: Any, **named: Any) -> Any:
        start = time.monotonic()
        time.sleep(seconds)
        with notes.open("a") as file:
            file.write(f"{start} {time.monotonic()}\n")
        return work(*arguments, **named)

    return napping


def make_generator(folder: Path, naps: float = 0.0, notes: Path = Path(os.devnull)) -> tuple[Any, Any, Any]:
    torch.set_num_threads(1)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    engine = TransformersEngine(model, tokenizer)
    engine.generate = after_a_nap(engine.generate, naps, notes)
    return engine, model, tokenizer


def make_vllm_generator(folder: Path) -> tuple[Any, Any, Any]:
    from grpo.rollout.vllm_engine import VllmEngine, VllmSettings

    engine = VllmEngine(folder, None, VllmSettings("float32", "cpu", 0.5, 64))
    return engine, Weights(), load_tokenizer(folder)


def make_learner(
    folder: Path, config: GrpoConfig, naps: float = 0.0, notes: Path = Path(os.devnull)
) -> tuple[Learner, Callable[[Path], None]]:
    torch.set_num_threads(1)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    learner = Learner(model, config, tokenizer.pad_token_id)
    learner.update = after_a_nap(learner.update, naps, notes)
    return learner, lambda target: save_checkpoint(target, model, tokenizer)


def kill(actor: Any) -> None:
    """End an actor's process as the kernel would."""
    import ray  # not before grpo.training.asynchronous, which says whether it sends a token

    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


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
    transport: str | None = None,
    format: Format = QUESTION_ONLY,
) -> tuple[RunLog, dict[str, Any]]:
    """Train asynchronously.

    Args:
        transport: of Ray Direct Transport.

    Returns:
        the log, and the learner's final state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(folder, NoMlflow())  # type: ignore[arg-type]
    one = {"num_cpus": 1.0}
    setup = setup_of(config, problems(10), format, score=by(contains_a_t))
    with start_actors(setup, generator, learner, one, one, transport) as (pipeline, remote):
        with saved_every(3, folder, {"learner": remote}) as saved:  # while the learner trains
            train_grpo_asynchronously(context(config, log, saved, engine=pipeline, learner=remote))
        remote.write_state(folder / "end.pt")()
    log.close()
    return log, torch.load(folder / "end.pt", weights_only=True)
