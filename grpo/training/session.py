"""Training one run: puts model, engine, learner and validation together, and writes what comes out."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from grpo.common.cpu import start_threads
from grpo.common.errors import ToBeResumed
from grpo.common.files import write_json
from grpo.common.interruption import left_to_the_leader, stop_after_the_step
from grpo.common.records import Problem
from grpo.learner.distributed import World, join_world
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.rollout.make import make_engine
from grpo.study import paths
from grpo.study.effective import EffectiveRun
from grpo.study.methods import Asynchronous, ExpertIterationConfig, GrpoConfig, SftConfig
from grpo.study.schema import Study
from grpo.tasks.task import find_format
from grpo.tracking.mlflow_client import MlflowRun
from grpo.tracking.run_log import RunLog, now
from grpo.training.expert_iteration import train_by_expert_iteration
from grpo.training.grpo import train_grpo
from grpo.training.make import make_learner
from grpo.training.sft import train_sft
from grpo.training.state import RandomStates, SavedState
from grpo.training.validation import Validation


def train(
    study: Study,
    run: EffectiveRun,
    data: list[Any],
    validation_problems: list[Problem],
    folder: Path,
    checkpoint: Path,
    state: Path,
    mlflow: MlflowRun,
    check_weights: bool = False,
) -> dict[str, Any]:
    """Train one run, from its saved state if there is one, and write its results and its checkpoints.

    Args:
        data: training problems, or examples where it is supervised fine-tuning.
        folder: receives history.csv, validation.csv, metrics.json, outcomes.jsonl and rollouts.jsonl.
        checkpoint: receives ``last`` and ``best`` (by validation answer reward), as far as the study keeps them, each in
            Hugging Face format with a metadata.json.
        state: where the run's state is saved and found. It is the caller's to remove once the results are in place.
        check_weights: see :func:`grpo.rollout.make.make_engine`.

    Returns:
        the wall-clock figures.

    Raises:
        ToBeResumed: the process was told to stop; the run's state is saved.
    """
    started, began = now(), time.perf_counter()
    with _players(study, run, data, check_weights) as players:
        log = RunLog(folder, mlflow, began, phase_devices(study, run))
        metrics = _play(study, run, players, data, validation_problems, folder, checkpoint, state, log)
    write_json(folder / "metrics.json", metrics)
    return {
        "started": started,
        "finished": now(),
        "total_s": log.elapsed_s,
        "resumed_after": log.resumed_after,
        "phases": log.phase_totals,
        "restarts": players.restarts,
        "threads": study.threads,
        "device": study.learner.device,
        "steps": log.times,
    }


@dataclass
class _Players:
    """Who samples and who learns, in this process or elsewhere.

    Attributes:
        save: saves the policy as a checkpoint.
        restarts: of those in other processes.
    """

    tokenizer: Any
    engine: Any
    learner: Any
    save: Callable[[Path], None]
    restarts: dict[str, int] = field(default_factory=dict)


@contextmanager
def _players(study: Study, run: EffectiveRun, data: list[Any], check_weights: bool) -> Iterator[_Players]:
    if isinstance(run.config, GrpoConfig) and run.config.asynchronous is not None:
        from grpo.training.asynchronous.start import start_apart  # Ray is imported for this only

        with start_apart(study, run, data, check_weights) as (pipeline, remote):
            players = _Players(load_tokenizer(run.model), pipeline, remote, remote.save)
            yield players
            workers = (pipeline.generator, pipeline.scorer, remote.worker)
            players.restarts = {worker.name: worker.restarts for worker in workers}
        return
    tokenizer, model, world = _load(study, run)
    # Before the learner: vLLM switches the stream on which this process computes, and the learner's hooks on gradients must be
    # made on the one that its backward passes will use.
    engine = make_engine(study, run.model, model, tokenizer, check_weights, run.config)
    learner = make_learner(study.learner, run.config, model, tokenizer, world)
    try:
        yield _Players(tokenizer, engine, learner, lambda target: save_checkpoint(target, learner.model, tokenizer))
    except ToBeResumed:
        learner.dismiss()
        raise
    learner.dismiss()
    learner.world.leave()


def _play(
    study: Study,
    run: EffectiveRun,
    players: _Players,
    data: list[Any],
    validation_problems: list[Problem],
    folder: Path,
    checkpoint: Path,
    state: Path,
    log: RunLog,
) -> dict[str, Any]:
    """Train by the run's method, and write what comes out; returns the final metrics."""
    tokenizer, engine, learner = players.tokenizer, players.engine, players.learner

    def keep(kind: str, evaluation: dict[str, Any]) -> None:
        if kind in study.checkpoints or kind.startswith("step-"):
            shutil.rmtree(checkpoint / kind, ignore_errors=True)
            players.save(checkpoint / kind)
            about = {
                "run": run.name,
                "kind": kind,
                **evaluation,
                "prompt": run.config.prompt,
                "started_from": _source(study, run),
            }
            write_json(checkpoint / kind / "metadata.json", about)

    task = study.task(run.task)
    format, score = find_format(task, run.config.prompt), partial(task.score, run.config.prompt)
    validate = Validation(study, run, task, validation_problems, engine, learner, tokenizer, log, keep)
    parts = {"learner": learner, "log": log, "validation": validate, "random": RandomStates()}
    every = 1 if isinstance(run.config, ExpertIterationConfig) else study.save_state_every
    with (
        stop_after_the_step() as told_to_stop,
        validate.bar,
        SavedState(state, every, parts, checkpoint, told_to_stop) as saved,
    ):
        saved.restore()
        if saved.step:
            engine.synchronize(learner.model, saved.step)
            print(f"{run.name}: resumed after step {saved.step} of {run.config.n_steps}", flush=True)
        match run.config:
            case GrpoConfig(asynchronous=Asynchronous()) as config:
                from grpo.training.asynchronous.loop import train_grpo_asynchronously

                train_grpo_asynchronously(config, run.seed, engine, learner, validate, log, saved)
            case GrpoConfig() as config:
                train_grpo(config, run.seed, data, tokenizer, engine, learner, format, score, validate, log, saved)
            case ExpertIterationConfig() as config:
                train_by_expert_iteration(
                    config, run.seed, data, tokenizer, engine, learner, format, score, validate, log, saved
                )
            case SftConfig() as config:
                train_sft(config, run.seed, data, tokenizer, learner, validate, log, saved)
    log.close()
    validate.write(folder)
    last = log.validations[-1]
    keep("last", {"step": last["step"], "update": last["update"], "answer_reward": last["val/answer_reward"]})
    return validate.final_metrics() | ({"examples": len(data)} if isinstance(run.config, SftConfig) else {})


