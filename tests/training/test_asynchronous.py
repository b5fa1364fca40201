"""Asynchronous GRPO on real Ray: equality with the synchronous loop, bounded lag, faults, and clean-up."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import asynchronous_parts as parts
import numpy as np
import pytest
import torch
from asynchronous_parts import CONFIG, asynchronous, make_generator, make_learner
from model_parts import FOR_VLLM, own_model, tiny_model
from safetensors.torch import load_file
from study_parts import changed, entry
from torch._subclasses.fake_tensor import FakeTensorMode
from training_parts import (
    by,
    contains_a_t,
    context,
    files_below,
    make_project,
    problems,
    read_csv,
    saved_every,
    setup_of,
    train,
)
from waiting import wait_for

from grpo.common.errors import ActorLost, UserError
from grpo.common.records import Completion, Episode, Problem, Rollout
from grpo.learner.learner import Learner
from grpo.models.checkpoint import save_checkpoint
from grpo.models.lora import add_adapters, without_adapters
from grpo.rollout.engine import SamplingParams
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study import paths
from grpo.study.config import Lora
from grpo.study.effective import effective_run
from grpo.study.schema import Study
from grpo.tasks.environment import Environment
from grpo.tasks.formats import QUESTION_ONLY
from grpo.tasks.task import Format
from grpo.tracking.run_log import RunLog
from grpo.training import run as run_module
from grpo.training.asynchronous import actors
from grpo.training.asynchronous import loop as loop_module
from grpo.training.asynchronous import start as start_module
from grpo.training.asynchronous.actors import Generator, LearnerActor, ScoredRollouts
from grpo.training.asynchronous.loop import finished, train_grpo_asynchronously
from grpo.training.asynchronous.remote import RolloutPipeline
from grpo.training.asynchronous.replay import ReplayBuffer
from grpo.training.asynchronous.start import start_actors
from grpo.training.grpo import train_grpo
from grpo.training.run import train_run
from grpo.training.step import update_policy

SMALL = CONFIG.model_copy(update={"rollout_batch_size": 6, "train_batch_size": 6, "group_size": 2})
pytestmark = pytest.mark.usefixtures("actors_find_the_parts")
shared_cluster = pytest.mark.usefixtures("on_the_cluster")


@pytest.fixture(scope="module")
def fresh_model(tokenizer: Any) -> Any:
    """The project's own Transformer, which actors load without importing transformers."""
    return own_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


