"""Training one run: puts model, engine, learner and validation together, and writes what comes out."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from grpo import paths
from grpo.config import ExpertIterationConfig, GrpoConfig, SftConfig
from grpo.cpu import start_threads
from grpo.effective import EffectiveRun
from grpo.files import write_json
from grpo.models.checkpoint import compile_layers, load_model, load_tokenizer, save_checkpoint
from grpo.records import Problem
from grpo.rewards import REWARD_FNS
from grpo.rollout.make import make_engine
from grpo.study import Study
from grpo.tracking import MlflowRun, RunLog, now
from grpo.training.expert_iteration import train_by_expert_iteration
from grpo.training.grpo import train_grpo
from grpo.training.learner import Learner
from grpo.training.sft import train_sft
from grpo.training.validation import Validation
from grpo.training.world import join_world


def train(
    study: Study,
    run: EffectiveRun,
    data: list[Any],
    validation_problems: list[Problem],
    folder: Path,
    checkpoint: Path,
    mlflow: MlflowRun,
    check_weights: bool = False,
) -> dict[str, Any]:
    """Train one run, and write its results and its checkpoints.

    Args:
        data: training problems, or examples where it is supervised fine-tuning.
        folder: receives history.csv, validation.csv, metrics.json, outcomes.jsonl and rollouts.jsonl.
        checkpoint: receives ``last`` and ``best`` (by validation answer reward), as far as the study keeps them, each in
            Hugging Face format with a metadata.json.
        check_weights: see :func:`grpo.rollout.make.make_engine`.

    Returns:
        the wall-clock figures.
    """
    started, start = now(), time.perf_counter()
    tokenizer, learner = _start_learner(study, run)
    model = learner.model
    engine = make_engine(study, run.model, model, tokenizer, check_weights)
    log = RunLog(folder, mlflow)

    def keep(kind: str, evaluation: dict[str, Any]) -> None:
        if kind in study.checkpoints or kind.startswith("step-"):
            shutil.rmtree(checkpoint / kind, ignore_errors=True)
            save_checkpoint(checkpoint / kind, model, tokenizer)
            about = {
                "run": run.name,
                "kind": kind,
                **evaluation,
                "prompt": run.config.prompt,
                "started_from": _source(study, run),
            }
            write_json(checkpoint / kind / "metadata.json", about)

    validate = Validation(study, run, validation_problems, engine, learner, tokenizer, log, keep, start)
    reward_fn = REWARD_FNS[run.config.prompt]
    match run.config:
        case GrpoConfig() as config:
            train_grpo(config, run.seed, data, tokenizer, engine, learner, reward_fn, validate, log)
        case ExpertIterationConfig() as config:
            train_by_expert_iteration(config, run.seed, data, tokenizer, engine, learner, reward_fn, validate, log)
        case SftConfig() as config:
            train_sft(config, run.seed, data, tokenizer, learner, validate, log)
    metrics = validate.final_metrics() | ({"examples": len(data)} if isinstance(run.config, SftConfig) else {})
    log.close()
    write_json(folder / "metrics.json", metrics)
    validate.write(folder)
    last = log.validations[-1]
    learner.dismiss()
    learner.world.leave()
    keep("last", {"step": last["step"], "update": last["update"], "answer_reward": last["val/answer_reward"]})
    validate.bar.close()
    return {
        "started": started,
        "finished": now(),
        "total_s": time.perf_counter() - start,
        "phases": log.phase_totals,
        "threads": study.threads,
        "device": study.learner.device,
        "steps": log.times,
    }


def follow(study: Study, run: EffectiveRun) -> None:
    """Compute a share of what another process trains, until that has finished."""
    _, learner = _start_learner(study, run)
    learner.follow()
    learner.world.leave()


def _start_learner(study: Study, run: EffectiveRun) -> tuple[Any, Learner]:
    """The tokenizer, and the learner of this process."""
    settings = study.learner
    start_threads(max(1, study.threads // settings.processes))
    world = join_world(settings.device)
    tokenizer = load_tokenizer(run.model)
    model = load_model(run.model, settings.dtype, settings.device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if settings.compile:
        compile_layers(model)
    learner = Learner(
        model,
        run.config,
        tokenizer.pad_token_id,
        settings.max_tokens_per_microbatch,
        settings.optimizer,
        settings.offload_reference,
        world,
    )
    return tokenizer, learner


def _source(study: Study, run: EffectiveRun) -> str:
    """Where the starting weights came from, in a word or two."""
    if run.model != paths.MODEL:
        return str(run.model)
    model = study.model
    match model.source:
        case "hub":
            return f"{model.repo} at {model.revision}"
        case "local":
            return model.path
        case _:
            return f"pretrained by the study (seed {model.seed})"
