"""Divergence and early end of a run: the rules alone, then the real loop on a tiny model."""

import copy
import math
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML
from study_parts import changed, entry
from training_parts import (
    CONFIG,
    NoMlflow,
    contains_a_t,
    context,
    monitored,
    never_saved,
    problems,
    read_csv,
    same_weights,
)

from grpo.common.files import read_jsonl
from grpo.learner.learner import Learner
from grpo.results.intervals import wilson_interval
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.config import Divergence
from grpo.study.effective import effective_run
from grpo.study.schema import Study
from grpo.tracking.run_log import RunLog
from grpo.training.grpo import train_grpo
from grpo.training.monitor import Monitor, divergence

RULES = Divergence(patience=2, reward_below_start=0.5, entropy_below=0.001, length_below=0.2, skipped_updates=5)


COLLAPSED = {"stop_when_collapsed": True}
VERDICTS = YAML(typ="safe", pure=True).load(Path(__file__).with_name("divergence.yaml"))


@pytest.mark.parametrize(("rewards", "more", "rule"), VERDICTS)
def test_what_counts_as_divergence(rewards: list[float], more: dict[str, Any], rule: str | None) -> None:
    """The untrained policy's evaluation is the first; entropies start with the second."""
    lengths, entropies = more.get("lengths", [100.0] * len(rewards)), more.get("entropies", [1.0] * (len(rewards) - 1))
    rows = [{"val/answer_reward": r, "val/response_length": n} for r, n in zip(rewards, lengths, strict=True)]
    reason = divergence(RULES.model_copy(update=more), rows, entropies, more.get("skipped", 0))
    assert len(entropies) == len(rewards) - 1
    assert reason is None if rule is None else (reason or "").startswith(rule)


def test_an_own_reward_below_zero_is_no_share_of_another() -> None:
    """Half of -0.4 is -0.2, and a reward of -0.3 is nearer to the best than that."""

    def verdict(rules: Divergence, *rewards: float) -> str | None:
        rows = [{"val/reward": value, "val/response_length": 10.0} for value in rewards]
        return divergence(rules, rows, [1.0] * len(rows), 0, "reward")

    for rewards in ((-0.4, -0.3, -0.3), (-0.8, -0.1, -0.3, -0.3)):
        assert verdict(RULES.model_copy(update=COLLAPSED), *rewards) is None
    assert "reward 0.500, under its start of 2.000" in str(verdict(RULES, 2.0, 0.5, 0.5))


def monitor_of(study: Study, log: Any = None, **changes: Any) -> Monitor:
    """A monitor without a policy, which only counts and decides."""
    ctx = context(CONFIG.model_copy(update=changes), log, None, engine=None, learner=None)
    return monitored(ctx, changed(study, divergence=None), [])[1]


def test_halving_the_loss_scale_of_float16_is_no_sign_of_divergence(mini_study: Study) -> None:
    """Except at a scale of 1, or with a loss that is not finite. One finite gradient starts the count anew."""
    for scale, loss, in_a_row in ((2.0, 0.5, 0), (1.0, 0.5, 3), (2.0, math.nan, 3)):
        monitor, finite = monitor_of(mini_study), {"skipped_update": 0.0, "loss": 0.5}
        monitor.count([{"skipped_update": 1.0, "loss": loss, "loss_scale": scale}] * 3)
        assert (monitor.skipped, monitor.skipped_in_all) == (in_a_row, 3)
        monitor.count([finite, {"skipped_update": 1.0, "loss": math.nan}])
        assert (monitor.skipped, monitor.skipped_in_all) == (1, 4)


RAW = {"use_std_normalization": False}


def too_large(text: str, truth: str) -> dict[str, float]:
    """A reward that fits float32, but whose gradient norm does not if advantages are not divided by their std."""
    return contains_a_t(text, truth) | {"reward": 1e30 * contains_a_t(text, truth)["reward"]}