@pytest.fixture(scope="module")
def folder(fresh_model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model")
    save_checkpoint(target, fresh_model, tokenizer)
    return target


def with_actors(
    config: Any, folder: Path, target: Path, naps: tuple[float, float] = (0.0, 0.0), **how: Any
) -> tuple[RunLog, dict[str, Any]]:
    """Train, with naps (s) of generator and learner: the log, and the learner's state at the end."""
    generator = partial(make_generator, folder, naps[0], target / "sampled")
    learner = partial(make_learner, folder, config, naps[1], target / "trained")
    return parts.run(config, generator, learner, target, **how)


def equal(a: Any, b: Any) -> bool:
    """Whether two states (tensors in mappings and lists) are equal bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def rows(target: Path) -> list[dict[str, float]]:
    return read_csv(target / "history.csv")


def scored(step: int, n_groups: int = 3, version: int | None = None) -> list[Rollout]:
    """A batch of groups of two, all of whose values depend on the step."""
    version = step - 1 if version is None else version
    episode = Episode((("assistant", "T"),))  # whose type a saved state must be allowed to name
    completions = [
        Completion((step, i), "", (-float(step), -0.5), "stop", version, episode=episode) for i in range(2 * n_groups)
    ]
    return [
        Rollout(Problem(f"{step}/{i // 2}", "", ""), (7,), c, {"reward": i + 100.0 * step}, advantage=i - 100.0 * step)
        for i, c in enumerate(completions)
    ]


def ids(rollouts: list[Rollout]) -> list[str]:
    return [rollout.problem.id for rollout in rollouts[::2]]


def test_groups_stay_whole_the_oldest_leave_first_and_every_use_is_counted() -> None:
    buffer = ReplayBuffer(asynchronous(SMALL, replay_capacity=2), seed=1)
    drawn: list[str] = []
    for step in range(1, 200):
        buffer.add(scored(step))
        batch = buffer.draw(step, step)
        drawn += ids(batch)
        assert len(buffer.groups) == min(2, step) * 3
        assert len(set(ids(batch))) == 3  # without replacement
        assert {int(name.split("/")[0]) for name in ids(batch)} <= {step - 1, step}  # the last two batches
        for i, rollout in enumerate(batch):
            of, position = rollout.completion.token_ids
            assert rollout.completion.log_probs[0] == -of and position % 2 == i % 2  # the two of a group side by side
            assert rollout.rewards["reward"] == 100 * of + position and rollout.advantage == position - 100 * of
    names = [f"{step}/{i}" for step in range(1, 198) for i in range(3)]  # those that have left
    uses = [drawn.count(name) for name in names]
    metrics = buffer.metrics()
    assert buffer.left == uses
    assert metrics["replay/left"] == len(names) and metrics["replay/uses_max"] == 2
    assert metrics["replay/uses_mean"] == pytest.approx(sum(uses) / len(uses))
    # A group is there for two draws of half the buffer each: never with probability 1/4, once 1/2, twice 1/4.
    assert metrics["replay/never_drawn"] == pytest.approx(0.25, abs=0.05)
    assert metrics["replay/uses_mean"] == pytest.approx(1.0, abs=0.02)
    other = ReplayBuffer(asynchronous(SMALL, replay_capacity=2), seed=2)
    other.restore(buffer.state())
    assert any(ids(other.draw(step, step)) != ids(buffer.draw(step, step)) for step in range(5))  # draws depend on the seed


def test_a_state_of_the_buffer_stays_as_it_was_taken() -> None:
    """The state is written while training continues."""
    buffer = ReplayBuffer(asynchronous(SMALL, replay_capacity=1), seed=0)
    buffer.add(scored(1))
    buffer.draw(1, 0)
    groups, left = buffer.state()
    buffer.draw(2, 0)
    buffer.add(scored(2))
    assert [group.uses for group in groups] == [1, 1, 1] and left == [] and buffer.left == [2, 2, 2]
    assert buffer.metrics()["replay/uses_max"] == 2  # of those that have left: the new ones were not drawn yet


class Remembering:
    def __init__(self) -> None:
        self.old: list[Any] = []
        self.seen: list[tuple[int, int]] = []  # of each rollout of each update its place in the batch, and its group

    def log_probs(self, rollouts: list[Rollout]) -> list[torch.Tensor]:
        return [torch.full((len(r.completion.token_ids),), -9.0) for r in rollouts]

    def update(self, rollouts: list[Rollout]) -> dict[str, float]:
        self.old.append([rollout.old_log_probs for rollout in rollouts])
        self.seen += [(rollout.completion.token_ids[1], rollout.group) for rollout in rollouts]
        return {}


@pytest.mark.parametrize(("epochs", "train_batch_size"), [(1, 6), (2, 6), (1, 2), (2, 3)])
def test_stale_rollouts_bring_their_own_log_probs_and_fresh_ones_the_learners(epochs: int, train_batch_size: int) -> None:
    """After one update on a rollout batch, the policy is no longer the one that sampled it."""
    config = SMALL.model_copy(update={"train_batch_size": train_batch_size, "epochs_per_rollout_batch": epochs})
    fresh, stale, mixed = Remembering(), Remembering(), Remembering()
    update_policy(config, fresh, scored(4), version=3)  # type: ignore[arg-type]
    update_policy(config, stale, scored(4), version=4)  # type: ignore[arg-type]
    # Of a batch with one stale group, such as a replay batch may be, all rollouts bring their own.
    update_policy(config, mixed, [*scored(4, version=4)[:4], *scored(4, version=3)[4:]], version=4)  # type: ignore[arg-type]
    assert len(fresh.old) == len(stale.old) == epochs * 6 // train_batch_size
    assert fresh.seen == [(place, place // 2) for place in range(6)] * epochs  # the whole batch before any of it again
    if len(fresh.old) == 1:
        assert fresh.old == [[None] * 6]  # the current policy's own: ratios are exactly 1
    else:
        assert all(old.eq(-9.0).all() for update in fresh.old for old in update)
    assert all(equal(update, [torch.tensor([-4.0, -0.5])] * train_batch_size) for update in stale.old)
    assert equal(mixed.old, stale.old)
    # Importance weights lead from these to the learner's.
    capped, config = Remembering(), config.model_copy(update={"importance_cap": 2.0})
    update_policy(config, capped, scored(4), version=4)  # type: ignore[arg-type]
    assert equal(capped.old, fresh.old)


def test_a_generator_counts_its_own_times_and_memory(tokenizer: Any) -> None:
    """It does not wait while it evaluates or loads weights, and loading is not sampling."""

    def generate(prompts: Any, params: SamplingParams, n: int, seed: int) -> list[list[Completion]]:
        """Sample nothing, in a fixed time, with as many MiB of memory as a call has tokens."""
        torch.ones(params.max_tokens, 2**18).sum()
        time.sleep(0.1)
        return [[Completion((1, 2), "T", (-1.0, -1.0), "stop", engine.policy_version)] * n for _ in prompts]

    engine = SimpleNamespace(context=None, policy_version=0, generate=generate)
    engine.synchronize = lambda model, policy_version: setattr(engine, "policy_version", policy_version)
    loading = SimpleNamespace(load_state_dict=lambda weights: time.sleep(0.2))
    few, many = (setup_of(CONFIG.model_copy(update={"sampling_max_tokens": n}), problems(8), QUESTION_ONLY) for n in (2, 256))
    generator = Generator(lambda: (engine, loading, tokenizer), many)
    assert generator.start() == (None, False)
    time.sleep(0.4)
    _, first = generator.sample(1)
    time.sleep(0.4)
    generator.generate([[1]], SamplingParams(max_tokens=1), 1, 0, ())
    generator.setup = few
    rollouts, second = generator.sample(2, generator.load({}, 1))
    assert {r.completion.policy_version for r in rollouts} == {1}
    for times, waited, loaded in ((first, 0.4, 0.0), (second, 0.0, 0.2)):
        found = [times[f"{name}_s"] for name in ("rollout", "generator_waiting", "generator_synchronization")]
        assert found[1:] == pytest.approx([waited, loaded], abs=0.09) and found[0] >= 0.1
    assert first["rollout_peak_mb"] - second["rollout_peak_mb"] > 200


def test_what_leaves_the_learners_actor_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that claim to be on a GPU: Ray would send such weights to the reader's GPU, and training changes a state."""
    written: list[Any] = []
    monkeypatch.setattr(actors, "write_durably", lambda _, content: written.append(content))
    with FakeTensorMode():
        weight = torch.ones(3, device="cuda:0")
        learner = SimpleNamespace(
            state=lambda: {"model": {"w": weight}, "optimizer": {"weights": [None, weight]}, "rates": ({"lr": 0.1},)},
            model=SimpleNamespace(state_dict=lambda: {"w": weight}),
        )
        actor = LearnerActor(lambda: (learner, len), asynchronous())  # type: ignore[arg-type, return-value]
        actor.start()
        actor.copy_state()
        actor.write_state(Path())
        state, weights = written[0], actor.weights()
    found = [state["model"]["w"], state["optimizer"]["weights"][1], weights["w"]]
    assert [tensor.device.type for tensor in found] == ["cpu"] * 3
    assert state["rates"] == ({"lr": 0.1},) and state["optimizer"]["weights"][0] is None


class Versions:
    """A stand-in for pipeline and learner that records the version of each batch."""

    def __init__(self, groups: int) -> None:
        self.groups, self.version, self.trained, self.peak_mb = groups, 0, [], 0.0
        self.model = None

    def request(self, step: int) -> Future[ScoredRollouts]:
        batch = scored(step, self.groups, self.version)
        for rollout in batch:  # longer at each step
            rollout.completion = replace(rollout.completion, token_ids=(5,) * step, log_probs=(0.0,) * step)
        return finished(ScoredRollouts(batch, {}, {"rollout_s": 0.0}))

    def synchronize(self, model: Any, policy_version: int) -> None:
        self.version = policy_version

    def train(self, rollouts: list[Rollout], version: int) -> list[dict[str, float]]:
        self.peak_mb += 1.0
        batch = [(r.problem.id, r.completion.policy_version, len(r.completion.token_ids)) for r in rollouts]
        self.trained.append((version, batch))
        return [{"loss": 0.0}]

    def state(self) -> list[Any]:
        return [self.version, self.trained]

    def restore(self, state: list[Any]) -> None:
        self.version, self.trained = state


def loop(folder: Path, config: Any, saves_at: int, ends_at: int) -> tuple[list[Any], RunLog]:
    """Train up to ``ends_at``, from the saved state if there is one: what was trained on, and the log."""
    folder.mkdir(exist_ok=True)
    both: Any = Versions(config.n_prompts_per_rollout_batch)
    log = RunLog(folder, parts.NoMlflow())  # type: ignore[arg-type]
    with saved_every(saves_at, folder, {"both": both, "log": log}) as saved:
        saved.restore()
        ends = {"validation": lambda step, updates: step == ends_at}
        train_grpo_asynchronously(context(config, log, saved, engine=both, learner=both, **ends))
    log.close()
    return both.trained, log


def test_what_is_logged_is_of_the_drawn_batch(tmp_path: Path) -> None:
    trained, log = loop(tmp_path, asynchronous(SMALL, max_policy_lag=0, replay_capacity=4), 100, 8)
    lags = [[version - sampled_by for _, sampled_by, _ in batch] for version, batch in trained]
    assert max(map(max, lags)) == 3  # three batches are older than the newest, whose lag is 0
    found = [(row["lag_min"], row["lag_max"]) for row in rows(tmp_path)]
    assert found == [(min(lag), max(lag)) for lag in lags]
    lengths = [[length for _, _, length in batch] for _, batch in trained]
    means = [np.average(lag, weights=length) for lag, length in zip(lags, lengths, strict=True)]
    assert [row["lag_mean"] for row in rows(tmp_path)] == pytest.approx(means)
    tokens = [row["tokens_per_s"] * row["training_s"] for row in log.times]  # sampling takes no time here
    assert tokens == pytest.approx([sum(length) for length in lengths])
    assert [row["training_peak_mb"] for row in log.times] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("older", [None, 1])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_resumed_run_trains_on_the_same_groups(tmp_path: Path, lag: int, older: int | None) -> None:
    max_age = None if older is None else lag + older
    config = SMALL.model_copy(update={"n_grpo_steps": 12})
    config = asynchronous(config, max_policy_lag=lag, replay_capacity=3, replay_max_age=max_age)
    straight, _ = loop(tmp_path / "straight", config, 100, 12)
    assert loop(tmp_path / "again", config, 5, 7)[0] == straight[:7]
    assert loop(tmp_path / "again", config, 5, 12)[0] == straight
    assert rows(tmp_path / "again") == rows(tmp_path / "straight")
    ages = [version - sampled_by for version, batch in straight for _, sampled_by, _ in batch]
    assert [version for version, _ in straight] == list(range(12))
    assert min(ages) == 0 and max(ages) == lag + (older or 2)  # the buffer keeps each batch for three steps


THREE_TURNS = Format("{question}\n", stop=("a", "e"), environment=Environment("environment_parts:Talk", max_turns=3))


@shared_cluster
@pytest.mark.parametrize(
    ("format", "tokens"),
    [pytest.param(QUESTION_ONLY, 5, id="one turn"), pytest.param(THREE_TURNS, 60, marks=pytest.mark.nightly, id="episodes")],
)
def test_without_lag_and_replay_the_result_is_that_of_the_synchronous_loop(
    folder: Path, fresh_model: Any, tokenizer: Any, tmp_path: Path, format: Format, tokens: int
) -> None:
    """With two epochs of two updates on each rollout batch."""
    sizes = {"epochs_per_rollout_batch": 2, "train_batch_size": 8, "sampling_max_tokens": tokens}
    config, model = CONFIG.model_copy(update=sizes), copy.deepcopy(fresh_model)
    learner, engine = Learner(model, config, tokenizer.pad_token_id), TransformersEngine(model, tokenizer)
    given = {"data": problems(10), "format": format, "learner": learner, "engine": engine}
    train(train_grpo, config, model, tokenizer, tmp_path / "synchronous", **given)
    _, found = with_actors(asynchronous(config, max_policy_lag=0), folder, tmp_path / "asynchronous", format=format)
    assert equal(found, learner.state())
    assert not equal(found["model"], fresh_model.state_dict())
    both = [rows(tmp_path / name) for name in ("synchronous", "asynchronous")]
    assert len(both[0]) == 8 * 2 * 2
    for one, other in zip(*both, strict=True):
        assert one.items() <= other.items()
        assert other["lag_max"] == 0


@shared_cluster
@pytest.mark.slow
def test_the_result_depends_neither_on_the_clock_nor_on_the_transport(folder: Path, tmp_path: Path) -> None:
    """A schedule decides what is trained on. By direct transport each version is loaded when the learner has gone on."""
    config = asynchronous(max_policy_lag=2, replay_capacity=2)
    _, expected = with_actors(config, folder, tmp_path / "straight")
    log, found = with_actors(config, folder, tmp_path / "napping", naps=(0.1, 0.03), transport="gloo")
    assert equal(found, expected) and rows(tmp_path / "napping") == rows(tmp_path / "straight")
    lags = [row["lag_max"] for row in rows(tmp_path / "napping")]
    assert lags[:3] == [0, 1, 2] and max(lags) == 3  # two versions behind, and a batch of the buffer before that
    assert all(step["generator_synchronization_s"] > 0 for step in log.times[3:])


@shared_cluster
@pytest.mark.slow
def test_a_run_whose_actors_are_killed_ends_as_one_that_was_left_alone(
    mini_study: Study, fresh_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another, so that it takes four attempts, each from the state of the one before."""
    make_project(monkeypatch, tmp_path, fresh_model, tokenizer)
    monkeypatch.setattr("grpo.training.train.score_of", lambda *_: by(contains_a_t))
    experiments = {"grpo_learning_rate": entry("grpo_learning_rate", arms={"lag_1": {"asynchronous": {"max_policy_lag": 1}}})}
    values = {"threads": 1, "seeds": [0], "save_state_every": 2, "grpo": CONFIG, "divergence": None}
    evaluation = {"every": 3, "problems": 6, "max_tokens": 5}
    study = changed(mini_study, **values, evaluation=evaluation, experiments=experiments)
    run = effective_run(study, "grpo_learning_rate", "lag_1", 0, [])
    made: list[str] = []
    monkeypatch.setattr("grpo.training.run.MlflowRun", lambda study, name, *_: made.append(name) or parts.NoMlflow())
    victims: dict[int, str] = {}
    synchronize = RolloutPipeline.synchronize

    def killing(self: RolloutPipeline, model: Any, policy_version: int) -> None:
        if victim := victims.pop(policy_version, None):
            # The learner writes its state while it trains the next step.
            wait_for(lambda: any(paths.RUN_STATE.glob(f"*/*/*/*/step-{policy_version - 1}")))
            parts.kill({"generator": self.generator, "scorer": self.scorer, "learner": self.learner.actor}[victim])
        synchronize(self, model, policy_version)

    train_run(study, run)
    undisturbed = files_below(paths.RUNS, paths.CHECKPOINTS)
    assert len({row["train/reward"] for row in rows(paths.RUNS / run.name)}) > 1
    for root in (paths.RUNS, paths.CHECKPOINTS):
        shutil.rmtree(root)
    monkeypatch.setattr(RolloutPipeline, "synchronize", killing)
    victims |= {3: "learner", 5: "scorer", 7: "generator"}
    train_run(study, run)
    assert files_below(paths.RUNS, paths.CHECKPOINTS) == undisturbed
    timing = json.loads(paths.run_timing(run.name).read_text())
    assert timing["restarts"] == {"actors": 3} and timing["resumed_after"] == [2, 4, 6]
    assert len(made) == 2  # runs in MLflow, one for each call


@pytest.mark.parametrize(
    ("resumed_after", "ends"),
    [
        ([0, 0, 0, 0], False),
        ([0, 0, 0, 2, 2, 2, 2], False),
        ([4, 4, 2, 4], False),  # the newest state was damaged
        ([0, 0, 0, 2, 2, 2, 4], True),
        ([0, 2, 4, 6, 8, 10], True),
        ([], True),
    ],
)
def test_four_losses_in_a_row_end_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resumed_after: list[int], ends: bool
) -> None:
    outputs, attempts = SimpleNamespace(timing={}, checkpoints=tmp_path / "checkpoints"), iter(resumed_after)
    outputs.checkpoints.mkdir()

    def losing(study: Any, run: Any, data: Any, outputs: Any) -> None:
        assert not list(outputs.checkpoints.iterdir())
        for step in attempts:
            (outputs.checkpoints / "step-1").mkdir()
            outputs.timing["resumed_after"] = [step] if step else []
            raise ActorLost("the scorer has died or hangs (why)")

    monkeypatch.setattr("grpo.training.train.train", losing)
    told = r"lag_1: the scorer has died or hangs \(why\), 4 times in a row.*session_latest/logs.*run the same command again"
    with nullcontext() if ends else pytest.raises(UserError, match=told):
        run_module._train(None, SimpleNamespace(name="lag_1"), None, outputs)  # type: ignore[arg-type]
        assert outputs.timing["restarts"] == {"actors": len(resumed_after)}
    assert next(attempts, None) is None


@shared_cluster
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("no start", ActorLost, r"^the generator.* has died or hangs \(GetTimeoutError"),
        ("stuck", ActorLost, r"^the generator.* has died or hangs \(TimeoutError"),
        ("its own", UserError, "nowhere"),
    ],
)
def test_a_fault_of_an_actor_is_noticed(
    fault: str, error: type[Exception], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of the actor's own arrive as they are."""
    assert start_module.START_S == 900.0  # a start may take as long as vLLM's
    if fault == "no start":
        monkeypatch.setattr(start_module, "START_S", 0.1)
    if fault == "stuck":
        monkeypatch.setattr(loop_module, "STUCK_AFTER_S", 1.0)
    generators = {
        "no start": partial(time.sleep, 3600),
        "stuck": partial(make_generator, folder, 3600.0),
        "its own": partial(make_generator, tmp_path / "nowhere"),
    }
    with pytest.raises(error, match=message):
        parts.run(asynchronous(), generators[fault], partial(make_learner, folder, asynchronous()), tmp_path / "run")


@pytest.mark.nightly
@shared_cluster
def test_generator_and_learner_work_at_the_same_time(folder: Path, tmp_path: Path) -> None:
    """Most of the faster one's seconds lie within the slower one's; how long a step takes depends on the machine's load."""
    config = asynchronous(CONFIG.model_copy(update={"n_grpo_steps": 8}), max_policy_lag=1)
    for generation, training in ((1.2, 0.4), (0.4, 1.2)):
        target = tmp_path / f"slower-{generation:.0f}"
        log, _ = with_actors(config, folder, target, (generation, training))
        usual = {key: median(step[key] for step in log.times[2:]) for key in log.times[2]}
        assert generation <= usual["rollout_s"]
        assert (usual["generator_waiting_s"] > usual["waiting_s"]) == (generation < training)  # the faster one waits
        spans = [
            [tuple(map(float, line.split())) for line in notes.read_text().splitlines()]
            for notes in (target / "sampled", target / "trained")
        ]
        together = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans[0] for b in spans[1])
        # The learner takes its first step before the generator's second, and the generator none after its last.
        assert len(spans[0]) == len(spans[1]) == 8 and together > 0.5 * 7 * min(generation, training), spans


@shared_cluster
@pytest.mark.slow
def test_too_small_a_machine_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Any:
        raise AssertionError

    one, setup = {"num_cpus": 1.0, "num_gpus": 1.0}, setup_of(asynchronous())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="2 GPUs"), start_actors(setup, never, never, one, one):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("below", "expected"), [("short", None), ("of-the-batch-system/job-1234567-of-some-user", "/tmp")])
