"""Runs that are killed anywhere, told to stop, or meet a damaged state: they go on, and end as if nothing had happened."""

import csv
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mlflow.tracking import MlflowClient
from pipeline_parts import ROOT, environment, sh
from ruamel.yaml import YAML
from safetensors.torch import load_file
from study_parts import activate, shard_learner
from waiting import started

OFF_POLICY = {
    "epochs_per_rollout_batch": 2,
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "loss_type": "grpo_clip",
    "keep_steps": [5, 9],
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "dynamic_sampling_rounds": 1,
}

TRAIN = (sys.executable, "-m", "grpo", "train")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small study, its data and its models, and no runs."""
    folder = tmp_path_factory.mktemp("project")
    yaml = YAML()
    study = yaml.load(activate("smoke", folder))
    study["save_state_every"] = 2
    study["grpo"] |= {"n_grpo_steps": 12, "learning_rate": 1e-3}
    study["sft"] |= {"n_sft_steps": 24, "evaluate_every": 6, "lr_scheduler_type": "linear", "warmup_steps": 2}
    study["expert_iteration"] |= {"n_ei_steps": 4}
    study["evaluation"] |= {"every": 3}
    study["experiments"]["grpo_learning_rate"]["arms"] = {"off_policy": OFF_POLICY}
    study["experiments"]["sft_experiment"]["arms"]["all"] = {"keep_steps": [4, 8]}
    study["models"]["main"]["one_per_seed"] = False
    yaml.dump(study, folder / "params.yaml")
    for command in ("dataset", "model", "sft_dataset"):
        sh(folder, "grpo", command, "main")
    return folder


def train(folder: Path, run: tuple[str, str], code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """`grpo train` in ``folder``, which ends with this exit code."""
    done = subprocess.run([*TRAIN, *run], cwd=folder, env=environment(), capture_output=True, text=True, **options)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def attempt() -> Iterator[Callable[..., dict[str, Any]]]:
    """See :func:`kill_worker.attempt`, in a process that has imported everything."""
    program = [sys.executable, ROOT / "tests/parts/kill_worker.py"]
    with started(program, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "ready\n"

        def ask(folder: Path, run: tuple[str, str], signum: int = signal.SIGKILL, **how: Any) -> dict[str, Any]:
            asked = {"folder": str(folder), "experiment": run[0], "arm_name": run[1], "signum": signum} | how
            print(json.dumps(asked), file=process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            assert answer["code"] in {0, 75, -signum, -signal.SIGKILL}, (folder / "log.txt").read_text()
            return answer

        yield ask


def results(folder: Path) -> dict[str, str]:
    """Path -> SHA-256 of every file that a run leaves, but for wall-clock figures."""
    files = [p for root in ("data/runs", "data/checkpoints") for p in sorted((folder / root).rglob("*")) if p.is_file()]
    assert len(files) >= 8
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def saved_states(folder: Path) -> set[Path]:
    return set(folder.glob("data/state/runs/*/*/*/*/step-*"))


def nothing_is_left(folder: Path) -> bool:
    return not [*saved_states(folder), *folder.rglob(".*.draft*")]


GRPO = ("grpo_learning_rate", "off_policy")
SFT = ("sft_experiment", "all")
EXPERT_ITERATION = ("expert_iteration_experiment", "questions_16-rollouts_8-epochs_2")
ASYNCHRONOUS = ("grpo_async_offpolicy", "lag_1")


@pytest.fixture(scope="module")
def undisturbed(project: Path, attempt: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of a run that nobody disturbs."""

    @cache
    def get(run: tuple[str, str]) -> dict[str, str]:
        folder = shutil.copytree(project, tmp_path_factory.mktemp("undisturbed") / "project")
        assert attempt(folder, run)["code"] == 0
        history = list(csv.DictReader((folder / f"data/runs/{run[0]}/{run[1]}/0/history.csv").open()))
        moved = sum(float(row["gradient_norm"]) > 0 for row in history)
        assert moved > len(history) / 2  # else little is tested
        return results(folder)

    return get


