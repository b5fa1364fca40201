"""The write-up: labels of arms, numbers and tables, results in a line, cost by hand, and a stranger's texts in their cells."""

from __future__ import annotations

import json
import re
from typing import Any

import pandas as pd
import pytest
from markdown_it import MarkdownIt

from grpo.reporting.labels import arm_labels, bounded, decimals, interval, plain, scientific, table
from grpo.reporting.writeup import cost, left_out, measured, outcome, wall_seconds, writeup_of
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import Experiment

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
        ({"a": {}, "b": {"advantage": "mine:ranks"}}, ["no advantage", "advantage `mine:ranks`"]),
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


def test_numbers_and_tables() -> None:
    assert [scientific(value) for value in (3e-4, 0.0123456, 1.0)] == ["3e-4", "1.23e-2", "1e0"]
    assert interval({"value": 0.7, "low": 0.65, "high": 0.75}) == "0.700 (0.650 to 0.750)"
    assert interval({"value": 0.5, "low": 0.5, "high": 0.5}) == "0.500" and interval(None) == ""
    assert decimals(-0.0001) == "0.000" and decimals(None) == "" and decimals(20.04, 1) == "20.0"
    assert table([{"a": "x|y", "b": 1}]) == "| a | b |\n| --- | --- |\n| x\\|y | 1 |\n"
    assert table([]) == ""


HOSTILE = "| x | `</td><script>alert(1)</script>\n\n# no heading\n\n![p](http://x)"
MACHINE = {"processor": "CPU", "cores": 2, "memory_gib": 24, "gpus": []}


def experiment(winner: str, leader: str, **lows: float | None) -> dict[str, Any]:
    """Arms that end at .8, .7, ...; of each but the leader the lower end of its distance to the leader."""
    arms = [
        {"arm": name, "label": name, "value": value, "low": value - 0.05, "high": value + 0.05, "chosen": name != "c"}
        | {"start": 0.1, "same_as": None, "runs": [f"e/{name}/0"], "learning_rate": 1e-3, "overrides": {name: HOSTILE}}
        | dict.fromkeys(("format", "given_form", "length"), 0.5)
        | {"at_start": dict.fromkeys(("format", "given_form", "length"), 0.5)}
        | {"below": None if low is None else {"value": 0.1, "low": low, "high": 0.2 - low}}
        for (name, low), value in zip(lows.items(), (0.8, 0.7, 0.6), strict=False)
    ]
    return {"winner": winner, "leader": leader, "arms": arms}


ON_OTHER_PROBLEMS = experiment("a", "a", a=None, b=0.0)  # the leader on the problems that select is lower on those that judge
ON_OTHER_PROBLEMS["arms"][1]["below"] = {"value": -0.2, "low": -0.3, "high": -0.1}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (experiment("a", "a", a=None, b=-0.1), "a ends at 0.800 (0.750 to 0.850); open against b"),
        (experiment("a", "a", a=None, b=0.06, c=-0.1), "a ends at 0.800 (0.750 to 0.850), all others lower"),  # c: a rate
        (experiment("b", "a", a=None, b=-0.1), "b ends at 0.700 (0.650 to 0.750); a, at 0.800, may be higher"),
        (experiment("b", "a", a=None, b=0.1), "b ends at 0.700 (0.650 to 0.750); a, at 0.800, is higher"),
        (ON_OTHER_PROBLEMS, "a ends at 0.800 (0.750 to 0.850); below b"),
        (experiment("a", "a", a=None), "a ends at 0.800 (0.750 to 0.850)"),
    ],
)
def test_an_experiments_result_is_a_line(entry: dict[str, Any], said: str) -> None:
    assert outcome(entry) == said


@pytest.mark.parametrize(("only", "said"), [(["grpo_lora"], True), (["grpo_lora", "own"], False), (["own"], False)])
def test_a_study_of_ones_own_leaves_out_only_what_it_would_have(mini_study: Study, only: list[str], said: bool) -> None:
    """Of the handouts' experiments none is missed where a study has one of its own."""
    own = {name: Experiment(title=name, arms={"a": {}}) for name in ("own", "other")}
    entries = {
        name: of if name in only else of.model_copy(update={"arms": {}}) for name, of in (mini_study.experiments | own).items()
    }
    titles = left_out(mini_study.model_copy(update={"experiments": entries}))
    assert titles[-1] == "other" and ("Learning rate" in titles) == said == (len(titles) > 1)


def test_texts_are_bounded_and_end_no_title() -> None:
    """A claim shows the interval that decides, or its measurement; none beside "not tested"."""
    interval = {"value": 0.5, "low": 0.4, "high": 0.6}
    claim = {"interval": interval, "quantity": "difference", "measured": "long", "verdict": "open"}
    assert measured(claim) == "difference 0.500 (0.400 to 0.600)" and measured(claim | {"verdict": "not tested"}) == ""
    assert measured(claim | {"interval": None, "measured": "a " * 40}) == "a " * 24 + "a…"
    assert bounded("a\n\n b", 10) == "a b" and bounded("abcdef", 4) == "abc…"
    assert not set('"`<>[]|\\') & set(plain(HOSTILE + '"\\]'))