def test_rays_sockets_are_elsewhere_where_the_temporary_folder_has_a_long_name(below: str, expected: str | None) -> None:
    """As batch systems have it. The kernel refuses names of more than 107 characters; Ray's are 67 longer than the folder's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        temporary = Path(root, below)
        temporary.mkdir(parents=True)
        program = "import grpo.training.asynchronous, os; print(os.environ.get('RAY_TMPDIR'))"
        environment = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"} | {"TMPDIR": str(temporary)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected)


PROGRAM = """
import sys
from functools import partial
from pathlib import Path
import asynchronous_parts as parts
folder, target = map(Path, sys.argv[1:3])
config = parts.asynchronous(parts.CONFIG.model_copy(update={"n_grpo_steps": int(sys.argv[3])}), max_policy_lag=1)
parts.run(config, partial(parts.make_generator, folder), partial(parts.make_learner, folder, config), target)
"""


@pytest.mark.nightly
def test_a_cluster_that_asks_for_a_token_is_used(folder: Path, tmp_path: Path) -> None:
    """Clusters require one since Ray 2.60; a second run finds the cluster too."""
    with parts.ray_cluster() as address:
        for name in ("first", "second"):
            program = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / name), "8"]
            environment = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"} | {"RAY_ADDRESS": address}
            done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=120)
            assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "first") == rows(tmp_path / "second") and len(rows(tmp_path / "first")) == 8


def marked(mark: str) -> set[int]:
    """Processes with the inherited environment variable."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes() and "Z" not in (process / "stat").read_text().split()[2]:
                found.add(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
@pytest.mark.nightly
def test_no_process_is_left_behind(folder: Path, tmp_path: Path, how: signal.Signals) -> None:
    mark = f"GRPO_TEST_MARK={tmp_path.name}-{how.name}"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path), "10000"], env=os.environ | dict([mark.split("=")]),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    history = tmp_path / "history.csv"
    try:
        wait_for(lambda: process.poll() is not None or (history.exists() and len(history.read_text().splitlines()) > 3))
        assert process.poll() is None, process.communicate()
        assert len(marked(mark)) > 4  # Ray's own processes and three actors
        if how is signal.SIGINT:
            os.killpg(process.pid, how)  # a terminal tells all of the group
        else:
            process.send_signal(how)
        process.wait(timeout=120)
        assert process.returncode != 0
        # Ray's agents ask a dead cluster for a minute before they give up, if the run was killed and could not end them.
        wait_for(lambda: not marked(mark), 180.0)
    finally:
        for left in marked(mark):
            os.kill(left, signal.SIGKILL)


