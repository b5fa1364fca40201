"""Start and end of Ray and of the actors of an asynchronous run."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from ray.experimental.collective import create_collective_group, destroy_collective_group

from grpo.common.errors import ActorLost, UserError, reason
from grpo.common.process import fix_cpu_kernels, start_threads
from grpo.learner.learner import Learner
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.models.lora import add_adapters
from grpo.rollout.engine import Engine
from grpo.rollout.make_engine import make_engine
from grpo.rollout.sampling import Sampler
from grpo.study.config import GrpoConfig
from grpo.study.effective import EffectiveRun
from grpo.study.schema import Study
from grpo.training.asynchronous.actors import WRITING, Generator, LearnerActor, Scorer, Weights
from grpo.training.asynchronous.remote import START_S, RemoteLearner, RolloutPipeline, result_of
from grpo.training.step import RunSetup

MakeGenerator = Callable[[], tuple[Engine, Any, Any]]
MakeLearner = Callable[[], tuple[Learner, Callable[[Path], None]]]
LOST = (RayActorError, ObjectLostError, TimeoutError)  # of an actor that has died or hangs


@contextmanager
def start_actors(
    setup: RunSetup[GrpoConfig],
    make_generator: MakeGenerator,
    make_learner: MakeLearner,
    generator_resources: dict[str, float],
    learner_resources: dict[str, float],
    transport: str | None = None,
) -> Iterator[tuple[RolloutPipeline, RemoteLearner]]:
    """Start Ray and the three actors; the actors end with the block, and Ray stays for the next run of this process.

    ``transport``: see :class:`grpo.training.asynchronous.remote.RemoteLearner`; tested with ``gloo`` only. Raises ActorLost: an
    actor has died or hangs. Raises Exception: what an actor raised.
    """
    scorer_resources = {"num_cpus": 1.0}
    needs = [generator_resources, scorer_resources, learner_resources]
    _start_ray({name: sum(need.get(name, 0.0) for need in needs) for name in ("num_cpus", "num_gpus")})
    direct: dict[str, Any] = {"enable_tensor_transport": transport is not None}
    threads: dict[str, Any] = {"concurrency_groups": {WRITING: 1}}
    actors: dict[str, Any] = {}
    group = None
    try:
        actors["generator"] = ray.remote(**generator_resources, **direct)(Generator).remote(make_generator, setup)
        learner_class = ray.remote(**learner_resources, **direct, **threads)(LearnerActor)
        actors["learner"] = learner_class.remote(make_learner, setup.config)
        (context, loads_start), _ = result_of([actor.start.remote() for actor in actors.values()], START_S)
        if transport in ("gloo", "nccl"):  # the other one, cuda_ipc, needs no group
            group = create_collective_group(list(actors.values()), transport)
        # The scorer starts later: it is not needed before there are rollouts, and would take cores from the two.
        actors["scorer"] = ray.remote(**scorer_resources)(Scorer).remote(setup)
        learner = RemoteLearner(actors["learner"], transport)
        yield RolloutPipeline(actors["generator"], actors["scorer"], learner, context, loads_start), learner
    except (RayError, TimeoutError) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, LOST):
            raise ActorLost(f"the {' or the '.join(_lost(actors))} has died or hangs ({reason(cause)})") from error
        raise cause from error  # with the actor's own traceback above
    finally:
        for actor in actors.values():
            with suppress(Exception):
                ray.kill(actor)
        if group is not None:
            with suppress(Exception):
                destroy_collective_group(group)


@contextmanager
def start_asynchronous(
    study: Study, run: EffectiveRun, setup: RunSetup[GrpoConfig]
) -> Iterator[tuple[Sampler, RemoteLearner, Callable[[Path], None]]]:
    """Start engine and learner in actors that end with the block, as :func:`grpo.training.train.start_here` in this process.

    Raises UserError if the cluster has too few GPUs or cores.
    """
    here = Path.cwd()
    devices = {name: _device(study, name) for name in ("engine", "learner")}
    seen = {name: {"device": at if at == "cpu" else "cuda:0"} for name, at in devices.items()}  # Ray shows an actor one GPU
    actors_study = study.model_copy(update={name: getattr(study, name).model_copy(update=of) for name, of in seen.items()})
    gpus = 1.0 if devices["engine"] != devices["learner"] else 0.5  # half of the GPU that they share
    resources = {name: {"num_cpus": study.threads, "num_gpus": gpus * (at != "cpu")} for name, at in devices.items()}
    with start_actors(
        setup,
        partial(_make_generator, actors_study, run, here),
        partial(_make_learner, actors_study, run, here),
        resources["engine"],
        resources["learner"],
        transport=_transport(devices["engine"], devices["learner"]),
    ) as (pipeline, learner):
        yield Sampler(pipeline, load_tokenizer(run.model), setup.format, setup.score), learner, learner.save


def _transport(engine: str, learner: str) -> str | None:
    """How Ray Direct Transport carries weights between the devices; None through CPU memory, as Ray does without it."""
    if "cpu" in (engine, learner):
        return None
    if engine == learner:
        return "cuda_ipc"
    return "nccl" if find_spec("cupy") else None  # Ray calls NCCL by cupy


def _lost(actors: dict[str, Any]) -> list[str]:
    """The actors that have died, or else those that do not answer, which may be because they wait for another one."""
    answers = {name: actor.__ray_ready__.remote() for name, actor in actors.items()}
    ray.wait(list(answers.values()), num_returns=len(answers), timeout=5.0)
    died, silent = [], []
    for name, answer in answers.items():
        try:
            ray.get(answer, timeout=0.1)
        except TimeoutError:
            silent.append(name)
        except RayError:
            died.append(name)
    return died or silent or list(actors)


def _start_ray(needed: dict[str, float]) -> None:
    """Connect to the cluster at RAY_ADDRESS, or start a local one that ends with this process; once per process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)  # else it prints its defaults at each start
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _require_answer(address)
    cores = max(needed["num_cpus"], os.cpu_count() or 1)
    own: dict[str, Any] = {} if address else {"num_cpus": cores, "include_dashboard": False}
    try:
        if not ray.is_initialized():
            with chdir("/"):  # Ray's workers search modules first in the folder of this call
                ray.init(address=address or "local", logging_level=logging.ERROR, **own)
    except ConnectionError as error:
        raise UserError(_NO_CLUSTER.format(address, error)) from error
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for name, key in (("num_gpus", "GPU"), ("num_cpus", "CPU")):
        if there.get(key, 0) < needed[name]:
            ray.shutdown()
            raise UserError(
                f"an asynchronous run needs {needed[name]:g} {key}s (generator, learner and scorer have their own), and Ray "
                f"has {there.get(key, 0):g}. Use a larger machine or cluster (RAY_ADDRESS), lower `threads` in params.yaml, or "
                "leave the experiment out (`arms: {}`)."
            )