def timing(**columns: Any) -> pd.DataFrame:
    rows = {
        "run": ["e/a/0", "e/a/1", "f/a/0"],
        "experiment": ["e", "e", "f"],
        "arm": "a",
        "same_as": [None, None, "e/a/0"],
        "alone": [True, False, False],
        "steps": 10,
        "total_s": [60.0, 30.0, 60.0],
        "gpu_hours": [0.5, 0.25, 0.5],
        "started": ["2026-01-01T00:00:00+00:00", "2026-01-01T00:00:30+00:00", ""],
        "finished": ["2026-01-01T00:01:00+00:00", "2026-01-01T00:02:00+00:00", ""],
        "hardware": json.dumps(MACHINE),
        "software": json.dumps({"torch": "2"}),
        **{name: [0.5, None, None] for name in ("step_s", "step_rollout_s", "step_scoring_s", "step_training_s")},
        **{name: [0.1, None, None] for name in ("step_synchronization_s", "step_loading_s", "step_waiting_s")},
        "step_generator_waiting_s": [0.0, None, None],
        "samples_per_s": [128.0, None, None],
        "label": "a",
    }
    return pd.DataFrame(rows | columns)


def test_a_copied_run_costs_nothing_and_overlapping_runs_count_once() -> None:
    said = cost(timing())
    assert said.startswith(
        "2 runs trained, 20 steps: 90 seconds of runs in 2.0 minutes of wall time, 0.75 GPU-hours, on CPU, 2 cores"
    )
    assert "GPU-hours" not in cost(timing(gpu_hours=0.0))
    assert wall_seconds([(0.0, 10.0), (5.0, 12.0), (20.0, 21.0)]) == 13.0


def a_record() -> dict[str, Any]:
    """A record with a stranger's text wherever one can stand."""
    sample = {"step": 0, "problem": HOSTILE, "ground_truth": HOSTILE, "response": HOSTILE, "reward": 1.0}
    claim = {
        "id": "c",
        "experiment": "e",
        "statement": HOSTILE,
        "verdict": "holds",
        "own": True,
        "kind": "beats",
        "by_design": HOSTILE,
    }
    claim |= {"interval": None, "quantity": "", "measured": HOSTILE, "reported": {"s": HOSTILE}}
    entry = experiment("a", "a", a=None, b=0.1)
    entry |= {"title": "E", "question": "Why?", "note": "", "reason": "leads", "builds_on": None}
    entry |= {"method": "grpo", "task": "other", "samples": [sample], "extra": {}}
    size = {"problems": 4, "digest": "d"}
    return {
        "study": "s",
        "description": "d",
        "seeds": [0, 1],
        "metric": "answer reward",
        "by_design": ["planted"],
        "headline": experiment("a", "a", a=None)["arms"][0] | {"experiment": "e", "start": 0.1, "runs": 2, "problems": 4},
        "baseline": {"r1_zero": {"examples": {"format 0, answer 0": [sample]}}},
        "best_of_n": {},
        "model": HOSTILE,
        "experiments": {"e": entry},
        "claims": [claim],
        "sources": {"s": HOSTILE},
        "problems": {"last": 8, "selection": 4},
        "dataset": {"main": {"task": "t", "train": size, "validation": size, "dropped_from_train_as_overlap": ["p"]}},
        "sft": None,
    }


@pytest.mark.usefixtures("workdir")
def test_texts_of_strangers_stay_in_their_cells(mini_study: Study) -> None:
    paths.TABLES.mkdir(parents=True)
    for name in ("e", "zero_shot", "settings"):
        (paths.TABLES / f"{name}.md").write_text("| arm |\n|---|\n| a |\n")
    comments = {"e": "# loud\n\ncomment"}
    study = mini_study.model_copy(update={"kissing_number": None})
    text = writeup_of(study, a_record(), timing(), comments)
    tokens = MarkdownIt("commonmark", {"html": False}).enable("table").parse(text)
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open" and token.level == 0]
    assert not [heading for heading in headings if "no heading" in heading or "loud" in heading]
    assert not [child for token in tokens for child in token.children or () if child.type in ("image", "html_inline")]
    rows = [line for line in text.splitlines() if line.startswith("| holds | own: [")]
    assert len(rows) == 1 and len(re.findall(r"(?<!\\)\|", rows[0])) == 6  # the claim has five cells
    assert "> # loud" in text and "planted" in text
    record = a_record()
    ends = {"interval": {"value": 0.1, "low": 0.06, "high": 0.2}, "studies": 3, "seeds": 15}
    record["claims"][0]["together"] = {"verdict": "holds", **ends}
    text = writeup_of(study, record, timing(), comments)
    (head,), (row,) = (re.findall(of, text, re.MULTILINE) for of in (r"^\| verdict \| claim.*$", r"^\| holds \| own: \[.*$"))
    cells = [re.split(r"(?<!\\)\|", line) for line in (head, row)]
    assert len(cells[0]) == len(cells[1]) == 8 and cells[0][4] == " 3 studies together "
    assert cells[1][4] == " holds: 0.100 (0.060 to 0.200), 15 seeds "