def actor_of(model: Any) -> LearnerActor:
    actor = LearnerActor(lambda: (SimpleNamespace(model=model), len), asynchronous())  # type: ignore[arg-type, return-value]
    actor.start()
    return actor


@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4, targets=["o_proj"])])
@pytest.mark.parametrize("kind", ["qwen2", "qwen2, untied", "llama"])
def test_a_checkpoints_weights_are_given_as_its_file_has_them(kind: str, lora: Lora | None, tmp_path: Path) -> None:
    """Names, shapes and bits of what ``save_pretrained`` writes, which vLLM's loader expects; also a tied head, which the file
    leaves out.
    """
    tied = "untied" not in kind
    model = tiny_model(kind.split(",")[0], tie_word_embeddings=tied)
    if lora is not None:
        add_adapters(model, lora, seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.1 * ("lora_B" in name))
    with without_adapters(model, merge=True):
        model.save_pretrained(tmp_path)
    in_file = load_file(tmp_path / "model.safetensors")
    given = actor_of(model).weights()
    assert given.keys() - in_file.keys() <= {"lm_head.weight"} and given.keys() >= in_file.keys()
    assert "lm_head.weight" in given and ("lm_head.weight" in in_file) != tied
    assert all(torch.equal(given[name], in_file[name]) for name in in_file)


