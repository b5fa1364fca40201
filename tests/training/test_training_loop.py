"""The GRPO loop on a tiny model and a toy reward, with real MLflow."""

import copy
import json
import math
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import training_parts
from learner_parts import log_softmax_alone
from study_parts import changed, entry, study_named
from training_parts import (
    NoMlflow,
    by,
    contains_a_t,
    context,
    files_below,
    make_project,
    monitored,
    problems,
    read_csv,
    same_weights,
    setup_of,
)
from training_parts import train as train_by

from grpo.common.errors import UserError, explain_out_of_memory
from grpo.common.metrics import UNITS
from grpo.common.records import Completion, Rollout
from grpo.common.yaml_file import parse_yaml
from grpo.handouts import compute_group_normalized_rewards
from grpo.learner.learner import Learner
from grpo.models import require_checkpoint
from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.rollout.engine import SamplingParams
from grpo.rollout.make_engine import make_engine
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study import paths
from grpo.study.config import GrpoConfig, LocalModel, Lora
from grpo.study.effective import EffectiveRun, effective_run
from grpo.study.schema import Study
from grpo.tasks.task import ScoredBatch
from grpo.tracking.run_log import RunLog
from grpo.training import grpo as loop
from grpo.training import run as run_module
from grpo.training import train as train_module
from grpo.training.data import items_of_step, other_problems
from grpo.training.grpo import train_grpo
from grpo.training.monitor import Monitor, require_agreement
from grpo.training.step import has_signal, replace_groups_without_signal, rewards_and_advantages, sample


