"""The summary's sentences, the best configuration, a study's cost, and the command that makes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from report_parts import arm_result, collapse, interval, record, result, run, seeds

from grpo.reporting import answer
from grpo.results.findings import ExperimentResult, Verdict
from grpo.results.runs import Run
from grpo.study.schema import Study

UP = [0.1, 0.4, 0.7, 0.8]
Experiments = dict[str, tuple[list[Run], ExperimentResult]]


def of_experiment(name: str, runs: list[Run], of: ExperimentResult) -> tuple[list[Run], ExperimentResult]:
    return [replace(one, experiment=name) for one in runs], replace(of, experiment=name)


def verdict(name: Any, by_construction: bool = False) -> Verdict:
    return Verdict("id", "grpo_learning_rate", "s", name, "why", by_construction=by_construction)


@pytest.fixture
def said(mini_study: Study) -> Any:
    bare = {prompt: {"accuracy": interval(0.97)} for prompt in ("r1_zero", "question_only")}
    return lambda found, *verdicts: "\n".join(answer.sentences(record(mini_study, found, *verdicts, baseline=bare)))


def one_arm(name: str = "grpo_kl_divergence", rewards: list[float] = UP, **columns: Any) -> Experiments:
    of = result(arm_result("a", rewards[-1], start=rewards[0]))
    return {name: of_experiment(name, seeds("a", rewards, **columns), of)}


def test_reward_form_answer_given_the_form_length_and_the_bare_question(said: Any) -> None:
    text = said(one_arm(forms=[0.2, 0.5, 0.9, 1.0], validation={"val/response_length": [9.0, 15.0, 25.0, 29.0]}))
    assert text.startswith(
        "In 24 steps GRPO raised the validation answer reward from 0.100 to 0.800 (0.750 to 0.850), by 0.700"
    )
    assert "form was right in 0.200 of its responses before and 1.000 after training; given the form, the answer was" in text
    assert "right in 0.500 and 0.800; responses had 9.0 tokens before and 29.0 after." in text
    assert "Under the prompt question_only, the untrained model is right in 0.970 (0.920 to 1.020) of the problems." in text
    assert "winners" not in text and "No two configurations were compared." in text and "None of 2 runs collapsed." in text


@pytest.mark.parametrize(
    ("rewards", "expected", "wrong"),
    [
        ([0.14, 0.3, 0.14], "did not measurably change the validation answer reward: 0.140 before", "raised"),
        ([0.14, 0.3, 0.13], "did not measurably change the validation answer reward: 0.140 before", "lowered"),  # one problem
        ([0.98, 0.9, 0.5], "lowered the validation answer reward from 0.980 to 0.500", "raised"),
        ([0.0, 0.0, 0.0], "No answer was right in any run of", "0.000"),
    ],
)
def test_no_gain_is_no_lift(said: Any, rewards: list[float], expected: str, wrong: str) -> None:
    text = said(one_arm(rewards=rewards))
    assert expected in text and wrong not in text


def test_the_largest_choice_is_not_a_gap_to_an_arm_that_collapsed(said: Any) -> None:
    runs = seeds("a", UP) + seeds("b", [0.1, 0.4, 0.6, 0.6]) + [run("c", [0.1, 0.6, 0.0, 0.0], s, diverged=24) for s in (0, 1)]
    fallen = collapse("c", 0, "divergence"), collapse("c", 1, "divergence")
    arms = arm_result("a", 0.8), arm_result("b", 0.6, (0.2, 0.1, 0.3)), arm_result("c", 0.0, (0.8, 0.7, 0.9), *fallen)
    text = said({"grpo_learning_rate": (runs, result(*arms))})
    assert "difference between arms with stable runs is in Learning rate: a ends 0.200 (0.100 to 0.300) above b." in text
    assert "Of 6 runs 2 collapsed: grpo_learning_rate/c (2 of 2)." in text
    text = said({"grpo_learning_rate": (runs[:2] + runs[4:], result(arms[0], arms[2]))})
    assert "No difference between arms with stable runs is significant." in text


def test_what_training_lowered_is_said(said: Any) -> None:
    runs = seeds("a", UP) + seeds("b", [0.98, 0.9, 0.6, 0.6])
    of = result(arm_result("a", 0.8), arm_result("b", 0.6, (0.2, 0.1, 0.3), start=0.98))
    text = said({"grpo_prompt_ablation": of_experiment("grpo_prompt_ablation", runs, of)})
    assert "Training lowered the answer reward in b of Prompt ablation (GRPO), from 0.980 to 0.600, by 0.380 (" in text
    assert "Training lowered" not in said(one_arm())


def test_comparisons_that_stay_open_and_claims_by_verdict(said: Any) -> None:
    runs = seeds("a", UP) + seeds("b", [*UP[:-1], 0.78])
    found = {"grpo_learning_rate": (runs, result(arm_result("a", 0.8), arm_result("b", 0.78, (0.02, -0.1, 0.1)), tied=("b",)))}
    verdicts = [verdict(name) for name in ("agrees", "agrees", "disagrees", "no difference", "cannot tell", "not tested here")]
    text = said(found, *verdicts, verdict("not tested here", by_construction=True))
    assert "In 1 of 1 comparisons the leading arm cannot be told from another: Learning rate." in text
    assert (
        "Of 5 published claims that were tested here, 2 agree and 1 disagrees with the runs, 1 shows no difference within the "
        "claim's margin, and 1 stays undecided; 2 more are not tested here (1 of them true by "
        "construction)."
    ) in text
    assert "No published claim was tested here." in said(found, verdict("not tested here"))


def test_the_best_is_a_grpo_winner_whose_runs_held(mini_study: Study) -> None:
    fallen = result(arm_result("a", 0.95, None, collapse("a")))
    found = one_arm("grpo_learning_rate") | one_arm("sft_experiment", [0.1, 0.9])
    found |= {"leaderboard": of_experiment("leaderboard", seeds("a", [0.1, 0.95]), fallen)}
    top = answer.best(record(mini_study, found))
    assert (top["numbers"]["experiment"], top["arm"]["arm"], top["of"]) == ("grpo_learning_rate", "a", 1)


def test_a_run_from_a_fine_tuned_model_is_no_gain_of_grpo_alone(mini_study: Study) -> None:
    found = one_arm("grpo_learning_rate", [0.1, 0.8]) | one_arm("grpo_sft_initialization", [0.6, 0.9])
    start = {"value": "sft_experiment/all/last", "from": "arm a"}
    tuned = [replace(one, config={"config": {"start_from": start}}) for one in found["grpo_sft_initialization"][0]]
    found["grpo_sft_initialization"] = (tuned, found["grpo_sft_initialization"][1])
    top = answer.best(record(mini_study, found))
    assert (top["numbers"]["experiment"], top["of"], top["only_from_base"]) == ("grpo_learning_rate", 1, True)
    del found["grpo_learning_rate"]  # where every winner starts from one, the best of them stands
    assert answer.best(record(mini_study, found))["numbers"]["experiment"] == "grpo_sft_initialization"


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([("00:00", "00:10"), ("00:20", "00:25")], 15 * 60),  # apart
        ([("00:00", "00:10"), ("00:05", "00:12")], 12 * 60),  # side by side
        ([("00:05", "00:06"), ("00:00", "00:10")], 10 * 60),  # one within the other
    ],
)
def test_wall_time_counts_runs_side_by_side_once(spans: list[tuple[str, str]], seconds: float) -> None:
    day = "2026-01-01T{}:00+00:00"
    assert answer.wall_seconds([(day.format(first), day.format(last)) for first, last in spans]) == seconds


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("studies/mine.yaml", "grpo study use mine && make repro"),
        (None, "grpo study use mine && make repro"),
        ("lab/mine.yaml", "grpo study use lab/mine.yaml && make repro"),
    ],
)
def test_the_command_names_a_study_where_it_lies(mini_study: Study, file: str | None, command: str) -> None:
    assert answer.command(mini_study.model_copy(update={"study": "mine", "file": file}), by_dvc=True) == command
