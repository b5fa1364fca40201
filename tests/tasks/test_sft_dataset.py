"""Reasoning traces: generated ones, recomputed from their questions; files, accepted and refused; and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from grpo.common.errors import UserError
from grpo.common.records import Problem, read_examples
from grpo.study import paths
from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.formats import R1_ZERO
from grpo.tasks.sft_dataset import HubTraces, JsonlTraces, TaskTraces, build_sft_dataset, find_traces
from grpo.tasks.task import Format, ScoredBatch, Task

pytestmark = pytest.mark.usefixtures("workdir")  # the traces are in its traces.jsonl
TASK = Arithmetic(train_size=1000, validation_size=100, levels=4, seed=3)
TARGET = paths.sft_examples("main")


# ---------------------------------------------------------------------------------------------------------- the stage

QUESTION = "Mia has 3 apples. On Monday she buys 2. How many apples does Mia have?"
HELD_OUT = [Problem("v/0", QUESTION, "5"), Problem("v/1", "What is 2 + 2?", "4")]


def row(question: str, response: str, truth: Any) -> dict[str, Any]:
    return {"prompt": R1_ZERO.prompt(question), "response": response, "ground_truth": truth}


ROWS = [
    row("What is 1 + 1?", " 2 </think> <answer>2</answer>", "2"),
    row("What is 1 + 2?", r" 3 </think> <answer>\boxed{3}</answer>", 3),
    row("What is 1 + 3?", " 5 </think> <answer>5</answer>", "4"),
    row("What is 1 + 4?", " The answer is 5.", "5"),
    row("What is 1 + 5?", " 6 </think> <answer>6", "6"),
]


JSONL = JsonlTraces(source="jsonl", prompt="r1_zero", path="traces.jsonl")


def build(
    settings: TaskTraces | JsonlTraces | HubTraces = JSONL, task: Task = TASK, validation: Sequence[Problem] = HELD_OUT
) -> dict[str, Any]:
    traces = find_traces(task, settings, "sft_datasets.main")
    return build_sft_dataset(task, settings.source, settings.prompt, traces, validation, TARGET)


def write_rows(*lines: dict[str, Any] | str) -> None:
    Path("traces.jsonl").write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))


def test_a_file_of_traces_is_rewarded_and_reported() -> None:
    write_rows(*ROWS[:2], "", *ROWS[2:])
    report = build()
    examples = read_examples(TARGET)
    assert [(e.prompt, e.response) for e in examples] == [(r["prompt"], r["response"]) for r in ROWS]
    assert [(e.ground_truth, e.reward) for e in examples] == [("2", 1.0), ("3", 1.0), ("4", 0.0), ("5", 0.0), ("6", 0.0)]
    digest = report.pop("digest")
    assert report == {
        "source": "jsonl",
        "examples": 5,
        "correct": 2,
        "wrong_answer": 1,
        "wrong_form": 2,
        "left_out_as_validation_question": 0,
    }
    write_rows(*ROWS[:4])
    assert build()["digest"] != digest
    assert not list(TARGET.parent.glob("*_prompt_answer.jsonl"))


def test_a_teachers_right_responses_are_split_by_question() -> None:
    """Of the seven questions that it answers, each twice, five are for training."""
    questions = [Problem(str(n), f"What is {n} + 1?", str(n + 1)) for n in range(10, 18)]
    wrong, traces, pairs = "0", [], []
    for one in questions:
        for last, said in (("A", one.ground_truth), ("B", one.ground_truth), ("C", wrong)):
            answer = wrong if one.id == "12" else said
            traces.append((R1_ZERO.prompt(one.question), one, f" {last} </think> <answer>{answer}</answer>"))
            if answer != wrong:
                pairs.append([traces[-1][0], traces[-1][2]])
    build_sft_dataset(TASK, "sampled", "r1_zero", traces, HELD_OUT, TARGET)
    for split, expected in (("train", pairs[:10]), ("validation", pairs[10:])):
        lines = (TARGET.parent / f"{split}_prompt_answer.jsonl").read_text().splitlines()
        assert [[row["prompt"], row["answer"]] for row in map(json.loads, lines)] == expected


def test_a_trace_with_part_of_the_reward_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = [(0.9, 1.0), (1.0, 0.5), (1.0, 0.0), (0.5, 0.5), (0.0, 0.0)]  # the first is right, whatever its form
    scored = ScoredBatch(
        [{"format_reward": form, "answer_reward": all_, "reward": all_} for form, all_ in rewards], [False] * 5
    )
    monkeypatch.setattr(Task, "score", lambda *_: scored)
    write_rows(*ROWS)
    report = build()
    assert (report["correct"], report["wrong_answer"], report["wrong_form"]) == (1, 2, 2)
    assert [example.reward for example in read_examples(TARGET)] == [1.0, 0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    "template",
    [R1_ZERO, Format("Q: {question}\nThink step by step.\nA:"), Format(f"{R1_ZERO.template} Let me see.")],
    ids=["its own", "another", "another end"],
)
@pytest.mark.parametrize("question", [QUESTION, QUESTION.upper(), QUESTION.replace(" ", "  "), QUESTION.replace(". ", ".\n")])
def test_a_validation_question_is_left_out_and_counted(question: str, template: Format) -> None:
    """Also within a template that is not the project's."""
    asked = {"5": question, "6": QUESTION.replace("3", "4")}
    rows = [{"prompt": template.prompt(asked[n]), "response": n, "ground_truth": n} for n in asked]
    write_rows(ROWS[0], *rows)
    report = build()
    assert (report["examples"], report["left_out_as_validation_question"]) == (2, 1)
    assert [example.ground_truth for example in read_examples(TARGET)] == ["2", "6"]