def test_given_weights_are_copies_with_merged_adapters_and_the_adapters_stay(model: Any) -> None:
    """Ray Direct Transport refers to the tensors that it is given, and training changes the model's."""
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_adapters(model, Lora(rank=2, alpha=4, targets=["q_proj"]), seed=0)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.5)
    expected = plain["model.layers.0.self_attn.q_proj.weight"] + 2.0 * 0.5 * layer.lora_A["default"].weight.sum(0)
    given = actor_of(model).weights(device=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert given.keys() == plain.keys() and all(tensor.is_contiguous() for tensor in given.values())
    torch.testing.assert_close(given["model.layers.0.self_attn.q_proj.weight"], expected)
    assert torch.equal(given["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"])
    assert model.get_submodule("model.layers.0.self_attn.q_proj") is layer


@pytest.mark.parametrize(
    ("engine", "learner", "cupy", "gpus", "transport"),
    [
        ("cuda:0", "cuda:1", True, (1.0, 1.0), "nccl"),
        ("cuda:0", "cuda:1", False, (1.0, 1.0), None),
        ("cuda:0", "cuda", False, (0.5, 0.5), "cuda_ipc"),  # the same GPU, which they share
        ("cpu", "cuda:0", True, (0.0, 1.0), None),
        ("cpu", "cpu", True, (0.0, 0.0), None),
    ],
)
def test_devices_say_how_many_gpus_are_needed_and_how_weights_go(
    engine: str,
    learner: str,
    cupy: bool,
    gpus: tuple[float, float],
    transport: str | None,
    mini_study: Study,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(start_module, "find_spec", lambda name: cupy or None)
    monkeypatch.setattr(
        start_module, "start_actors", lambda *given, transport: nullcontext(calls.append((given[-2:], transport)))
    )
    on = changed(mini_study, engine={"name": "vllm", "device": engine}, learner={"device": learner})
    run: Any = SimpleNamespace(model=Path())
    with pytest.raises(TypeError), start_module.start_asynchronous(on, run, setup_of(CONFIG)):
        pass  # there are no actors to work with
    ((resources, found),) = calls
    assert tuple(each["num_gpus"] for each in resources) == gpus and found == transport


@shared_cluster
@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["learner", "generator"])
def test_an_actor_that_dies_is_noticed(victim: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by direct transport."""
    config, synchronize = asynchronous(max_policy_lag=1), RolloutPipeline.synchronize

    def killing(self: RolloutPipeline, model: Any, policy_version: int) -> None:
        synchronize(self, model, policy_version)
        if policy_version == 4:
            parts.kill(self.generator if victim == "generator" else self.learner.actor)

    monkeypatch.setattr(RolloutPipeline, "synchronize", killing)
    with pytest.raises(ActorLost):
        with_actors(config, folder, tmp_path / "run", transport="gloo")


@pytest.mark.vllm
def test_vllm_has_the_weights_of_each_version(tokenizer: Any, tmp_path: Path) -> None:
    """Checksums are compared after each. By Ray's object store: vLLM and Ray's gloo do not share a process."""
    config = asynchronous(max_policy_lag=2)
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save_checkpoint(tmp_path / "model", tiny_model("qwen2", **sizes, **FOR_VLLM), tokenizer)
    generator, learner = (partial(make, tmp_path / "model") for make in (parts.make_vllm_generator, parts.make_learner))
    log, _ = parts.run(config, generator, partial(learner, config), tmp_path / "run")
    assert all(step["generator_synchronization_s"] > 0 for step in log.times[3:])
    assert [row["lag_max"] for row in read_csv(tmp_path / "run/history.csv")][:4] == [0, 1, 2, 2]
