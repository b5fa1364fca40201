"""The write-up and the page: labels of arms, numbers, tables, cost, comments; a stranger's texts stay text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from study_parts import EXPERIMENTS, ROOT

from grpo.common.errors import UserError
from grpo.reporting import page
from grpo.reporting.comments import COMMENTS, QUESTIONS, read_comments
from grpo.reporting.labels import arm_labels, bounded, decimals, interval, plain, scientific, table
from grpo.reporting.page import Body, embedded, number
from grpo.reporting.tables import experiment_table
from grpo.reporting.writeup import cost, left_out, measured, outcome, read_timing_table, wall_seconds, writeup_of
from grpo.study import paths
from grpo.study.config import Experiment
from grpo.study.schema import Study

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
        ({"a": {"n_grpo_steps": 8}, "b": {"n_grpo_steps": 16}}, ["8 steps", "16 steps"]),
        ({"a": {"keep_steps": [1]}, "b": {}}, ["a", "b"]),  # it changes no reward
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
        (experiment("a", "a", a=None, b=0.06, c=-0.1), "a ends at 0.800 (0.750 to 0.850), all others lower"),  # c: a rate
        (experiment("b", "a", a=None, b=0.1), "b ends at 0.700 (0.650 to 0.750); a, at 0.800, is higher"),
        (experiment("b", "a", a=None, b=0.0), "b ends at 0.700 (0.650 to 0.750); a, at 0.800, may be higher"),
        (experiment("a", "a", a=None, b=0.0), "a ends at 0.800 (0.750 to 0.850); open against b"),
        (experiment("a", "a", a=None), "a ends at 0.800 (0.750 to 0.850)"),  # no others
        (ON_OTHER_PROBLEMS, "a ends at 0.800 (0.750 to 0.850); below b"),
    ],
)
def test_an_experiments_result_is_a_line(entry: dict[str, Any], said: str) -> None:
    assert outcome(entry) == said


@pytest.mark.parametrize(("highest", "said"), [(0.8, "leads"), (0.9, "leads on the problems that choose")])
def test_a_table_says_by_which_problems_its_leader_leads(highest: float, said: str) -> None:
    """The highest arm of the table may be another one, as other problems judge."""
    entry = experiment("a", "a", a=None, b=0.06)
    for arm in entry["arms"]:
        arm |= {"improvement": 0.5, "collapsed": []}
    entry["arms"][1]["value"] = highest - (highest == 0.8) * 0.1
    rows = experiment_table(entry, "reward").splitlines()
    assert rows[0].split(" | ")[2] == "below the leader" and rows[2].split(" | ")[2] == said


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


def test_a_copied_run_costs_nothing_and_overlapping_runs_count_once() -> None:
    columns = {
        "same_as": [None, None, "e/a/0"],
        "steps": 10,
        "total_s": [60.0, 30.0, 60.0],
        "gpu_hours": [0.5, 0.25, 0.5],
        "started": ["2026-01-01T00:00:00+00:00", "2026-01-01T00:00:30+00:00", ""],
        "finished": ["2026-01-01T00:01:00+00:00", "2026-01-01T00:02:00+00:00", ""],
        "hardware": json.dumps({"processor": "CPU", "cores": 2, "memory_gib": 24, "gpus": []}),
    }
    said = cost(pd.DataFrame(columns))
    assert said.startswith(
        "2 runs trained, 20 steps: 90 seconds of runs in 2.0 minutes of wall time, 0.75 GPU-hours, on CPU, 2 cores"
    )
    assert "GPU-hours" not in cost(pd.DataFrame(columns | {"gpu_hours": 0.0}))
    assert wall_seconds([(0.0, 10.0), (5.0, 12.0), (20.0, 21.0)]) == 13.0


# Where a stranger's text can stand in a record: of models and their answers, of problems, and of claims.
STRANGERS = {"problem", "ground_truth", "response", "statement", "measured", "by_design", "model", "reported", "sources"}


def hostile(value: Any, key: str = "") -> Any:
    """A record with such a text wherever one can stand."""
    if isinstance(value, dict):
        return {name: hostile(of, key if key in STRANGERS else name) for name, of in value.items()}
    if isinstance(value, list):
        return [hostile(of, key) for of in value]
    return HOSTILE if key in STRANGERS and isinstance(value, str) else value


def test_texts_of_strangers_stay_in_their_cells(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    record = hostile(json.loads(paths.RECORD.read_text()))
    record |= {"claims": [claim | {"own": True} for claim in record["claims"]], "by_design": ["planted"]}
    text = writeup_of(mini_study, record, read_timing_table(), {"grpo_baselines": "# loud\n\ncomment"})
    tokens = MarkdownIt("commonmark", {"html": False}).enable("table").parse(text)
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open" and token.level == 0]
    assert not [heading for heading in headings if "no heading" in heading or "loud" in heading]
    within = [child for token in tokens for child in token.children or ()]
    assert not [child for child in within if child.type == "html_inline" or str(child.attrs.get("src", "")).startswith("http")]
    assert "> # loud" in text and "planted" in text
    head, *rows = re.findall(r"^\| (?:verdict \| claim|[a-z ]+ \| own: \[).*$", text, re.MULTILINE)
    cells = [re.split(r"(?<!\\)\|", line) for line in (head, *rows)]
    studies = 1 + len([*paths.REPLICATES.glob("*.csv")])
    assert len(rows) > 10 and {len(row) for row in cells} == {8} and cells[0][4] == f" {studies} studies together "
    joint = [row[4].strip() for row in cells[1:] if row[4].strip()]
    decided = sum(not verdict.startswith(("open", "not tested")) for verdict in joint)
    assert f" {studies} studies together decide {decided} of {len(joint)}. " in text


# --------------------------------------------------------------------------------------------------------------------- the page


@pytest.mark.parametrize(
    "hostile",
    [
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "![x](//evil.example/p)",
    ],
)
def test_what_a_stranger_wrote_stays_text(hostile: str) -> None:
    page = Body({}, ["e"]).of(f"# {hostile}\n\n## Experiments\n\n### {hostile}: {hostile}\n\n{hostile}\n\n> {hostile}\n")
    assert "<script" not in page and "<img" not in page and 'href="javascript' not in page
    assert "<" not in embedded({"response": hostile}) and json.loads(embedded({"response": hostile})) == {"response": hostile}


def test_numbers_keep_six_digits() -> None:
    values = [0.123456789, 24.0, float("nan"), float("inf"), None, 1234567.8]
    assert [number(value) for value in values] == [0.123457, 24, None, None, None, 1234570]


def test_samples_beyond_the_room_are_named_and_turns_of_episodes_are_kept(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt is stored once; a run is left out as a whole."""
    rewards = dict.fromkeys(("format_reward", "answer_reward", "reward", "token_entropy"), 1.0)
    turns = {"messages": [["assistant", "sh"], ["tool", "4"], ["assistant", "ort"]]}
    for run, response, more in (("e/a/0", "short", {}), ("e/b/0", "x" * 500, {}), ("e/c/0", "short", turns)):
        record = {"step": 0, "problem": "p", "prompt": "q" * 90, "response": response, "ground_truth": "1"} | rewards | more
        (workdir / "data/runs" / run).mkdir(parents=True)
        (workdir / "data/runs" / run / "rollouts.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.setattr(page, "MOST_SAMPLES", 200)
    found = page.browsable(["e/a/0", "e/b/0", "e/c/0"])
    assert found["prompts"] == ["q" * 90] and found["left_out"] == ["e/b/0"]
    assert found["problems"] == [("p", "1")]
    sample = {"problem": 0, "prompt": 0, "step": 0, "response": "short"} | rewards
    assert dict(zip(found["columns"], found["runs"]["e/c/0"][0], strict=True)) == sample | turns
    assert found["runs"]["e/a/0"] == [[*sample.values()]]


# --------------------------------------------------------------------------------------------------------------------- comments


def arm(name: str, below: float | None) -> dict[str, Any]:
    setting = name.partition("-")[0]
    return {"arm": name, "setting": setting, "chosen": True, "below": below and dict.fromkeys(("value", "low", "high"), below)}


RECORD = {"experiments": {"sweep": {"arms": [arm("low", 0.2), arm("high-rate_1", None)]}, "other": {"arms": []}}}


def write(text: str, name: str = "sweep", folder: Path = COMMENTS, study: str = "s") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(f"---\nstudy: {study}\n---\n{text}\n")


def read(study: str = "s", left_out: tuple[str, ...] = ()) -> dict[str, str]:
    made: Any = SimpleNamespace(study=study, folder="lab", left_out=left_out)
    return read_comments(made, RECORD)


@pytest.mark.usefixtures("workdir")
def test_a_study_shows_its_own_comments_only() -> None:
    write("default's")
    write("own", folder=Path("lab/comments"), study="mine")
    write("third", folder=COMMENTS / "third", study="third")  # beside the default study's, which stays
    comments = {study: [*read(study=study).values()] for study in ("s", "mine", "third")}
    assert comments == {"s": ["default's"], "mine": ["own"], "third": ["third"]}
    assert read(left_out=("sweep",)) == {}
    write("z", "swep")
    with pytest.raises(
        UserError, match=r"no experiment 'swep' in the study s. Rename it to one of: sweep, other, math_baseline"
    ):
        read()


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ('a\n\n{{ arm("lo") }}', 6, "no arm 'lo'; there are: low, high, high-rate_1"),
        ('{{ arm("low").mean }}', 4, "mean"),
        ('{{ arm("high").below | interval }}', 4, "no value with an interval here"),
        ("{{ arm( }}", 4, "unexpected"),
        ("{{ arm('low').update({}) }}", 4, "unsafe"),
        ("{{ arm.__globals__ }}", 4, "unsafe"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", 4, "recursion"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_mistake_is_one_message_with_its_line(body: str, line: int, message: str) -> None:
    write(body)
    with pytest.raises(UserError) as error:
        read()
    assert str(error.value).startswith(f"{COMMENTS}/sweep.md:{line}: ") and message in str(error.value), error.value


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize("text", ["no head", "---\nstudy: s\n", "---\nauthor: s\n---\n"])
def test_a_comment_without_a_head_is_refused(text: str) -> None:
    COMMENTS.mkdir(parents=True)
    (COMMENTS / "sweep.md").write_text(text)
    with pytest.raises(UserError, match=r"sweep.md:1: no head. Begin with"):
        read()


def test_the_handouts_questions_are_listed_by_the_names_of_comments() -> None:
    """Of every experiment that a handout asks for: all but our own."""
    asked = re.findall(r"^- `(\w+)`", Path(__file__).parents[2].joinpath("studies/questions.md").read_text(), re.M)
    assert {*asked} == {*EXPERIMENTS, *QUESTIONS} - {"grpo_lora", "kissing_number"} and len(asked) == len({*asked})
