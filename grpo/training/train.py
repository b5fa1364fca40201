"""Training of one run: build its parts, run the method's loop, and write the results."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from grpo.common.files import write_json
from grpo.common.imports import require_extra
from grpo.common.process import start_threads
from grpo.common.world import init_world, stop_after_the_step
from grpo.learner.learner import Learner
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.models.lora import add_adapters
from grpo.models.sharding import whole_model
from grpo.rollout.make_engine import make_engine
from grpo.rollout.sampling import Sampler, require_tool_messages
from grpo.study.config import ExpertIterationConfig, GrpoConfig, RunConfig, SamplingConfig, SftConfig
from grpo.study.effective import EffectiveRun
from grpo.study.schema import Study
from grpo.tasks.rewards import score_of
from grpo.tasks.task import find_format
from grpo.tracking.run_log import Outputs, RunLog, now
from grpo.training.data import Data
from grpo.training.expert_iteration import train_by_expert_iteration
from grpo.training.grpo import train_grpo
from grpo.training.monitor import Monitor
from grpo.training.own_code import require_own_code
from grpo.training.sft import train_sft
from grpo.training.state import RandomStates, SavedState, Stateful
from grpo.training.step import RunContext, RunSetup


def train(study: Study, run: EffectiveRun, data: Data, outputs: Outputs) -> None:
    """Train a run, from its saved state if there is one.

    It writes history.csv, validation.csv, metrics.json, outcomes.jsonl and rollouts.jsonl into ``outputs.results``, and the
    checkpoints that the study keeps (``last``, ``best`` by ``study.metric``) into ``outputs.checkpoints``, each in Hugging Face
    format with a metadata.json.

    Raises ToBeResumed: the process was told to stop; the run's state is saved. Raises UserError: among others, the study's own
    loss or reward function cannot be called.
    """
    started_at, began = now(), time.perf_counter()
    task = study.task(run.task)
    require_own_code(run.config, task)
    format = find_format(task, run.config.prompt)
    if format.chat:
        tokenizer = load_tokenizer(run.model)
        format.encode(tokenizer, "?")  # refuse a tokenizer without a chat template, or without one for episodes
        require_tool_messages(format, tokenizer)
    reward = run.config.reward if isinstance(run.config, GrpoConfig) else None
    score = score_of(task, run.config.prompt, reward, run.seed)
    items, problems = data
    setup: RunSetup[Any] = RunSetup(run.config, run.seed, items, format, score, task)
    start, loop = _method(run)
    with start(study, run, setup) as (sampler, learner, save):
        log = RunLog(outputs.results, outputs.mlflow, began, phase_devices(study, run))
        origin = getattr(study.models[run.task], "origin", f"pretrained by the study ({run.base})")
        started_from = origin if run.model == run.base else str(run.model)
        about = {"prompt": run.config.prompt, "started_from": started_from, "start": run.model.as_posix()}

        def keep(kind: str, evaluation: dict[str, Any]) -> None:
            if kind in study.checkpoints or kind.startswith("step-"):
                folder = outputs.checkpoints / kind
                shutil.rmtree(folder, ignore_errors=True)  # the checkpoint of an earlier step
                save(folder)
                write_json(folder / "metadata.json", {"run": run.name, "kind": kind, **evaluation, **about})

        monitor = Monitor(study, run.name, setup, problems, sampler, learner, log, keep)
        require_room_for_all(run, monitor)
        parts: dict[str, Stateful] = {"learner": learner, "log": log, "monitor": monitor, "random": RandomStates()}
        every = 1 if isinstance(run.config, ExpertIterationConfig) else study.save_state_every
        with (
            stop_after_the_step() as told_to_stop,
            monitor.bar,
            SavedState(outputs.state, every, parts, outputs.checkpoints, told_to_stop, sampler.world) as saved,
        ):
            saved.restore()
            outputs.timing["resumed_after"] = log.resumed_after
            if saved.step:
                sampler.engine.synchronize(learner.model, saved.step)
                print(f"{run.name}: resumed after step {saved.step} of {run.config.n_steps}", flush=True)
            loop(RunContext(setup, sampler, learner, log, saved, monitor))
        log.close()
        monitor.warn_without_signal()
        monitor.write(outputs.results)
        last = log.validations[-1]
        keep("last", {"step": last["step"], "update": last["update"], study.metric: last[f"val/{study.metric}"]})
        examples = {"examples": len(items)} if isinstance(run.config, SftConfig) else {}
        write_json(outputs.results / "metrics.json", monitor.final_metrics() | examples)
    outputs.timing |= {
        "started": started_at,
        "finished": now(),
        "total_s": log.elapsed_s,
        "phases": log.phase_totals,
        "threads": study.threads,
        "device": study.learner.device,
        "steps": log.times,
    }


def phase_devices(study: Study, run: EffectiveRun) -> dict[str, str]:
    """Device of each phase, for its peak memory; empty in asynchronous runs, whose actors report their own."""
    devices = dict.fromkeys(("rollout", "evaluation", "synchronization"), study.engine.device)
    return {} if run.config.is_asynchronous else devices | {"training": study.learner.device}


# The training loop of each method, for engine and learner in this process.
LOOPS: dict[type[RunConfig], Callable[[RunContext[Any, Learner]], None]] = {
    SftConfig: train_sft,
    ExpertIterationConfig: train_by_expert_iteration,
    GrpoConfig: train_grpo,
}


def _method(run: EffectiveRun) -> tuple[Callable[..., AbstractContextManager[Any]], Callable[[Any], None]]:
    """Choose what starts engine and learner, in this process or in Ray actors, and the loop that trains with them."""
    if not run.config.is_asynchronous:
        return start_here, LOOPS[type(run.config)]
    require_extra("ray", "ray", f"{run.experiment}: an asynchronous run")
    from grpo.training.asynchronous.loop import train_grpo_asynchronously  # imports Ray, an optional package
    from grpo.training.asynchronous.start import start_asynchronous

    return start_asynchronous, train_grpo_asynchronously


def require_room_for_all(run: EffectiveRun, monitor: Monitor) -> None:
    """Refuse a run with a prompt too long for its model (:func:`grpo.rollout.engine.require_context_length`)."""
    sampler, config, limit = monitor.sampler, run.config, monitor.sampling().max_tokens
    arm = f"experiments.{run.experiment}.arms.{run.arm}" if "sampling_max_tokens" in run.overrides else run.method
    key = f"{arm}.sampling_max_tokens"
    if isinstance(config, SamplingConfig):
        sampler.require_context_length(monitor.setup.data, config.sampling_max_tokens, key, f"tasks.{run.task}")
    asked = monitor.last_problems if config.wall_clock_limit_s is None else monitor.problems
    key = "evaluation.max_tokens" if limit == monitor.study.evaluation.max_tokens else key
    sampler.require_context_length(asked, limit, key, f"tasks.{run.task}")


@contextmanager
def start_here(
    study: Study, run: EffectiveRun, setup: RunSetup[Any]
) -> Iterator[tuple[Sampler, Learner, Callable[[Path], None]]]:
    """Start engine and learner in this process, one of those that train the run; yield sampler, learner, and how to save."""
    settings = study.learner
    start_threads(max(1, study.threads // settings.processes))
    world = init_world(settings.device)
    # A model to be sharded stays on the CPU: the whole of it may not fit on the device.
    device = "cpu" if settings.fully_shard else settings.device
    tokenizer, model = load_tokenizer(run.model), load_model(run.model, settings.dtype, device)
    if run.config.lora is not None:
        add_adapters(model, run.config.lora, run.seed, run.model)
    # The engine comes first: vLLM switches this process's CUDA stream, and the learner must register its gradient hooks on the
    # stream that its backward passes use.
    engine = make_engine(study, run.model, model, tokenizer, run.config, world)
    learner = Learner(model, run.config, tokenizer.pad_token_id, settings, world)

    def save(target: Path) -> None:
        whole = whole_model(learner.model, keep=world.rank == 0)
        if world.rank == 0:
            save_checkpoint(target, whole, tokenizer)

    yield Sampler(engine, tokenizer, setup.format, setup.score, world), learner, save
    world.destroy()