def test_validation_questions_only_are_refused() -> None:
    write_rows(*(row(problem.question, " x", problem.ground_truth) for problem in HELD_OUT))
    with pytest.raises(UserError, match=r"no example is left that is not a validation question\. Use another"):
        build()
    assert not TARGET.exists()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "p", "response": "r"}, r"traces\.jsonl:2: no column 'ground_truth' \(columns: prompt, response\)"),
        ({"prompt": "p", "response": ["r"], "ground_truth": "1"}, r"traces\.jsonl:2: column 'response' holds \['r'\]"),
        ('["p", "r", "1"]', r"traces\.jsonl: not valid JSONL \(line 2: expected a JSON object"),
    ],
)
def test_a_bad_row_is_named(bad: dict[str, Any] | str, message: str) -> None:
    write_rows(ROWS[0], bad)
    with pytest.raises(UserError, match=message):
        build()
    assert not TARGET.exists()


def test_traces_come_from_the_hub_at_their_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(*ROWS)
    asked = []

    def download(repo: str, name: str, **options: Any) -> str:
        asked.append((repo, name, options))
        return "traces.jsonl"

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    hub = HubTraces(source="hub", prompt="r1_zero", repo="someone/traces", file="sft/train.jsonl", revision="0" * 40)
    report = build(hub)
    assert asked == [("someone/traces", "sft/train.jsonl", {"repo_type": "dataset", "revision": "0" * 40})]
    assert (report["source"], report["examples"]) == ("hub", 5)

    write_rows()
    with pytest.raises(UserError, match=r"^traces\.jsonl: has no rows"):  # which is no fault of the Hub
        build(hub)

    def fail(*_: Any, **__: Any) -> str:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(UserError, match=r"someone/traces sft/train\.jsonl: could not be read .*no route.*`sft_datasets\.main`"):
        build(hub)


@pytest.mark.parametrize(
    ("prompt", "ending"), [("r1_zero", " </think> <answer>{}</answer>"), ("question_only", " \\boxed{{{}}}")]
)
def test_generated_traces_make_the_whole_stage(prompt: str, ending: str) -> None:
    settings = TaskTraces.model_validate({"source": "task", "prompt": prompt, "examples": 300, "wrong_share": 0.5, "seed": 0})
    report = build(settings, validation=TASK.problems("validation"))
    examples = read_examples(TARGET)
    assert [example.ground_truth for example in examples] == [p.ground_truth for p in TASK.problems("train")[:300]]
    right = [float(example.response.endswith(ending.format(example.ground_truth))) for example in examples]
    assert [example.reward for example in examples] == right and 100 < sum(right) < 200
    assert (report["examples"], report["correct"], report["wrong_answer"]) == (300, sum(right), 300 - sum(right))
    assert (report["wrong_form"], report["left_out_as_validation_question"]) == (0, 0)
