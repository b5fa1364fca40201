"""Labels of arms say what the arms are; numbers and tables as Markdown."""

from __future__ import annotations

from typing import Any

import pytest

from grpo.reporting.labels import arm_labels, decimals, interval, scientific, table

GRPO = {"learning_rate": 3e-4, "epochs_per_rollout_batch": 1, "train_batch_size": 64, "loss_type": "grpo_clip", "prompt": "r1"}


def labels(method: str = "grpo", **arms: dict[str, Any]) -> list[str]:
    return list(arm_labels(method, {arm: GRPO | values for arm, values in arms.items()}).values())


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        ({"a": {"learning_rate": 1e-4}, "b": {}}, ["rate 1e-4", "rate 3e-4"]),
        (  # the loss goes with the updates, so that they are enough; equal arms of two experiments have one name
            {"on_policy": {"loss_type": "reinforce_with_baseline"}, "best_1": {"epochs_per_rollout_batch": 4}},
            ["1 epoch × 64", "4 epochs × 64"],
        ),
        (
            {"a": {"train_batch_size": 16}, "b": {"train_batch_size": 16, "loss_type": "grpo_no_clip"}, "c": {}},
            ["1 epoch × 16, GRPO-Clip", "1 epoch × 16, GRPO-No-Clip", "1 epoch × 64, GRPO-Clip"],
        ),
        (
            {"full": {}, "r-rate_2": {"lora": {"rank": 1}, "learning_rate": 6e-4}, "r": {"lora": {"rank": 1}}},
            ["all weights, rate 3e-4", "LoRA rank 1, rate 6e-4", "LoRA rank 1, rate 3e-4"],
        ),
        (
            {"a": {"start_from": "sft_experiment/all/step-8"}, "b": {"start_from": None}},
            ["after SFT (all, step 8)", "base model"],
        ),
        (
            {
                "a": {"asynchronous": {"max_policy_lag": 1, "replay_capacity": 1}},
                "b": {"asynchronous": {"max_policy_lag": 1, "replay_capacity": 4}},
            },
            ["lag 1", "lag 1, buffer of 4 batches"],
        ),
        ({"a": {"group_size": 4}, "b": {"group_size": 16}}, ["group size 4", "group size 16"]),
        ({"a": {}, "b": {"advantage": "mine:ranks"}}, ["the default advantage", "advantage `mine:ranks`"]),
        ({"a": {"overlong_buffer": None}, "b": {"overlong_buffer": 4}}, ["no overlong buffer", "overlong buffer 4"]),
        ({"plain": {}, "twin": {}}, ["plain", "twin"]),  # nothing differs: the names are all there is
        ({"alone": {}}, ["GRPO, 1 epoch × 64"]),
    ],
)
def test_an_arm_is_named_by_what_differs(arms: dict[str, dict[str, Any]], expected: list[str]) -> None:
    assert labels(**arms) == expected


def test_arms_of_other_methods() -> None:
    sft = {"a": {"examples": 128}, "b": {"examples": None}, "c": {"examples": None, "filtered": True}}
    assert labels("sft", **sft) == ["128 examples", "all examples", "correct examples"]
    rounds = {"ei_batch_size": 32, "group_size": 4, "epochs_per_ei_step": 1}
    found = labels("expert_iteration", a=rounds, b=rounds | {"epochs_per_ei_step": 2})
    assert found == ["32 questions × 4, 1 epoch", "32 questions × 4, 2 epochs"]


def test_no_two_arms_share_a_label() -> None:
    """Two differ from the third only, and a setting without a phrase may be long or hostile."""
    found = labels(a={"x": "<b>" + "y" * 99}, b={"x": "<b>" + "y" * 99}, c={"x": 1})
    assert len(set(found)) == 3 and all(len(label) < 70 for label in found)
    assert "`<b>" in found[0]  # as code


@pytest.mark.parametrize(("value", "text"), [(3e-4, "3e-4"), (1.8e-4, "1.8e-4"), (0.0123456, "1.23e-2"), (1.0, "1e0")])
def test_rates_as_people_write_them(value: float, text: str) -> None:
    assert scientific(value) == text


def test_numbers_and_tables() -> None:
    assert interval({"value": 0.7, "low": 0.65, "high": 0.75}) == "0.700 (0.650 to 0.750)"
    assert interval({"value": 0.5, "low": 0.5, "high": 0.5}) == "0.500" and interval(None) == ""
    assert decimals(-0.0001) == "0.000" and decimals(None) == "" and decimals(20.04, 1) == "20.0"
    assert table([{"a": "x|y", "b": 1}]) == "| a | b |\n| --- | --- |\n| x\\|y | 1 |\n"
    assert table([]) == ""
