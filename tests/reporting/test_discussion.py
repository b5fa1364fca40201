"""Sentences on an experiment, on made-up numbers that decide them."""

from __future__ import annotations

import pytest
from report_parts import PROBLEMS, arm_result, collapse, result, run, seeds

from grpo.reporting.answers.ablations import asked_of_courses
from grpo.reporting.discussion import as_plain, numbers_of, result_paragraphs
from grpo.results.findings import ExperimentResult
from grpo.results.runs import Run
from grpo.study.schema import Study

UP = [0.1, 0.4, 0.7, 0.8]
SURE = "(95% interval over runs and problems, 2 seeds per arm)."


def said(study: Study, runs: list[Run], of: ExperimentResult, with_courses: bool = False) -> list[str]:
    return result_paragraphs(numbers_of(study, runs, of), with_courses)


def test_a_clear_leader_with_its_distance_to_the_next(mini_study: Study) -> None:
    runs = seeds("a", UP) + seeds("b", [0.1, 0.2, 0.3, 0.3]) + seeds("c", [0.1, 0.2, 0.3, 0.4])
    arms = arm_result("a", 0.8), arm_result("b", 0.3, (0.5, 0.4, 0.6)), arm_result("c", 0.4, (0.4, 0.3, 0.5))
    assert said(mini_study, runs, result(*arms))[0] == (
        "Of 3 arms, which differ in learning_rate, a ends highest after 24 steps, at a validation answer reward of 0.800 "
        f"(0.750 to 0.850), 0.400 (0.300 to 0.500) above c, the next {SURE}"
    )


def test_arms_that_cannot_be_told_apart(mini_study: Study) -> None:
    runs = seeds("a", UP) + seeds("b", [*UP[:-1], 0.79]) + seeds("c", [*UP[:-1], 0.78])
    arms = arm_result("a", 0.8), arm_result("b", 0.78, (0.02, -0.03, 0.07)), arm_result("c", 0.79, (0.01, -0.04, 0.06))
    (lead, *_) = said(mini_study, runs, result(*arms, tied=("b", "c")))
    assert (
        ", but these runs cannot tell it from c and b: the difference from the nearest of them, 0.010 (-0.040 to 0.060), may"
        in lead
    )
    assert "the next" not in lead
    (lead, *_) = said(mini_study, runs[:4], result(*arms[:2], tied=("b",)))
    assert "cannot tell it from b: the difference from it, 0.020 (-0.030 to 0.070), may be zero" in lead


def test_the_leader_is_not_compared_with_an_arm_that_collapsed(mini_study: Study) -> None:
    """Even if its run without a collapse ends above the next arm."""
    runs = [*seeds("a", UP), run("b", UP), run("b", [0.1, 0.7, 0.2, 0.1], 1), *seeds("c", [0.1, 0.2, 0.3, 0.4])]
    fallen = collapse("b", 1, "training rewards", step=3, reached=0.594, ended=0.0)
    arms = arm_result("a", 0.8), arm_result("b", 0.7, (0.1, 0.05, 0.15), fallen), arm_result("c", 0.4, (0.4, 0.3, 0.5))
    lead, *more = said(mini_study, runs, result(*arms))
    assert "0.400 (0.300 to 0.500) above c, the next; b collapsed in 1 of 2 runs (" in lead
    assert "grpo_learning_rate/b/1 collapsed: its training rewards reached 0.594 at step 3 and ended at 0.000." in more
    stopped = arm_result("b", 0.7, (0.1, 0.05, 0.15), collapse("b", 1, "divergence", step=24, reached=0.7, ended=0.1))
    more = said(mini_study, runs, result(arms[0], stopped, arms[2]))
    assert "grpo_learning_rate/b/1 diverged and was stopped at step 24: it had reached 0.700 and stood at 0.100." in more


def test_where_every_arm_collapsed_none_is_better(mini_study: Study) -> None:
    runs = [run("a", [0.1, 0.7, 0.1]), run("b", [0.1, 0.6, 0.1])]
    arms = (
        arm_result("a", 0.1, None, collapse("a"), seeds=1),
        arm_result("b", 0.1, (0.0, -0.1, 0.1), collapse("b"), seeds=1),
    )
    (lead, *_) = said(mini_study, runs, result(*arms))
    assert lead == "a collapsed in 1 of 1 run, b collapsed in 1 of 1 run within 16 steps, so the best arm is not decided."
    (lead, *_) = said(mini_study, runs[:1], result(arms[0]))
    assert lead.endswith("so there is no meaningful final reward.")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.1, 0.5, 0.9], "raised the validation answer reward from 0.100 to 0.900 (0.850 to 0.950), by 0.800"),
        ([0.9, 0.5, 0.1], "lowered the validation answer reward from 0.900 to 0.100 (0.050 to 0.150), by 0.800 ("),
        (
            [0.14, 0.2, 0.14],
            "did not measurably change the validation answer reward: 0.140 before and 0.140 (0.090 to 0.190) after",
        ),
    ],
)
def test_one_arm_is_measured_by_its_start(mini_study: Study, rewards: list[float], expected: str) -> None:
    (lead, *_) = said(mini_study, seeds("a", rewards), result(arm_result("a", rewards[-1], start=rewards[0])))
    assert lead.startswith(f"In 16 steps GRPO (a) {expected}") and "other arm" not in lead and "above" not in lead