# By run the acts in the middle of which it is killed, one after another, and which time of each.
KILLED_IN = {
    # "Whatever is whole gets its name": the best checkpoint's metadata, the results, both result folders ("0", the seed), the
    # times. All runs end by the same code, so one goes through all of it.
    GRPO: {"rollout": 50, "step-4": 1, "backward": 7, "update": 9, "evaluation": 1, "state": 1, "metrics": 9}
    | dict.fromkeys(["metadata.json", "outcomes.jsonl", "metrics.json", "0", "timing.json"], 1),
    SFT: {"update": 5, "step-8": 1, "checkpoint": 1, "metrics": 3, "0": 1},
    EXPERT_ITERATION: {"rollout": 50, "step-1": 1, "update": 2, "evaluation": 1, "0": 1},
    ASYNCHRONOUS: {"state": 1, "metrics": 12},  # with all its actors
}


@pytest.mark.slow
@pytest.mark.parametrize("run", KILLED_IN, ids=lambda run: run[0])
def test_killed_in_the_middle_of_anything(run, project, attempt, undisturbed, tmp_path):
    folder = shutil.copytree(project, tmp_path / "project")
    for act, nth in KILLED_IN[run].items():
        answer = attempt(folder, run, kill_in=act, nth=nth)
        assert answer["code"] == -signal.SIGKILL, f"{act} was never reached"
    assert attempt(folder, run)["code"] == 0
    assert results(folder) == undisturbed(run)
    assert nothing_is_left(folder)
    resumed = (folder / "log.txt").read_text().count("resumed after step")
    assert resumed >= (5 if run == GRPO else 1)


