"""Trains runs in child processes and kills them with SIGKILL, at a given time or in the middle of a given act.

It imports everything once, so that an attempt starts at once. One JSON object a line on its standard input describes an attempt
(see :func:`attempt`); one line on its standard output tells how it ended.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training_parts import by

from grpo.common.errors import ToBeResumed
from grpo.common.process import fix_cpu_kernels, share_cpu_fairly
from grpo.learner.learner import Learner
from grpo.learner.optimizer import Optimizer
from grpo.rollout import transformers_engine
from grpo.study.effective import effective_run
from grpo.study.schema import load_study
from grpo.tracking.run_log import RunLog
from grpo.training import run
from grpo.training import train as train_module
from grpo.training.monitor import Monitor

sent = signal.SIGKILL  # to this process in the middle of an act


def die() -> None:
    """End as a killed process ends: at once. Another signal than SIGKILL is sent, and what was to be done goes on."""
    os.kill(os.getpid(), sent)
    if sent == signal.SIGKILL:
        time.sleep(60)


def half_a_checkpoint(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write weights, and of these only the first half."""
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def half_a_row(log: Any, name: str, row: Any) -> None:
    """Write the beginning of a CSV line."""
    text, file = ",".join(map(str, row.values())), log._files["history"]
    file.write(text[: len(text) // 2])
    file.flush()


# By act the function in which this process dies, and what it does before: None for all of its work.
ACTS: dict[str, tuple[Any, str, Callable[..., None] | None]] = {
    "rollout": (transformers_engine, "sample", lambda *_, **__: None),
    "backward": (Learner, "_backward", None),
    "update": (Optimizer, "finish", None),
    "evaluation": (Monitor, "_sample", None),
    "checkpoint": (train_module, "save_checkpoint", half_a_checkpoint),
    "metrics": (RunLog, "_write", half_a_row),
    "state": (os, "fsync", lambda descriptor: os.ftruncate(descriptor, 5000)),
}


def arm(act: str, nth: int, signum: int) -> None:
    """Have this process die in the ``nth`` act of a kind, or when a file or folder has got this name, which is how everything
    whole comes to its place. Another signal than SIGKILL may be sent after such a move only.
    """
    global sent
    sent = signal.Signals(signum)
    place, name, instead = ACTS.get(act, (Path, "replace", None))
    real, calls = getattr(place, name), [0]

    def killing(*args: Any, **kwargs: Any) -> Any:
        counts = act in ACTS or Path(args[1]).name == act
        calls[0] += counts
        if not counts or calls[0] != nth:
            return real(*args, **kwargs)
        done = (instead or real)(*args, **kwargs)
        die()
        return done

    setattr(place, name, killing)


def toy_reward(response: str, ground_truth: str) -> dict[str, float]:
    """A reward that an untrained model earns now and then, so that there is something to learn."""
    right = float(len(response) % 2)
    return {"reward": right, "format_reward": 1.0, "answer_reward": right}


def train(folder: str, experiment: str, name: str) -> int:
    """Train a run, and return the exit code."""
    os.chdir(folder)
    fix_cpu_kernels()
    share_cpu_fairly()
    train_module.score_of = lambda *_: by(toy_reward)
    study = load_study()
    try:
        run.train_run(study, effective_run(study, experiment, name, 0, []))
    except ToBeResumed:
        return 75
    return 0


def attempt(folder: str, experiment: str, arm_name: str, signum: int, kill_in: str = "", nth: int = 1) -> dict[str, Any]:
    """Train a run, from wherever it was, and send the process a signal in the middle of an act.

    Returns:
        ``code`` (negative: the signal it died of).
    """
    child = os.fork()
    if child == 0:
        log = os.open(f"{folder}/log.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            if kill_in:
                arm(kill_in, nth, signum)
            code = train(folder, experiment, arm_name)
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status)}


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(attempt(**json.loads(line))), flush=True)