def test_where_nothing_is_right_nothing_is_compared(mini_study: Study) -> None:
    runs = seeds("a", [0.0] * 3) + seeds("b", [0.0] * 3)
    texts = said(
        mini_study, runs, result(arm_result("a", 0.0, start=0.0), arm_result("b", 0.0, (0.0, 0.0, 0.0), start=0.0), tied=("b",))
    )
    assert texts == [
        "No answer was right in any run, before training or at an evaluation of 16 steps, so this experiment compares nothing."
    ]


def test_arms_with_identical_results(mini_study: Study) -> None:
    runs = seeds("a", UP) + seeds("b", UP)
    alike = result(arm_result("a", 0.8), arm_result("b", 0.8, (0.0, 0.0, 0.0)), tied=("b",))
    assert said(mini_study, runs, alike)[0].startswith(
        "a and b have identical results, so learning_rate had no effect: all end at"
    )


def test_a_loss_is_said_and_an_arm_that_stayed(mini_study: Study) -> None:
    runs = seeds("a", UP) + seeds("b", [0.98, 0.6, 0.5]) + seeds("c", [0.1, 0.1, 0.1])
    arms = arm_result("a", 0.8), arm_result("b", 0.5, (0.3, 0.2, 0.4), start=0.98), arm_result("c", 0.1, (0.7, 0.6, 0.8))
    _, *more = said(mini_study, runs, result(*arms))
    assert more[0].startswith("Training lowered the validation answer reward from 0.980 to 0.500 (0.450 to 0.550), by 0.480 (")
    assert more[0].endswith(") in b.") and more[1].startswith("Training did not measurably change")
    assert not any("in a." in text for text in more)


def test_reward_is_taken_apart_into_form_and_answer_given_the_form(mini_study: Study) -> None:
    runs = seeds("a", [0.06, 0.3, 0.72], forms=[0.08, 0.5, 0.9], validation={"val/response_length": [9.0, 20.0, 29.0]})
    (_, text) = said(mini_study, runs, result(arm_result("a", 0.72, start=0.06)))
    assert text == (
        "In a the form was right in 0.080 of the responses before and 0.900 after training, the answer given the form in "
        "0.750 and 0.800; the responses had 9.0 tokens before and 29.0 after."
    )


def test_curves_name_steps_and_group_arms_with_equal_curves(mini_study: Study) -> None:
    entropy = {"validation": {"val/token_entropy": [0.8, 0.4, 0.1, 0.1]}}
    runs = seeds("a", UP, **entropy) + seeds("b", [*UP[:-1], 0.7], **entropy)
    of = result(arm_result("a", 0.8), arm_result("b", 0.7, (0.1, 0.05, 0.15)))
    (text,) = [text for text in said(mini_study, runs, of, with_courses=True) if text.startswith("Token entropy")]
    assert text == (
        "Token entropy (nats) falls from 0.800 to 0.100 by step 16, then stays at 0.100 in a and b; response length "
        "(tokens) stays at 20.0 in a and b. The gradient norm stays at 0.25 in a and b."
    )


def test_each_question_on_courses_is_asked_of_one_experiment(mini_study: Study) -> None:
    asked = asked_of_courses(mini_study)
    assert asked["grpo_learning_rate"] == "grpo_learning_rate" and "grpo_kl_divergence" not in asked
    assert len(set(asked.values())) == len(asked)
    again = mini_study.experiments["grpo_learning_rate"]
    more = mini_study.model_copy(update={"experiments": mini_study.experiments | {"again": again}})
    assert asked_of_courses(more) == asked


def test_ratios_are_given_for_arms_whose_policy_moved(mini_study: Study) -> None:
    moved = {"ratio_max": [1.0, 3.0, 2.0], "ratio_min": [1.0, 0.25, 0.5], "clip_fraction": [0.0, 0.04, 0.02]}
    runs = seeds("a", UP) + seeds("b", [*UP[:-1], 0.7], **moved)
    texts = said(mini_study, runs, result(arm_result("a", 0.8), arm_result("b", 0.7, (0.1, 0.05, 0.15))))
    assert texts[-1].endswith("the share of tokens clipped: b 0.25 to 3, 2%.")


def test_numbers_are_plain_values_for_a_file(mini_study: Study) -> None:
    runs = seeds("a", [0.06, 0.3, 0.72], forms=[0.08, 0.5, 0.9])
    plain = as_plain(numbers_of(mini_study, runs, result(arm_result("a", 0.72, start=0.06))))
    assert plain["leader"]["final"]["value"] == 0.72 and plain["leader"]["after"]["within"] == pytest.approx(0.8)
    assert plain["problems"] == PROBLEMS and "held" not in plain["leader"]