@pytest.fixture(scope="module")
def train(mini_study: Study, fresh_model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains with one reward and validates with another, every second step, on 64 of 80 problems, at last on 72.

    Gives the ended run's metrics, model, best evaluations, monitor (``validate``) and what makes a new one, and its files.
    """

    def run_it(reward: Any, rules: Divergence | None, measured: Any = contains_a_t, **changes: Any) -> SimpleNamespace:
        tmp_path = tmp_path_factory.mktemp("run")
        study = changed(
            mini_study,
            seeds=[0],
            grpo=CONFIG.model_copy(update=changes),
            evaluation={"every": 2, "problems": 64, "last_problems": 72, "max_tokens": 6},
            divergence=rules,
            experiments={"grpo_learning_rate": entry("grpo_learning_rate", arms={"arm": {}})},
        )
        run = effective_run(study, "grpo_learning_rate", "arm", 0, [])
        policy, best = copy.deepcopy(fresh_model), []
        log, saved = RunLog(tmp_path, NoMlflow()), never_saved(tmp_path)  # type: ignore[arg-type]
        engine, learner = TransformersEngine(policy, tokenizer), Learner(policy, run.config, tokenizer.pad_token_id)
        parts = {"data": problems(80), "engine": engine, "learner": learner, "tokenizer": tokenizer}

        def keep(kind: str, about: dict[str, Any]) -> None:
            assert kind == "best"  # whoever trains keeps the last
            best.append(about)

        def new() -> Monitor:
            return monitored(context(run.config, log, saved, **parts, reward=measured), study, problems(80), keep)[1]

        validate = new()
        train_grpo(context(run.config, log, saved, **parts, reward=reward, validation=validate))
        metrics = validate.final_metrics()
        validate.write(tmp_path)
        log.close()
        validate.bar.close()
        history, validations = (read_csv(tmp_path / name) for name in ("history.csv", "validation.csv"))
        outcomes, samples = (read_jsonl(tmp_path / f"{name}.jsonl", "train", dict) for name in ("outcomes", "rollouts"))
        return SimpleNamespace(
            metrics=metrics, model=policy, best=best, validate=validate, new=new,
            history=history, validations=validations, outcomes=outcomes, samples=samples,
        )  # fmt: skip

    return run_it


def rewards_of(run: SimpleNamespace) -> list[float]:
    return [row["val/answer_reward"] for row in run.validations]


def test_a_run_without_finite_gradients_ends_between_evaluations_with_a_last_one(train: Any, fresh_model: Any) -> None:
    run = train(too_large, RULES.model_copy(update={"skipped_updates": 3}), **RAW)
    assert run.metrics["diverged_step"] == 3
    assert "not finite in 3 optimizer steps in a row" in run.metrics["diverged_reason"]
    assert [row["skipped_update"] for row in run.history] == [1.0] * 3
    assert run.metrics["skipped_updates"] == 3
    assert [row["step"] for row in run.validations] == [line["step"] for line in run.outcomes] == [0, 2, 3]
    assert {sample["step"] for sample in run.samples} >= {0, 3}
    assert rewards_of(run)[0] == rewards_of(run)[1]  # nothing was trained
    assert same_weights(run.model, fresh_model)


def scripted(*right: int) -> Callable[[str, str], dict[str, float]]:
    """An answer reward with so many right answers in each evaluation of 64 problems, and then none."""
    answers = chain(*([1.0] * n + [0.0] * (64 - n) for n in right), repeat(0.0))
    return lambda text, truth: contains_a_t(text, truth) | {"answer_reward": next(answers)}


@pytest.mark.parametrize(
    ("rules", "right", "steps", "end", "reason"),
    [
        (RULES, (32, 15, 8), 12, 4, "answer reward 0.125, under its start of 0.500 in 2 evaluations in a row"),
        # In the last step nothing is evaluated twice.
        (RULES, (32, 15, 8), 4, 4, "answer reward 0.111, under its start of 0.500 in 2 evaluations in a row"),
        # It rises from 1/4 to all, and then has less than a fifth of that twice in a row, after 4 and 6 steps.
        (
            RULES.model_copy(update=COLLAPSED | {"reward_below_start": 0.0}),
            *((16, 64, 8, 4), 12, 6, "answer reward 0.062, under 0.2 of its best of 1.000 in 2 evaluations in a row"),
        ),
        (None, (32, 10, 8, 6, 5, 4, 3), 12, None, ""),
    ],
    ids=["falls", "falls at the end", "collapses", "without rules"],
)
def test_a_run_that_diverges_ends_and_is_evaluated_on_the_last_problems(
    train: Any, rules: Divergence | None, right: tuple[int, ...], steps: int, end: int | None, reason: str
) -> None:
    """If it ends early, the last problems are asked for once more, and none is answered."""
    run = train(contains_a_t, rules, measured=scripted(*right), n_grpo_steps=steps)
    assert (run.metrics["diverged_step"], run.metrics["diverged_reason"]) == (end, reason)
    last, early = end or steps, end not in (None, steps)
    assert run.metrics["steps"] == len(run.history) == run.samples[-1]["step"] == last
    asked, answered = [64] * (len(right) - 1) + [72], [*right[:-1], 0 if early else right[-1]]
    found = [(line["step"], len(line["answer_reward"]), sum(line["answer_reward"])) for line in run.outcomes]
    assert found == [*zip(range(0, last + 1, 2), asked, answered, strict=True)]
    rewards = rewards_of(run)
    assert [row["step"] for row in run.validations] == [*range(0, last + 1, 2)]
    assert rewards == pytest.approx([n / of for n, of in zip(answered, asked, strict=True)])
    assert (run.metrics["validation_problems"], run.metrics["val/answer_reward"]) == (72, rewards[-1])
    assert run.metrics["time_limit_step"] is None and "full/answer_reward" not in run.metrics
    # The untrained policy is not the best that is kept, even if training only makes it worse.
    assert [best["step"] for best in run.best] == [2] and run.metrics["best/step"] == 2


def test_weights_that_blow_up_end_as_divergence(train: Any) -> None:
    """After one step at an absurd learning rate nothing is finite; sampling goes on, and no answer is right."""
    run = train(contains_a_t, RULES, learning_rate=1e10)
    assert rewards_of(run)[0] > 0 and rewards_of(run)[1:] == [0.0, 0.0]
    assert run.metrics["diverged_step"] == run.metrics["steps"] == 4 and "answer reward 0.000" in run.metrics["diverged_reason"]
    assert [row["skipped_update"] for row in run.history] == [0, 1, 1, 1]
    assert run.metrics["val/response_length_correct"] is None  # JSON has no NaN
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def test_a_time_limit_ends_the_run_after_its_step(train: Any) -> None:
    def poorly_paid(text: str, truth: str) -> dict[str, float]:
        return contains_a_t(text, truth) | {"reward": 0.3 * contains_a_t(text, truth)["reward"]}  # not the answer reward

    run = train(contains_a_t, RULES, measured=poorly_paid, wall_clock_limit_s=1e-6)
    assert (run.metrics["time_limit_step"], run.metrics["diverged_step"]) == (1, None)
    assert len(run.history) == 1
    assert [row["step"] for row in run.validations] == [line["step"] for line in run.outcomes] == [0, 1]
    assert {sample["step"] for sample in run.samples} >= {0, 1}
    assert run.metrics["steps"] == 1
    # The leaderboard scores the whole validation set, not only the problems of the evaluations.
    assert (run.metrics["full/problems"], run.metrics["validation_problems"]) == (80, 72)
    assert [len(line["answer_reward"]) for line in run.outcomes] == [64, 72]
    assert run.metrics["full/answer_reward"] * 80 == pytest.approx(round(run.metrics["full/answer_reward"] * 80), abs=1e-9)


@pytest.mark.parametrize(("step", "seconds", "ends"), [(0, 2.0, False), (2, 2.0, True), (2, 0.5, False), (3, 2.0, False)])
def test_no_time_limit_in_the_first_or_last_step(step: int, seconds: float, ends: bool, mini_study: Study) -> None:
    monitor = monitor_of(mini_study, SimpleNamespace(elapsed_s=seconds), n_grpo_steps=3, wall_clock_limit_s=1.0)
    assert monitor.ends_early(step, []) is ends


def test_all_that_validation_gathers_survives_a_resume(train: Any) -> None:
    calls = iter(range(10_000))

    def never_in_the_last_steps(text: str, truth: str) -> dict[str, float]:
        return contains_a_t(text, truth) if next(calls) // 64 < 4 else too_large(text, truth)

    run = train(never_in_the_last_steps, RULES, n_grpo_steps=7, wall_clock_limit_s=1e6, **RAW)
    new = run.new()
    gathered = {name for name, value in vars(run.validate).items() if value != vars(new)[name]}
    gathered -= {"bar", "setup", "sampler", "steps"}  # what is shown, and what the run works with
    assert gathered == {"samples", "outcomes", "updates", "entropies", "skipped", "skipped_in_all"}
    new.restore(run.validate.state())
    assert {name: vars(new)[name] for name in gathered} == {name: vars(run.validate)[name] for name in gathered}


def test_metrics_outcomes_and_best_evaluations_of_a_whole_run(train: Any) -> None:
    run = train(contains_a_t, RULES, n_grpo_steps=5, epochs_per_rollout_batch=2, loss_type="grpo_clip")
    rewards, rows = rewards_of(run), run.validations[1:]
    assert [(line["step"], len(line["answer_reward"])) for line in run.outcomes] == [(0, 64), (2, 64), (4, 64), (5, 72)]
    metrics = run.metrics
    assert (metrics["first/answer_reward"], metrics["val/answer_reward"]) == (rewards[0], rewards[-1])
    assert metrics["best/answer_reward"] == max(rewards)
    assert metrics["best/step"] == [0, 2, 4, 5][rewards.index(max(rewards))]
    low, high = wilson_interval(round(rewards[-1] * 72), 72)
    assert (metrics["val/answer_reward_low"], metrics["val/answer_reward_high"]) == pytest.approx((low, high))
    # Of the evaluations after 0, 2, 4 and 5 steps the first, the middle and the last show eight samples each.
    assert [sample["step"] for sample in run.samples] == [0] * 8 + [4] * 8 + [5] * 8
    assert [sample["problem"] for sample in run.samples[:8]] == [f"p/{i}" for i in range(8)]
    # Each new best evaluation of the trained policy is kept.
    expected = [
        {"step": row["step"], "update": 2 * row["step"], "answer_reward": row["val/answer_reward"]}
        for i, row in enumerate(rows)
        if row["val/answer_reward"] > max((r["val/answer_reward"] for r in rows[:i]), default=-1.0)
    ]
    assert run.best == expected
    assert len(run.best) >= 2
    # Of an evaluated step's two updates the last one's entropy counts.
    entropies = [[each["token_entropy"] for each in run.history if each["step"] == row["step"]] for row in rows]
    assert run.validate.entropies == pytest.approx([last for _, last in entropies], rel=1e-12)