def follow(study: Study, run: EffectiveRun) -> None:
    """Compute a share of what another process trains, until that has finished."""
    with left_to_the_leader():
        tokenizer, model, world = _load(study, run)
        learner = make_learner(study.learner, run.config, model, tokenizer, world)
        learner.follow()
        learner.world.leave()


def _load(study: Study, run: EffectiveRun) -> tuple[Any, Any, World]:
    """The tokenizer, the policy as it is before training, and the processes that share the learner's work."""
    settings = study.learner
    start_threads(max(1, study.threads // settings.processes))
    world = join_world(settings.device)
    return load_tokenizer(run.model), load_model(run.model, settings.dtype, settings.device), world


def phase_devices(study: Study, run: EffectiveRun) -> dict[str, str]:
    """For each phase that computes on a GPU, which one; actors report what they need themselves."""
    if isinstance(run.config, GrpoConfig) and run.config.asynchronous is not None:
        return {}
    return dict.fromkeys(("rollout", "evaluation", "synchronization"), study.engine.device) | {"training": study.learner.device}


def _source(study: Study, run: EffectiveRun) -> str:
    """Where the starting weights came from, in a word or two."""
    if run.model != paths.model(run.task):
        return str(run.model)
    model = study.models[run.task]
    match model.source:
        case "hub":
            return f"{model.repo} at {model.revision}"
        case "local":
            return model.path
        case _:
            return f"pretrained by the study (seed {model.seed})"
