"""Rewards that do not know the answer, and the trap: a task on which form alone pays is called so."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import training_parts
from report_parts import run, study_of
from study_parts import changed, study_named
from training_parts import NoMlflow, never_saved, problems

from grpo.common.errors import UserError
from grpo.common.files import write_json, write_text
from grpo.common.records import Completion, Problem, Rollout, write_records
from grpo.evaluation.evaluate import evaluate
from grpo.learner.learner import Learner
from grpo.reporting.labels import render
from grpo.reporting.record import label_arms
from grpo.results.controls import beyond_controls
from grpo.results.runs import ExperimentRuns, Run
from grpo.rollout.engine import SamplingParams
from grpo.rollout.sampling import Sampler
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study import paths
from grpo.study.compose import CONTROLS
from grpo.study.config import ExpertIterationConfig
from grpo.tasks.rewards import score_of
from grpo.tasks.task import Format, Task
from grpo.tracking.run_log import RunLog
from grpo.training.data import choose_questions, read_data
from grpo.training.grpo import train_grpo
from grpo.training.step import RunContext, RunSetup

CONFIG = training_parts.CONFIG.model_copy(update={"n_grpo_steps": 30, "prompt": "plain"})
FORMAT = Format("{question}", read=lambda text: text.strip() if "T" in text else None)


class FormPays(Task):
    """Any answer in the form is right for every other problem, so that nothing but the form can be learned."""

    formats = {"plain": FORMAT}

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        return [float(int(problem.ground_truth) % 2 == 0) for problem in problems]


class MorePays(FormPays):
    """An answer is right if it has an "o" besides the form's letter (with an "e", what learnt the form alone was right too)."""

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        return [float("o" in answer) for answer in answers]


def responses(*texts: str, problem: int = 0, version: int = 0) -> list[Rollout]:
    ids = [tuple(map(ord, text)) for text in texts]
    made = [Completion(i, text, (-1.0,) * len(i), "stop", version) for i, text in zip(ids, texts, strict=True)]
    return [Rollout(problems(9)[problem], (1,), one) for one in made]


def rewards(reward: Any, rollouts: list[Rollout], seed: int = 0) -> list[float]:
    return [one["reward"] for one in score_of(FormPays(), "plain", reward, seed)(rollouts).rewards]


def test_the_majority_of_a_group_is_paid() -> None:
    """Equal answers count together however they are spelt, no answer has no vote, and of equals the first wins."""
    assert rewards("majority_reward", responses("T1/2", "T3", "T3", "x", "T 4")) == [0, 1, 1, 0, 0]
    two_groups = responses("T1", "T2") + responses("T2", "T2", "T1", problem=1) + responses("x", "y", problem=2)
    assert rewards("majority_reward", two_groups) == [1, 0, 1, 1, 0, 0, 0]
    assert rewards({"majority_reward": 2.0, "format_reward": 1.0}, responses("T1", "T1", "x")) == [3, 3, 0]
    assert rewards("format_reward", responses("T1", "x", problem=1)) == [1, 0] != rewards(None, responses("T1", "x", problem=1))


def test_a_random_reward_depends_on_seed_question_step_and_response_and_on_nothing_else() -> None:
    batch = responses(*["T"] * 400)
    drawn = rewards("random_reward", batch)
    assert drawn == rewards("random_reward", batch) and set(drawn) == {0.0, 1.0}
    assert abs(np.mean(drawn) - 0.5) < 4 * 0.5 / 20  # four standard errors; equal responses have draws of their own
    others = [
        rewards("random_reward", batch, seed=1),
        rewards("random_reward", responses(*["T"] * 400, problem=1)),
        rewards("random_reward", responses(*["T"] * 400, version=1)),
        rewards("random_reward", responses(*["x"] * 400)),
    ]
    assert all(abs(np.corrcoef(drawn, other)[0, 1]) < 4 / 20 for other in others)
    assert rewards("random_reward", batch[:100]) == drawn[:100]


def test_a_smaller_draw_of_questions_is_part_of_a_larger_one(tmp_path: Path) -> None:
    few, more, other = (choose_questions(problems(), n, seed) for n, seed in ((4, 0), (8, 0), (4, 1)))
    assert few == more[:4] and len({one.id for one in more}) == 8 and few != other
    assert choose_questions(problems(), None, 0) == problems()
    write_records(tmp_path / "all.jsonl", problems())
    for config, asked in ((CONFIG.model_copy(update={"questions": 4}), few), (ExpertIterationConfig(), problems())):
        run = SimpleNamespace(config=config, seed=0, train=tmp_path / "all.jsonl", validation=tmp_path / "all.jsonl")
        assert read_data(run) == (asked, problems())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"grpo.questions: 21 are asked for, but the task has 20"):
        choose_questions(problems(), 21, 0)


