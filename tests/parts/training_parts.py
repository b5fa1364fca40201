"""Builders that tests of learner, loops and runs share: problems, scored rollouts, a run's context, a project."""

import copy
import csv
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, equal

from grpo.common.records import Problem, Rollout, write_records
from grpo.common.world import ALONE, World
from grpo.learner.learner import Learner
from grpo.models.checkpoint import save_checkpoint
from grpo.rollout.sampling import Sampler
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study import paths
from grpo.study.config import GrpoConfig
from grpo.study.schema import Study
from grpo.tasks.graded import GradedTask
from grpo.tasks.rewards import ScoreFunction
from grpo.tasks.task import Format, ScoredBatch, Task
from grpo.tracking.run_log import RunLog
from grpo.training.monitor import Monitor
from grpo.training.state import SavedState, Stateful
from grpo.training.step import RunContext, RunSetup

CONFIG = GrpoConfig(
    n_grpo_steps=12,
    learning_rate=1e-2,
    rollout_batch_size=64,
    train_batch_size=64,
    group_size=8,
    gradient_accumulation_steps=1,
    sampling_max_tokens=6,
    sampling_min_tokens=0,
    prompt="question_only",
)


class NoMlflow:
    """Stands for an MlflowRun where MLflow is not what is tested."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        assert all(isinstance(value, float | int) for value in metrics.values())

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *_, **__: None


def problems(n: int = 20) -> list[Problem]:
    return [Problem(f"p/{i}", f"Mia has {i} apples.", str(i)) for i in range(n)]


def scored(
    rollouts: Sequence[Rollout], rewards: Tensor, advantages: Tensor, old_log_probs: Sequence[Tensor] | None = None
) -> list[Rollout]:
    """The rollouts with made-up rewards and advantages, each (len(rollouts),)."""
    old = old_log_probs or [None] * len(rollouts)
    return [
        replace(rollout, rewards={**rollout.rewards, "reward": reward}, advantage=advantage, old_log_probs=log_probs)
        for rollout, reward, advantage, log_probs in zip(rollouts, rewards.tolist(), advantages.tolist(), old, strict=True)
    ]


def contains_a_t(text: str, _: str) -> dict[str, float]:
    """A toy reward that a tiny model learns in a few steps."""
    found = float("T" in text)
    return {"reward": found, "format_reward": 1.0, "answer_reward": found}


def never(text: str, truth: str) -> dict[str, float]:
    """What nothing earns."""
    return dict.fromkeys(("reward", "format_reward", "answer_reward"), 0.0)


def read_csv(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def same_weights(a: Any, b: Any) -> bool:
    return all(equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def by(reward_fn: Callable[..., dict[str, float]]) -> ScoreFunction:
    """Rewards rollouts by a function of response and ground truth."""
    return partial(score_texts, reward_fn)


def score_texts(reward_fn: Callable[..., dict[str, float]], rollouts: Sequence[Rollout]) -> ScoredBatch:
    rewards = [reward_fn(rollout.completion.text, rollout.problem.ground_truth) for rollout in rollouts]
    return ScoredBatch(rewards, [False] * len(rewards))


def never_saved(folder: Path) -> SavedState:
    """A new run's states, of which none is saved."""
    return saved_every(10**9, folder, {})


def saved_every(steps: int, folder: Path, parts: Mapping[str, Stateful]) -> SavedState:
    """A new run's states, without checkpoints."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return SavedState(folder / "state", steps, parts, folder / "checkpoints")


def setup_of(
    config: Any, data: Sequence[Any] = (), format: Format | None = None, seed: int = 0, score: Any = None
) -> RunSetup[Any]:
    """A run's; without a score nothing can be rewarded. The format is by default the handouts' that the configuration names."""
    return RunSetup(config, seed, data, format or GradedTask.formats[config.prompt], score, Task())


def context(
    config: Any,
    log: Any,
    saved: Any,
    *,
    data: Sequence[Any] = (),
    engine: Any,
    learner: Any,
    tokenizer: Any = None,
    format: Format | None = None,
    seed: int = 0,
    reward: Any = None,
    validation: Callable[[int, list[dict[str, float]]], bool] = lambda step, updates: False,
    world: World = ALONE,
) -> RunContext[Any, Any]:
    """A run's; without a reward nothing can be scored."""
    setup = setup_of(config, data, format, seed, reward and by(reward))
    return RunContext(setup, Sampler(engine, tokenizer, setup.format, setup.score, world), learner, log, saved, validation)


def monitored(
    ctx: RunContext[Any, Any], study: Study, problems: Sequence[Problem], keep: Any = lambda kind, about: None
) -> tuple[RunContext[Any, Any], Monitor]:
    """The run, evaluated on these problems, and what evaluates it."""
    monitor = Monitor(study, "run", ctx.setup, problems, ctx.sampler, ctx.learner, ctx.log, keep)
    return replace(ctx, validation=monitor), monitor


def train(
    loop: Callable[[RunContext[Any, Any]], None], config: Any, model: Any, tokenizer: Any, folder: Path, **given: Any
) -> tuple[Any, RunLog]:
    """A copy of ``model`` that the loop has trained, and the run's log; ``given`` replaces what :func:`context` is given."""
    folder.mkdir(parents=True, exist_ok=True)
    model, log = copy.deepcopy(model), RunLog(folder, NoMlflow())  # type: ignore[arg-type]
    parts = {
        "data": problems(),
        "engine": given.get("engine") or TransformersEngine(model, tokenizer),
        "learner": given.get("learner") or Learner(model, config, tokenizer.pad_token_id),
        "tokenizer": tokenizer,
        "reward": contains_a_t,
    }
    loop(context(config, log, never_saved(folder), **parts | given))
    log.close()
    return model, log


def make_project(monkeypatch: pytest.MonkeyPatch, folder: Path, model: Any, tokenizer: Any) -> None:
    """Work in a folder with this model and a few problems; runs in it are not tracked."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("grpo.training.run.MlflowRun", lambda *_: NoMlflow())
    save_checkpoint(paths.model("main"), model, tokenizer)
    write_records(paths.train("main"), problems())
    write_records(paths.validation("main"), problems(6))


def files_below(*folders: Path) -> dict[str, bytes]:
    """The content of each file below the folders."""
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def under_torchrun(worker: Path, processes: int, folder: Path, *arguments: str) -> list[Any]:
    """Run a program of tests/parts in several processes: what each has saved in ``folder``."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*torchrun, worker, folder, *arguments], capture_output=True, text=True, timeout=600, cwd=worker.parents[2]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]