@pytest.mark.nightly
def test_killed_while_the_second_seed_of_a_stage_trains(project, tmp_path):
    """By DVC itself, which removes the stage's outputs when it starts it again: the first seed's results come back."""
    expected, folder = (shutil.copytree(project, tmp_path / name) for name in ("undisturbed", "killed"))
    for each in (expected, folder):
        params = each / "params.yaml"
        params.write_text(params.read_text().replace("seeds: [0]", "seeds: [0, 1]"))
    train(expected, GRPO)
    for name in ("dvc.yaml", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    for command in ("git init -q", "dvc init -q", "grpo study check", "grpo training_inputs"):
        sh(folder, *command.split())
    repro = ["dvc", "repro", "--single-item", "train@grpo_learning_rate-off_policy"]
    with started(repro, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while not [*folder.glob("data/state/runs/grpo_learning_rate/off_policy/1/*/step-4")]:
            assert process.poll() is None
            time.sleep(0.02)
        stage = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        psutil.wait_procs(stage)  # a killed process holds the run's lock until it is gone
    first = json.loads((folder / "data/timing/grpo_learning_rate/off_policy/0/timing.json").read_text())
    again = sh(folder, *repro)
    assert re.findall(r"resumed after step (\d+)", again.stdout) in (["4"], ["6"])
    assert json.loads((folder / "data/timing/grpo_learning_rate/off_policy/0/timing.json").read_text()) == first
    assert results(folder) == results(expected)


@pytest.mark.nightly
def test_told_to_stop_it_finishes_the_step_and_is_to_be_resumed(project, attempt, undisturbed, tmp_path):
    run, folder = GRPO, shutil.copytree(project, tmp_path / "project")
    assert attempt(folder, run, kill_in="step-2", signum=signal.SIGTERM)["code"] == 75
    (saved,) = folder.glob("data/state/runs/*/*/*/*")
    last = max(int(state.name.removeprefix("step-")) for state in saved.glob("step-*"))
    assert last in {2, 3, 4}  # the signal comes when a state is whole, which is written while the next steps are taken
    assert not (folder / "data/runs" / run[0] / run[1] / "0").exists()
    assert attempt(folder, run)["code"] == 0
    assert results(folder) == undisturbed(run)
    timing = json.loads((folder / f"data/timing/{run[0]}/{run[1]}/0/timing.json").read_text())
    assert timing["resumed_after"] == [last]
    # In MLflow it is one run, with each step once.
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    tracked = client.get_run(timing["mlflow_run_id"])
    rows = list(csv.DictReader((folder / f"data/runs/{run[0]}/{run[1]}/0/history.csv").open()))
    losses = sorted(client.get_metric_history(tracked.info.run_id, "loss"), key=lambda metric: metric.step)
    assert [metric.value for metric in losses] == [float(row["loss"]) for row in rows]
    assert tracked.data.tags["resumed_after"] == str(last)
    (one,) = client.search_runs([tracked.info.experiment_id], f"tags.experiment = '{run[0]}'")
    assert (one.info.run_id, one.info.status) == (timing["mlflow_run_id"], "FINISHED")


@pytest.mark.nightly
def test_a_state_of_another_configuration_is_left_alone(project, attempt, undisturbed, tmp_path):
    """When the run dies its second state is whole, and the first is not yet removed."""
    folder = shutil.copytree(project, tmp_path / "project")
    assert attempt(folder, GRPO, kill_in="step-4")["code"] == -signal.SIGKILL
    states = saved_states(folder)
    assert {state.name for state in states} == {"step-2", "step-4"}
    params = folder / "params.yaml"
    before = params.read_text()
    params.write_text(before.replace("n_grpo_steps: 12", "n_grpo_steps: 11"))
    assert attempt(folder, GRPO, kill_in="step-4")["code"] == -signal.SIGKILL
    assert "resumed" not in (folder / "log.txt").read_text()
    assert states < saved_states(folder)
    params.write_text(before)
    assert attempt(folder, GRPO)["code"] == 0
    assert "resumed after step 4 of 12" in (folder / "log.txt").read_text()
    assert results(folder) == undisturbed(GRPO)
    assert nothing_is_left(folder)


@contextmanager
def training(folder: Path, run: tuple[str, str]) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """The command, which leads a group of processes, and the processes by rank, when they have saved a new state."""
    before = saved_states(folder)
    with started([*TRAIN, *run], cwd=folder, env=environment(), start_new_session=True, stderr=subprocess.PIPE) as process:
        while saved_states(folder) <= before:
            assert process.poll() is None
            time.sleep(0.02)
        (torchrun,) = psutil.Process(process.pid).children()
        yield process, sorted(torchrun.children(), key=lambda each: int(each.environ()["RANK"]))


@pytest.mark.nightly
def test_several_processes_of_one_run_stop_and_go_on_together(project, tmp_path):
    """A run sharded over two processes. SIGINT reaches both, SIGTERM the first only; at last one process is killed. The end has
    the bytes of an undisturbed run, and the weights of one process, but for rounding.
    """
    single = shutil.copytree(project, tmp_path / "single")
    yaml = YAML()
    study = yaml.load(single / "params.yaml")
    study["folder"] = "own"  # of a reward that is earned now and then
    study["grpo"]["reward"] = "odd:odd"
    study["evaluation"]["every"] = 10
    study["save_state_every"] = 1  # so that it can be disturbed three times, before rounding changes what is sampled
    (single / "own").mkdir()
    (single / "own/odd.py").write_text("def odd(completion_ids, **_):\n    return [len(ids) % 2 for ids in completion_ids]\n")
    yaml.dump(study, single / "params.yaml")
    folder = shutil.copytree(single, tmp_path / "stopped")
    shard_learner(study)
    yaml.dump(study, folder / "params.yaml")
    undisturbed = shutil.copytree(folder, tmp_path / "undisturbed")
    for each in (single, undisturbed):
        train(each, GRPO)
    alone = load_file(single / f"data/checkpoints/{GRPO[0]}/{GRPO[1]}/0/last/model.safetensors")
    for kill, number in ((os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)):
        with training(folder, GRPO) as (process, _):
            kill(process.pid, number)
            assert process.stderr is not None
            said = process.stderr.read()
            assert process.wait() == 75, said
        assert said.count("the state is saved") == 1 and "asked to stop: finishing the step" in said
    with training(folder, GRPO) as (process, ranks):
        ranks[1].kill()
        assert process.wait() == 1 and not any(each.is_running() for each in ranks)  # the other ends too
    newest = max(saved_states(folder), key=lambda path: int(path.name.removeprefix("step-")))
    state = torch.load(newest / "state.pt", weights_only=True)["parts"]["learner"]  # runs no code, and holds all of it
    assert {name: each.shape for name, each in state["model"].items() if name in alone} == {
        n: w.shape for n, w in alone.items()
    }
    assert train(folder, GRPO).stdout.count("resumed after step") == 1
    assert results(folder) == results(undisturbed)
    found = load_file(folder / f"data/checkpoints/{GRPO[0]}/{GRPO[1]}/0/last/model.safetensors")
    start = load_file(folder / "data/model/main/model.safetensors")
    off, moved = (sum((a[n] - b[n]).square().sum() for n in start) for a, b in ((found, alone), (alone, start)))
    assert found.keys() == alone.keys() and moved > 0 and off < 1e-6 * moved