def trained(arm: str, task: Task, seed: int, model: Any, tokenizer: Any, folder: Path) -> Run:
    """A run of GRPO on twenty problems by the reward of a control's arm, judged by the task on a hundred others."""
    reward = CONTROLS[arm]["reward"] if arm in CONTROLS else None
    policy, score = copy.deepcopy(model), score_of(task, "plain", reward, seed)
    engine = TransformersEngine(policy, tokenizer)

    def ends() -> np.ndarray[Any, Any]:
        judged = Sampler(engine, tokenizer, FORMAT, score_of(task, "plain"))
        groups = evaluate(judged, problems(100), SamplingParams(1.0, 1.0, max_tokens=6), seed)
        return np.array([group[0].rewards["answer_reward"] for group in groups])

    before = ends()
    folder.mkdir(parents=True)
    setup = RunSetup(CONFIG, seed, problems(), FORMAT, score, task)
    learner = Learner(policy, CONFIG, tokenizer.pad_token_id)
    log = RunLog(folder, NoMlflow())  # type: ignore[arg-type]
    sampler = Sampler(engine, tokenizer, FORMAT, score)
    train_grpo(RunContext(setup, sampler, learner, log, never_saved(folder), lambda step, updates: False))
    return run(arm, [before, ends()], seed, "controls")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "shows", "first"),
    [*((FormPays(), ("same",), 3 * i) for i in range(10)), *((MorePays(), ("higher", "open"), 3 * i) for i in range(3))],
)
def test_where_form_alone_pays_it_is_called_so(
    task: Task, shows: tuple[str, ...], first: int, model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study of three seeds on a tiny model; where more than form pays, form is not called enough.

    It stays open where a run that learns the form alone happens to learn an answer with the letter that pays.
    """
    study = changed(controls_study(tmp_path, monkeypatch), controls=["format_only", "random_reward"])
    made = {
        arm: [trained(arm, task, seed, model, tokenizer, tmp_path / arm / str(seed)) for seed in range(first, first + 3)]
        for arm in ("full_reward", "format_only", "random_reward")
    }
    found = beyond_controls(study, {"controls": ExperimentRuns("controls", made)}, ("", ""))
    form, chance = (of["shows"] for of in found["beyond"])
    assert found["gains"] and form in shows and chance == "higher"


def controls_study(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A study whose ten validation problems are judged by all runs, and answered zero-shot under two prompts."""
    monkeypatch.chdir(folder)
    write_records(paths.validation("main"), problems(100))
    write_json(paths.BASELINE_METRICS, {name: {"accuracy": {"value": of}} for name, of in (("r1_zero", 0.1), ("plain", 0.3))})
    write_text(
        paths.BASELINE / "plain.jsonl",
        "".join(json.dumps({"problem": f"p/{i}", "answer_reward": float(i < 30)}) + "\n" for i in range(100)),
    )
    arms = {"full_reward": {}, "format_only": {}, "random_reward": {}}
    study = changed(study_of(study_named("mini"), controls=arms), controls=["format_only", "random_reward", "best_prompt"])
    return changed(study, evaluation={"zero_shot_prompts": ["r1_zero", "plain"]})


@pytest.mark.parametrize(("form", "shows"), [(0.59, "same"), (0.2, "higher"), (0.8, "lower"), (0.55, "open")])
def test_what_is_beyond_form_and_best_prompt(form: float, shows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = controls_study(tmp_path, monkeypatch)
    arms = {"full_reward": 0.6, "format_only": form, "random_reward": 0.1}
    made = {arm: [run(arm, [0.1, end], seed, "controls") for seed in (0, 1, 2)] for arm, end in arms.items()}
    found = beyond_controls(study, {"controls": ExperimentRuns("controls", made)}, ("", ""))
    assert [*label_arms(study, made).values()] == ["the full reward", "the form's reward alone", "a random reward"]
    by_name = {of["control"]: of for of in found["beyond"]}
    assert (found["start"], found["value"], found["gains"]) == (pytest.approx(0.1), pytest.approx(0.6), True)
    assert by_name["format_only"]["shows"] == shows and by_name["format_only"]["value"] == pytest.approx(0.6 - form)
    best = by_name["best_prompt"]  # of the base of the first seed: 30 of 100 under the better of its prompts
    assert "of the first base under its best prompt, plain" in best["what"]
    assert (best["at"], best["value"]) == (pytest.approx(0.3), pytest.approx(0.3))
    judged = {arm: [replace(one, selection_problems=20) for one in runs] for arm, runs in made.items()}
    best = beyond_controls(study, {"controls": ExperimentRuns("controls", judged)}, ("", ""))["beyond"][-1]
    assert (best["at"], best["value"]) == (pytest.approx(10 / 80), pytest.approx(30 / 80))  # 10 and 40 of the other 80
    assert f"Beyond the form's reward alone ({form:.3f}): {0.6 - form:.3f} (" in render("beyond.md.j2", controls=found)
    write_text(paths.BASELINE / "plain.jsonl", json.dumps({"problem": "p/3", "answer_reward": 0.0}) + "\n")
    only = changed(study, controls=["best_prompt"])
    found = beyond_controls(only, {"own": ExperimentRuns("own", {"a": judged["full_reward"]})}, ("own", "a"))
    assert (found["experiment"], found["arm"], found["beyond"]) == ("own", "a", []), "no problem that judges was answered"
    nothing = {arm: [run(arm, [0.6, 0.6], seed, "controls") for seed in (0, 1)] for arm in arms}
    none = beyond_controls(study, {"controls": ExperimentRuns("controls", nothing)}, ("", ""))
    assert render("beyond.md.j2", controls=none).strip().endswith("no gain to explain.")