_NO_CLUSTER = (
    "RAY_ADDRESS ({}): no Ray cluster answers there ({}). Start one (`ray start --head`), or unset it to use this machine "
    "alone. A cluster that requires a token needs its ~/.ray/auth_token on this machine too."
)


def _require_answer(address: str) -> None:
    """Refuse an address where nothing answers, for which Ray itself would wait minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise UserError(_NO_CLUSTER.format(address, error)) from error


def _device(study: Study, name: str) -> str:
    device: str = getattr(study, name).device
    return "cuda:0" if device == "cuda" else device


def _make_generator(study: Study, run: EffectiveRun, here: Path) -> tuple[Engine, Any, Any]:
    _set_up(study, here)
    tokenizer = load_tokenizer(run.model)
    if study.engine.name == "vllm":
        engine: Any = make_engine(study, run.model, None, tokenizer, run.config)
        engine.policy_version = -1  # it gets the starting weights too: whether it takes weights shows before training
        return engine, Weights(), tokenizer
    model = load_model(run.model, study.learner.dtype, study.engine.device)
    own = study.model_copy(update={"learner": study.learner.model_copy(update={"device": study.engine.device})})
    return make_engine(own, run.model, model, tokenizer), model, tokenizer


def _make_learner(study: Study, run: EffectiveRun, here: Path) -> tuple[Learner, Callable[[Path], None]]:
    _set_up(study, here)
    tokenizer = load_tokenizer(run.model)
    model = load_model(run.model, study.learner.dtype, study.learner.device)
    if run.config.lora is not None:
        add_adapters(model, run.config.lora, run.seed, run.model)
    learner = Learner(model, run.config, tokenizer.pad_token_id, study.learner)
    return learner, lambda target: save_checkpoint(target, learner.model, tokenizer)


def _set_up(study: Study, here: Path) -> None:
    os.chdir(here)  # all nodes of a cluster share the project's folder
    fix_cpu_kernels()
    start_threads(study.threads)