@pytest.mark.parametrize(("size", "n"), [(12, 4), (12, 5), (7, 3), (5, 8)])
def test_every_question_is_asked_once_an_epoch(size: int, n: int) -> None:
    epochs = 3 * n  # a whole number of steps
    asked = [q.id for step in range(1, epochs * size // n + 1) for q in items_of_step(problems(size), 0, step, n)]
    everything = {p.id for p in problems(size)}
    orders = [asked[i : i + size] for i in range(0, len(asked), size)]
    assert len(orders) == epochs
    assert all(set(order) == everything for order in orders)
    assert len({tuple(order) for order in orders}) > epochs / 2  # a new order each time
    assert orders[0] != [p.id for p in problems(size)]
    # A step's depend on nothing that was asked before, nor on the process and the machine.
    assert [q.id for q in items_of_step(problems(9), 5, 4, 4)] == ["p/1", "p/8", "p/5", "p/4"]


SCORE = by(contains_a_t)
CONFIG = training_parts.CONFIG.model_copy(update={"n_grpo_steps": 20, "gradient_accumulation_steps": 2})


def train(model: Any, tokenizer: Any, folder: Path, config: GrpoConfig = CONFIG, **given: Any) -> tuple[Any, RunLog]:
    return train_by(train_grpo, config, model, tokenizer, folder, **given)


HISTORY = [
    *("step", "update", "train/reward", "train/format_reward", "train/answer_reward", "train/zero_signal_fraction"),
    *("train/response_length", "train/response_length_max", "train/cut_off", "train/grader_timeouts", "loss"),
    *("gradient_norm", "token_entropy", "clip_fraction", "ratio_mean", "mismatch_mean", "mismatch_above", "mismatch_kl"),
    *("ratio_min", "ratio_max", "mismatch_max", "skipped_update", "learning_rate"),
]


def test_training_raises_the_reward(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    trained, _ = train(model, tokenizer, tmp_path / "run")
    rows = read_csv(tmp_path / "run/history.csv")
    assert list(rows[0])[: len(HISTORY)] == HISTORY
    assert rows[0].keys() - {"step", "update"} <= UNITS.keys()
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert [row["step"] for row in rows] == [row["update"] for row in rows] == list(range(1, 21))
    first = sum(row["train/reward"] for row in rows[:2]) / 2
    last = sum(row["train/reward"] for row in rows[-2:]) / 2
    assert first < 0.6
    assert last > 0.85
    assert all(row["train/format_reward"] == 1.0 for row in rows)
    assert all(row["ratio_min"] == row["ratio_max"] == 1.0 and row["clip_fraction"] == 0.0 for row in rows)  # on-policy
    assert all(row["train/response_length_max"] <= 6 for row in rows)
    assert not same_weights(model, trained)


def test_rollouts_carry_the_advantages_that_the_handouts_function_gives() -> None:
    """Equal to the last bit of float32, the learner's precision."""
    texts = ["", "T" * 7, "T", "TT", "T" * 6, "TTT", "T" * 5, "T" * 4]

    def share(text: str, _: str) -> dict[str, float]:
        return dict.fromkeys(("reward", "format_reward", "answer_reward"), len(text) / 7)

    rollouts = [Rollout(problems(2)[i // 4], (1,), Completion((i,), text, (-1.0,), "stop")) for i, text in enumerate(texts)]
    config = CONFIG.model_copy(update={"rollout_batch_size": 8, "train_batch_size": 8, "group_size": 4})
    _, metrics = rewards_and_advantages(setup_of(config, score=by(share)), rollouts)
    truths = [rollout.problem.ground_truth for rollout in rollouts]
    expected, _, _ = compute_group_normalized_rewards(share, texts, truths, 4, config.advantage_eps, True)
    assert torch.equal(torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float32), expected)
    assert [rollout.rewards["reward"] for rollout in rollouts] == [len(text) / 7 for text in texts]
    assert metrics["train/reward"] == pytest.approx(0.5)


def test_a_long_response_loses_training_reward_and_nothing_else() -> None:
    """With a limit of 6 tokens and a buffer of 2, four tokens are free, five cost a half, and six all of it."""
    completions = [Completion((7,) * n, "T", (-1.0,) * n, "length" if n == 6 else "stop") for n in (4, 5, 6, 1)]
    given = {"reward": 0.75, "format_reward": 1.0, "answer_reward": 0.5}
    sizes = {"rollout_batch_size": 4, "train_batch_size": 4, "group_size": 2, "use_std_normalization": False}
    setup = setup_of(CONFIG.model_copy(update=sizes | {"overlong_buffer": 2}), score=by(lambda text, truth: given))
    rollouts, metrics = rewards_and_advantages(setup, [Rollout(problems(1)[0], (1,), completion) for completion in completions])
    assert [r.rewards for r in rollouts] == [given | {"reward": reward} for reward in (0.75, 0.25, -0.25, 0.75)]
    assert [r.advantage for r in rollouts] == [0.25, -0.25, -0.5, 0.5]
    lengths = [metrics[f"train/{name}"] for name in ("response_length", "response_length_max", "cut_off")]
    assert lengths == [4, 6, 0.25] and (metrics["train/reward"], metrics["train/answer_reward"]) == (0.375, 0.5)


@pytest.fixture(scope="module")
def tiny_study(mini_study: Study) -> Study:
    """Five steps of two epochs, evaluated every second step on six problems."""
    return changed(
        mini_study,
        seeds=[0],
        threads=1,
        grpo=CONFIG.model_copy(update={"n_grpo_steps": 5, "epochs_per_rollout_batch": 2, "loss_type": "grpo_clip"}),
        models=mini_study.models | {"main": LocalModel(source="local", path="unused")},
        evaluation={"every": 2, "problems": 6, "last_problems": 6, "max_tokens": 6},
        experiments={"grpo_learning_rate": entry("grpo_learning_rate", arms={"slow": {"learning_rate": 1e-3}})},
    )


def run_of(study: Study) -> EffectiveRun:
    return effective_run(study, "grpo_learning_rate", "slow", 0, [])


@pytest.fixture
def project(model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(monkeypatch, tmp_path, model, tokenizer)
    return tmp_path


def of_other_weights(model: Any) -> Any:
    """A copy of the model as if matrices had not reached it: those of a layer are its start's, redrawn."""
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "mlp" in name:
                parameter.copy_(torch.randn_like(parameter) * parameter.std())
    return other


ALLOWED: list[dict[str, Any]] = [
    {},
    {"evaluation": {"temperature": 0.3}},
    {"evaluation": {"temperature": 0.0, "best_of_n": {"problems": 2, "prompts": []}}},
    {"evaluation": {"top_p": 0.5}},
    {"learner": {"dtype": "bfloat16"}},
    {"engine": {"name": "vllm", "dtype": "bfloat16"}},
]


@pytest.mark.parametrize("settings", ALLOWED)
def test_an_engine_of_other_weights_is_seen(settings: dict[str, Any], tiny_study: Study, model: Any, tokenizer: Any) -> None:
    """Responses are sampled by these settings; half precision samples from a rounded copy."""
    study = changed(tiny_study, **settings)
    learner = Learner(model, study.grpo, tokenizer.pad_token_id)
    halves = "bfloat16" in (study.engine.dtype, study.learner.dtype)
    for sampling, differs in ((model, False), (of_other_weights(model), True)):
        engine = TransformersEngine(copy.deepcopy(sampling).bfloat16() if halves else sampling, tokenizer)
        ctx = context(study.grpo, None, None, data=[], engine=engine, learner=learner, tokenizer=tokenizer, reward=contains_a_t)
        rollouts = monitored(ctx, study, problems(64))[1].evaluate(0).rollouts
        with pytest.raises(UserError, match="differ by") if differs else nullcontext():
            require_agreement(study, learner, rollouts)
    empty = Completion((), "", (), "stop", 0)
    require_agreement(study, learner, [Rollout(problem, (1, 2), empty) for problem in problems(64)])  # nothing to compare
    broken = Completion((5,), "", (math.nan,), "stop", 0)
    with pytest.raises(UserError, match="differ by nan"):
        require_agreement(study, learner, [Rollout(problem, (1, 2), broken) for problem in problems(64)])


def test_a_run_on_other_weights_ends_at_once(tiny_study: Study, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(study: Study, folder: Path, model: Any, tokenizer: Any, *_: Any) -> Any:
        return TransformersEngine(of_other_weights(model), tokenizer)

    monkeypatch.setattr("grpo.training.train.make_engine", wrong)
    monkeypatch.setattr("grpo.training.train.score_of", lambda *_: SCORE)
    monkeypatch.setattr(Learner, "update", lambda *_: pytest.fail("it was trained"))
    run = run_of(tiny_study)
    with pytest.raises(UserError, match=r"engine and learner differ by .* nats a token"):
        run_module.train_run(tiny_study, run)
    assert not (paths.RUNS / run.name).exists()


TAKEN_UP = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "dynamic_sampling_rounds": 2, "lora": Lora(rank=2)}


def seed_all_generators() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def draw_from_all_generators() -> float:
    return random.random() + float(np.random.random()) + torch.rand(1).item()


def with_a_base_of_its_own(study: Study) -> EffectiveRun:
    """A second seed's run, from the only model that there is."""
    pretrained = study_named("mini").models["main"].model_copy(update={"one_per_seed": True})
    run = effective_run(changed(study, seeds=[0, 1], models={"main": pretrained}), "grpo_learning_rate", "slow", 1, [])
    weights = list(paths.model("main").iterdir())
    run.model.mkdir()
    for file in weights:
        file.rename(run.model / file.name)
    return run


def test_a_run_that_is_taken_up_ends_as_one_that_was_never_interrupted(
    tiny_study: Study, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rollouts, too, are known to be of the policy at hand, so that their log-probabilities are the learner's; and learning
    rates, dynamic sampling and the random numbers of a reward go on where they were.
    """
    random_reward = by(lambda text, truth: contains_a_t(text, truth) | {"reward": float(draw_from_all_generators() > 2.5)})
    given: list[Any] = []
    monkeypatch.setattr("grpo.training.train.score_of", lambda *these: given.append(these[1:]) or random_reward)
    study = changed(tiny_study, save_state_every=2, divergence=None, grpo=TAKEN_UP)
    run, sample = with_a_base_of_its_own(study), loop.sample

    def killed_at_step_4(setup: Any, sampler: Any, step: int, n_questions: int) -> Any:
        if step == 4:
            torch.empty(2**60, dtype=torch.uint8)  # more memory than any machine has
        return sample(setup, sampler, step, n_questions)

    seed_all_generators()
    run_module.train_run(study, run)
    whole = files_below(paths.RUNS)
    history = read_csv(paths.RUNS / run.name / "history.csv")
    assert len({row["learning_rate"] for row in history}) > 1
    assert any(row["dynamic_sampling/rounds"] for row in history[-4:])  # after the state
    weights = (paths.CHECKPOINTS / run.name / "last" / "model.safetensors").read_bytes()
    shutil.rmtree(paths.RUNS)
    seed_all_generators()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "sample", killed_at_step_4)
        with pytest.raises(RuntimeError) as caught:
            run_module.train_run(study, run)
    assert "in the rollout phase" in str(explain_out_of_memory(caught.value))
    assert not (paths.RUNS / run.name).exists() and list((paths.RUN_STATE / run.name).glob("*/step-2"))
    (state,) = (paths.RUN_STATE / run.name).glob("*/step-2/state.pt")
    saved = torch.load(state, weights_only=True)["parts"]["learner"]["model"]
    assert saved and all(".lora_" in name for name in saved)
    run_module.train_run(study, run)
    assert files_below(paths.RUNS) == whole and given == [("question_only", None, 1)] * 3  # the draws are the seed's
    assert (paths.CHECKPOINTS / run.name / "last" / "model.safetensors").read_bytes() == weights


def test_a_finished_run_is_not_trained_again(tiny_study: Study, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC removes a stage's outputs before it runs. What DVC has stored is not kept (test_state)."""
    monkeypatch.setattr("grpo.training.train.score_of", lambda *_: SCORE)
    run, study = run_of(tiny_study), changed(tiny_study, save_state_every=2)
    outputs = [root / run.name for root in (paths.RUNS, paths.CHECKPOINTS, paths.TIMING)]
    paths.PIPELINE.touch()
    run_module.train_run(study, run)
    first = files_below(*outputs)
    assert len(first) > 5 and not list(paths.RUN_STATE.rglob("step-*"))
    monkeypatch.setattr("grpo.training.train.train", lambda *_: pytest.fail("it was trained"))
    for _ in range(2):  # as often as DVC fails
        for output in outputs:
            shutil.rmtree(output)
        run_module.train_run(study, run)
        assert files_below(*outputs) == first


def test_the_engine_is_made_before_the_hooks(tiny_study: Study, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting vLLM switches the CUDA stream of autograd's hooks; the engine also gets the run's own settings."""
    models, hooked, configs = [], [], []

    def noting(study: Study, folder: Path, model: Any, tokenizer: Any, config: Any, *rest: Any) -> Any:
        models.append(model)
        hooked.append(any(parameter._post_accumulate_grad_hooks for parameter in model.parameters()))
        configs.append(config)
        return make_engine(study, folder, model, tokenizer, config, *rest)

    monkeypatch.setattr(train_module, "make_engine", noting)
    arms = {"grpo_learning_rate": entry("grpo_learning_rate", arms={"slow": {"gpu_memory_utilization": 0.3}})}
    learner = {"dtype": "bfloat16", "gradient_checkpointing": True}  # the first with hooks
    study = changed(tiny_study, grpo={"n_grpo_steps": 1}, learner=learner, experiments=arms)
    run_module.train_run(study, run_of(study))
    assert hooked == [False]
    assert all(parameter._post_accumulate_grad_hooks for parameter in models[0].parameters())  # as the learner left them
    assert models[0].is_gradient_checkpointing
    assert configs[0].gpu_memory_utilization == 0.3


RIGHT = [1, 2, 4, 4]  # of six problems, in the evaluations after 0, 2, 4 and 5 steps
SLOW_WON = [{"experiment": "grpo_learning_rate", "winner": "slow", "overrides": {"learning_rate": 1e-3}}]
SAME_WON = {"experiment": "grpo_baselines", "winner": "same", "overrides": {}}
RECORDED = {  # run -> the winners before it
    "grpo_learning_rate/slow/0": [],
    "grpo_length_normalization/same/0": [*SLOW_WON, SAME_WON],
    "grpo_baselines/same/0": SLOW_WON,
    "grpo_baselines/other/0": SLOW_WON,
}
SLOW, SAME, OTHER = (f"grpo_{name}/0" for name in ("learning_rate/slow", "baselines/same", "baselines/other"))


@pytest.mark.parametrize(("shares", "warns"), [([1.0, 1.0], True), ([1.0, 0.875], False), ([], False)])
def test_a_run_whose_groups_never_had_unequal_rewards_says_so(
    shares: list[float], warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    history = [{"train/zero_signal_fraction": share} for share in shares] or [{"loss": 1.0}]  # of fine-tuning
    Monitor.warn_without_signal(cast(Monitor, SimpleNamespace(log=SimpleNamespace(history=history))))
    assert ("nothing was learnt" in capsys.readouterr().out) == warns


@pytest.fixture(scope="module")
def recorded(tiny_study: Study, fresh_model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A project ``folder`` with these runs, with RIGHT answers in the evaluations of each; the names of those ``trained``; and
    what the first one has ``sent`` to MLflow: by metric (step, value).
    """
    folder, trained, counts, train_one = tmp_path_factory.mktemp("recorded"), [], iter([*RIGHT, *RIGHT]), train_module.train
    sent: dict[str, list[tuple[int, float]]] = {}

    def tracked(study: str, name: str, *_: Any) -> NoMlflow:
        mlflow = NoMlflow()
        if name == SLOW:
            mlflow.log = lambda metrics, step: [sent.setdefault(key, []).append((step, of)) for key, of in metrics.items()]
        return mlflow

    def scored(rollouts: Sequence[Rollout]) -> ScoredBatch:
        if len(rollouts) != 6:  # a batch to train on
            return SCORE(rollouts)
        n = next(counts)
        answers = [dict.fromkeys(("reward", "format_reward", "answer_reward"), float(i < n)) for i in range(len(rollouts))]
        return ScoredBatch(answers, [False] * len(rollouts))

    def noted(study: Study, run: EffectiveRun, *rest: Any) -> None:
        trained.append(run.name)
        train_one(study, run, *rest)

    arms = {
        "grpo_learning_rate": entry("grpo_learning_rate", timed="alone", arms={"slow": {"learning_rate": 1e-3}}),
        "grpo_baselines": entry("grpo_baselines", arms={"same": {}, "other": {"cliprange": 0.1}}),
        "grpo_length_normalization": entry("grpo_length_normalization", arms={"same": {}}),
    }
    study = changed(tiny_study, experiments=arms, checkpoints=["last", "best"])
    with pytest.MonkeyPatch.context() as patch:
        make_project(patch, folder, fresh_model, tokenizer)
        patch.setattr("grpo.training.run.MlflowRun", tracked)
        patch.setattr("grpo.training.train.score_of", lambda *_: scored)
        patch.setattr(train_module, "train", noted)
        for name, winners in RECORDED.items():
            run_module.train_run(study, effective_run(study, *name.split("/")[:2], 0, winners))
    return SimpleNamespace(folder=folder, trained=trained, sent=sent)


@pytest.fixture
def runs(recorded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Work in the folder with the recorded runs."""
    monkeypatch.chdir(recorded.folder)
    return recorded


def test_what_a_run_evaluates_and_logs(runs: SimpleNamespace) -> None:
    """Each row by its number of updates, of which a step has two."""
    rows, sent = read_csv(paths.RUNS / SLOW / "validation.csv"), runs.sent
    assert [(row["step"], row["update"]) for row in rows] == [(0, 0), (2, 4), (4, 8), (5, 10)]
    columns = ["val/reward", "val/format_reward", "val/answer_reward", "val/response_length", "val/cut_off"]
    looked_at = ["val/grader_timeouts", "val/token_entropy", "val/response_length_correct", "val/response_length_incorrect"]
    assert list(rows[0]) == ["step", "update", *columns, *looked_at]
    assert [row["val/answer_reward"] * 6 for row in rows] == pytest.approx(RIGHT)  # a mean over six problems
    assert all(0 <= row["val/cut_off"] <= 1 and 1 <= row["val/response_length"] <= 6 for row in rows)
    for name in columns:
        assert sent[name] == [(row["update"], row[name]) for row in rows]
    rows = read_csv(paths.RUNS / SLOW / "history.csv")
    assert [(row["step"], row["update"]) for row in rows] == [((i + 2) // 2, i + 1) for i in range(10)]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first["ratio_min"] == first["ratio_max"] == 1.0  # nothing has happened since sampling
        assert second["ratio_min"] < 1.0 < second["ratio_max"]
        assert first["train/reward"] == second["train/reward"]  # one rollout batch
    assert [row["step"] for row in json.loads(paths.run_timing(SLOW).read_text())["steps"]] == [1, 2, 3, 4, 5]
    for name in HISTORY[2:]:
        assert sent[name] == [(row["update"], row[name]) for row in rows]
    times = {name for name in sent if name.startswith("time/")}
    assert {"time/rollout_s", "time/training_s", "time/tokens_per_s", "time/rollout_peak_mb", "time/training_peak_mb"} <= times
    assert all(step in (2, 4, 6, 8, 10) and value >= 0 for name in times for step, value in sent[name])


def metadata(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "metadata.json").read_text())


def test_the_last_and_the_best_weights_are_kept(runs: SimpleNamespace) -> None:
    folder, starts = paths.CHECKPOINTS / SLOW, {"started_from": "unused", "start": "data/model/main"}
    about = {"run": SLOW, "prompt": "question_only", **starts}
    # Of two equal evaluations the first is best: the third of four, which took the place of the second.
    best = about | {"kind": "best", "step": 4, "update": 8, "answer_reward": pytest.approx(4 / 6)}
    last = about | {"kind": "last", "step": 5, "update": 10, "answer_reward": pytest.approx(4 / 6)}
    assert (metadata(folder / "best"), metadata(folder / "last")) == (best, last)
    assert sorted(path.name for path in folder.iterdir()) == ["best", "last"]
    assert not same_weights(load_model(folder / "best"), load_model(folder / "last"))
    assert load_tokenizer(folder / "best")("apples") == load_tokenizer(folder / "last")("apples")
    metrics = json.loads((paths.RUNS / SLOW / "metrics.json").read_text())
    assert (metrics["best/step"], metrics["best/answer_reward"]) == (4, pytest.approx(4 / 6))
    assert (metrics["steps"], metrics["val/answer_reward"]) == (5, pytest.approx(4 / 6))


def test_an_equal_run_stores_no_weights_but_says_whose_it_shares(runs: SimpleNamespace) -> None:
    assert runs.trained == [SLOW, OTHER]
    folder, equal = paths.CHECKPOINTS / SLOW, paths.CHECKPOINTS / SAME
    # Though the experiment between has no such run:
    assert metadata(paths.CHECKPOINTS / "grpo_length_normalization/same/0")["same_as"] == SLOW
    assert [path.name for path in equal.iterdir()] == ["metadata.json"]
    assert metadata(equal) == {"run": SAME, "same_as": SLOW}
    files, copies = ({path.name: path.read_bytes() for path in (paths.RUNS / name).iterdir()} for name in (SLOW, SAME))
    assert set(files) == {"config.yaml", "history.csv", "metrics.json", "outcomes.jsonl", "rollouts.jsonl", "validation.csv"}
    assert files.pop("config.yaml") != copies.pop("config.yaml")
    assert copies == files
    config = parse_yaml(paths.RUNS / SAME / "config.yaml")
    assert (config["run"], config["same_as"]) == (SAME, SLOW)
    assert parse_yaml(paths.RUNS / SLOW / "config.yaml")["identity"] == config["identity"]
    about, again = (json.loads(paths.run_timing(name).read_text()) for name in (SLOW, SAME))
    assert about["alone"] and not again["alone"]  # the first seed of a timed experiment runs alone

    with pytest.raises(UserError, match=rf"a run's folder holds no model itself\. Use {folder}/last or {folder}/best"):
        require_checkpoint(folder)
    for wanted in (equal, equal / "last", equal / "best"):
        with pytest.raises(UserError, match=rf"same as grpo_learning_rate/slow/0; its weights are in {folder}\.$"):
            require_checkpoint(wanted)
    require_checkpoint(folder / "last")
    require_checkpoint(folder / "best")


def test_the_config_says_what_the_run_changed_and_where_values_came_from(runs: SimpleNamespace, mini_study: Study) -> None:
    config = parse_yaml(paths.RUNS / OTHER / "config.yaml")
    assert (config["run"], config["same_as"], config["seed"]) == (OTHER, None, 0)
    assert config["overrides"] == {"cliprange": 0.1}
    assert config["updates_per_rollout_batch"] == 2
    assert config["config"]["cliprange"] == {"value": 0.1, "from": "arm other"}
    assert config["config"]["learning_rate"] == {"value": 1e-3, "from": "winner of grpo_learning_rate (slow)"}
    assert config["divergence"] == mini_study.divergence.model_dump() and config["checkpoints"] == ["last", "best"]


def test_phases_add_up_and_what_other_processes_measured_replaces_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's time is without its evaluation."""
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    log = RunLog(tmp_path, NoMlflow())  # type: ignore[arg-type]
    elsewhere = {"generator_s": 2.0, "training_s": 7.0, "training_peak_mb": 5.0}
    for step, evaluation, others in ((1, 0.0, {}), (2, 40.0, {}), (3, 0.0, elsewhere)):
        for phase, seconds in (("rollout", 1.0), ("training", 5.0), ("rollout", 2.0), ("evaluation", evaluation)):
            with log.phase(phase):
                clock[0] += seconds
        clock[0] += 0.5  # between the phases
        log.step(step, [{"loss": 0.5}], {"train/reward": 1.0}, tokens=24, elsewhere=others)
    log.close()
    assert (tmp_path / "history.csv").read_text() == "step,update,train/reward,loss\n1,1,1.0,0.5\n2,2,1.0,0.5\n3,3,1.0,0.5\n"
    assert [row["step_s"] for row in log.times] == [8.5, 8.5, 8.5]
    assert [row["evaluation_s"] for row in log.times] == [0.0, 40.0, 0.0]
    assert [row["training_s"] for row in log.times] == [5.0, 5.0, 7.0] and log.times[2]["training_peak_mb"] == 5.0
    assert [row["tokens_per_s"] for row in log.times] == [3.0, 3.0, 2.4]
    measured = {"rollout_s": 9.0, "training_s": 15.0, "evaluation_s": 40.0}
    assert log.elapsed_s == 65.5 and log.phase_totals == measured | {"generator_s": 2.0}  # each name is counted once


def test_a_phases_memory_is_its_largest_in_the_step_and_only_in_this_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path, NoMlflow())  # type: ignore[arg-type]
    for step, megabytes in ((1, 256), (2, 1)):
        for size in (1, megabytes, 1):
            with log.phase("training"):
                torch.ones(size, 2**18).sum()
        log.step(step, [{"loss": 0.0}], {}, tokens=1)
    log.close()
    first, second = (row["training_peak_mb"] for row in log.times)
    assert first - second > 200


def test_the_time_of_a_run_that_is_taken_up_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the resuming process may have any value. The first process began 7 s before its log."""
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    folders = [tmp_path / "first", tmp_path / "again", tmp_path / "third"]
    for folder in folders:
        folder.mkdir()
    first = RunLog(folders[0], NoMlflow(), began=93.0)  # type: ignore[arg-type]
    with first.phase("training"):
        clock[0] += 30.0
    first.step(1, [{"loss": 0.0}], {}, tokens=1)
    state = first.state()
    first.close()
    clock[0] = 5.0
    again = RunLog(folders[1], NoMlflow())  # type: ignore[arg-type]
    with again.phase("training"):
        clock[0] += 3.0  # the state is read, which is part of no step
    again.restore(state)
    clock[0] += 4.0
    assert again.elapsed_s == 41.0 and again.resumed_after == [1]
    with again.phase("training"):
        clock[0] += 2.0
    again.step(2, [{"loss": 0.0}], {}, tokens=1)
    again.close()
    assert [row["training_s"] for row in again.times] == [30.0, 2.0]
    assert [row["step_s"] for row in again.times] == [30.0, 6.0] and again.phase_totals == {"training_s": 32.0}
    third = RunLog(folders[2], NoMlflow())  # type: ignore[arg-type]
    third.restore(again.state())
    third.close()
    assert third.elapsed_s == 43.0 and third.resumed_after == [1, 2]


def monitor_of(study: Study, model: Any, tokenizer: Any, n: int, run_seed: int = 0, **settings: Any) -> Monitor:
    """What evaluates ``model`` on the first ``n`` problems."""
    study = changed(study, evaluation={"problems": n, "last_problems": n, "max_tokens": 6} | settings)
    engine, learner = TransformersEngine(model, tokenizer), Learner(model, CONFIG, tokenizer.pad_token_id)
    given = {"engine": engine, "learner": learner, "tokenizer": tokenizer, "reward": contains_a_t, "seed": run_seed}
    return monitored(context(CONFIG, None, None, **given), study, problems(n + 10))[1]


@pytest.mark.parametrize(("limit", "used"), [(12, 6), (4, 4)])
def test_the_limit_of_training_in_validation(model: Any, tokenizer: Any, mini_study: Study, limit: int, used: int) -> None:
    """The evaluation's own limit applies if it is smaller than that of training, which is 6."""
    monitor = monitor_of(mini_study, model, tokenizer, 6, max_tokens=limit, temperature=0.8, top_p=0.9)
    assert monitor.sampling() == SamplingParams(0.8, 0.9, max_tokens=used)
    assert max(rollout.length for rollout in monitor.evaluate(0).rollouts) == used


@pytest.mark.parametrize(
    ("of_training", "place", "arm", "max_tokens", "key"),
    [
        (True, 19, {}, 4, "grpo.sampling_max_tokens"),
        (True, 19, {"sampling_max_tokens": 5}, 4, "experiments.grpo_learning_rate.arms.slow.sampling_max_tokens"),
        (False, 7, {}, 4, "evaluation.max_tokens"),
        (False, 7, {}, 12, "grpo.sampling_max_tokens"),
        (False, 8, {}, 4, None),  # no evaluation asks it
        (False, 8, {"wall_clock_limit_s": 60.0}, 4, "evaluation.max_tokens"),  # at the end all are asked
    ],
)
def test_a_prompt_that_leaves_a_response_no_room_is_refused_before_training(
    tiny_study: Study, tokenizer: Any, of_training: bool, place: int, arm: dict[str, Any], max_tokens: int, key: str | None
) -> None:
    """It is the last of the training questions, or one of nine validation problems, of which the last evaluation has eight."""
    arms = {"grpo_learning_rate": entry("grpo_learning_rate", arms={"slow": arm})}
    study = changed(
        tiny_study, evaluation={"problems": 6, "last_problems": 8, "max_tokens": max_tokens}, experiments=arms, divergence=None
    )
    data, asked = problems(20), problems(9)
    (data if of_training else asked)[place] = replace(problems(1)[0], question="Mia has 3 apples. " * 50)
    run, engine = run_of(study), SimpleNamespace(context=100, policy_version=0)
    ctx = context(run.config, None, None, data=data, engine=engine, learner=None, tokenizer=tokenizer)
    told = f"^params.yaml: {key}: the model's context of 100 tokens is too short .* 1 of {max(8, place + 1)} prompts"
    with pytest.raises(UserError, match=told) if key else nullcontext():
        train_module.require_room_for_all(run, monitored(ctx, study, asked)[1])


def test_every_evaluation_of_every_run_draws_alike(model: Any, tokenizer: Any, mini_study: Study) -> None:
    """An unchanged policy gets the same result again; the study's seed affects it, the run's does not."""

    def drawn(step: int = 0, **given: Any) -> list[Completion]:
        rollouts = monitor_of(mini_study, model, tokenizer, 6, **given).evaluate(step).rollouts
        return [replace(rollout.completion, policy_version=0) for rollout in rollouts]

    assert drawn() == drawn(step=2) == drawn(run_seed=1) != drawn(seed=5)


def test_what_is_shown_of_more_than_64_problems_is_of_the_first_64(model: Any, tokenizer: Any, mini_study: Study) -> None:
    found = monitor_of(mini_study, model, tokenizer, 90).evaluate(0)
    assert [r.problem.id for r in found.rollouts] == [f"p/{i}" for i in range(90)]
    assert len(found.generations) == 64
    entropies = []
    for i, (rollout, record) in enumerate(zip(found.rollouts, found.generations, strict=False)):
        assert f"Mia has {i} apples." in record["prompt"] and record["ground_truth"] == str(i)
        assert (record["response"], record["response_length"]) == (rollout.completion.text, len(rollout.completion.token_ids))
        entropies.append(torch.distributions.Categorical(logits=log_softmax_alone(model, rollout)).entropy().mean().item())
        assert record["token_entropy"] == pytest.approx(entropies[-1], abs=1e-4)
    assert found.metrics["token_entropy"] == pytest.approx(sum(entropies) / 64, abs=1e-4)
    assert found.metrics["response_length"] == sum(len(r.completion.token_ids) for r in found.rollouts) / 90


OF_SAMPLING = GrpoConfig(
    rollout_batch_size=12, train_batch_size=12, group_size=2, gradient_accumulation_steps=1, prompt="question_only",
    dynamic_sampling_rounds=2,
)  # fmt: skip
DATA = problems(24)
FIRST = [problem.id for problem in items_of_step(DATA, 0, 1, 6)]  # what is asked in the first step


def first_step(tokenizer: Any, folder: Path, easy: set[str], n: int = 24, rounds: int = 2) -> SimpleNamespace:
    """A first step on ``n`` problems. All answers to an easy one have reward 1; of other groups only the first has.

    Returns:
        the rollouts ``before`` and ``after``, and their ``questions``; ``metrics``; of each call of the engine the number of
        questions (``asked``) and the seed (``seeds``).
    """
    asked, seeds = [], []

    def generate(prompts: Sequence[Any], params: SamplingParams, n: int, seed: int) -> list[list[Completion]]:
        asked.append(len(prompts))
        seeds.append(seed)
        return [[Completion((1,), text, (0.0,), "stop", 0) for text in ("yes", "no")] for _ in prompts]

    def scored(rollouts: Sequence[Rollout]) -> ScoredBatch:
        right = [float(r.problem.id in easy or r.completion.text == "yes") for r in rollouts]
        rewards = [dict.fromkeys(("reward", "format_reward", "answer_reward"), each) for each in right]
        return ScoredBatch(rewards, [False] * len(right))

    config, log = OF_SAMPLING.model_copy(update={"dynamic_sampling_rounds": rounds}), RunLog(folder, NoMlflow())
    engine = SimpleNamespace(policy_version=0, context=None, generate=generate)
    ctx = context(config, log, None, data=DATA[:n], engine=engine, learner=None, tokenizer=tokenizer)
    ctx = replace(ctx, setup=replace(ctx.setup, score=scored))
    before, _ = rewards_and_advantages(ctx.setup, sample(ctx.setup, ctx.sampler, 1, 6))
    after, metrics = replace_groups_without_signal(ctx, 1, list(before))
    assert len(before) == len(after) == 12
    assert all(batch[::2][i].problem == batch[1::2][i].problem for batch in (before, after) for i in range(6))
    questions = ([rollout.problem.id for rollout in batch[::2]] for batch in (before, after))
    return SimpleNamespace(before=before, after=after, questions=[*questions], metrics=metrics, asked=asked, seeds=seeds)


def test_groups_without_signal_give_way_to_other_questions_and_all_others_stay(tokenizer: Any, tmp_path: Path) -> None:
    step = first_step(tokenizer, tmp_path, easy={FIRST[1], FIRST[4]})
    before, after = step.questions
    assert before == FIRST and [after[i] for i in (0, 2, 3, 5)] == [FIRST[i] for i in (0, 2, 3, 5)]
    assert not {after[1], after[4]} & set(FIRST) and after[1] != after[4]
    assert step.asked == [6, 2] and step.seeds[0] != step.seeds[1]
    assert step.metrics["dynamic_sampling/rounds"] == 1 and step.metrics["dynamic_sampling/dropped_groups"] == 2
    assert step.metrics["train/zero_signal_fraction"] == 0 and step.metrics["train/reward"] == 0.5
    # By the definition: rewards of 1 and 0 are half a reward from their mean, and their standard deviation is the root of .5.
    assert [rollout.advantage for rollout in step.after] == pytest.approx([0.5**0.5, -(0.5**0.5)] * 6, rel=1e-5)
    step = first_step(tokenizer, tmp_path, easy=set())  # every group has signal
    assert step.after == step.before and step.asked == [6]
    assert step.metrics["dynamic_sampling/rounds"] == step.metrics["dynamic_sampling/dropped_groups"] == 0


def test_it_ends_after_so_many_rounds_or_when_every_question_was_asked(tokenizer: Any, tmp_path: Path) -> None:
    everything = {problem.id for problem in DATA}
    step = first_step(tokenizer, tmp_path, everything)
    assert step.asked == [6, 6, 6] and len({*step.seeds}) == 3
    assert step.metrics["dynamic_sampling/dropped_groups"] == 12 and step.metrics["train/zero_signal_fraction"] == 1
    assert not {*step.questions[0]} & {*step.questions[1]}
    few = first_step(tokenizer, tmp_path, everything, n=8, rounds=5)  # two are left after the first six
    assert few.asked == [6, 2] and {*few.questions[0], *few.questions[1]} == {problem.id for problem in DATA[:8]}


@pytest.mark.parametrize(("rewards", "signal"), [((0.5, 0.5), False), ((0.1 + 0.2, 0.3), False), ((1.0, 0.0), True)])
def test_the_punishment_of_long_responses_is_no_signal(rewards: tuple[float, float], signal: bool) -> None:
    """DAPO's Eq. 11 asks for right and wrong answers, whatever their lengths; the rewards are those that are trained on."""
    config = OF_SAMPLING.model_copy(update={"sampling_max_tokens": 8, "overlong_buffer": 4})
    lengths = (8, 4)
    group = [Rollout(DATA[0], (1,), Completion((1,) * n, "", (0.0,) * n, "stop")) for n in lengths]
    scores = [{"reward": each, "format_reward": 1.0, "answer_reward": 1.0} for each in rewards]
    setup = setup_of(config, DATA, score=lambda rollouts: ScoredBatch(scores, [False, False]))
    scored, metrics = rewards_and_advantages(setup, group)
    assert [one.rewards["reward"] for one in scored] == [rewards[0] - 1.0, rewards[1]]
    assert has_signal(scored) is signal and metrics["train/zero_signal_fraction"] == (rewards == (1.0, 0.0))


@pytest.mark.parametrize(
    ("rewards", "signal"), [((math.nan,) * 2, False), ((math.nan, 1.0), False), ((math.nan, 1.0, 0.0), True)]
)
def test_a_response_without_a_reward_is_no_signal(rewards: tuple[float, ...], signal: bool) -> None:
    empty = Completion((), "", (), "stop")
    assert has_signal([Rollout(DATA[0], (1,), empty, {"reward": reward}) for reward in rewards]) is signal


def test_what_is_asked_anew_depends_on_seed_step_and_round_alone() -> None:
    first = [other_problems(DATA, DATA[:6], seed, step, 4) for seed, step in ((0, 1), (0, 1), (1, 1), (0, 2))]
    assert first[0] == first[1] and first[0] != first[2] != first[3] != first[0]
    assert not set(first[0]) & set(DATA[:6])
