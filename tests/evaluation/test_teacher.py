"""Fine-tuning examples sampled from a teacher: conversion of responses, and the stage with a tiny teacher."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_parts import tiny_checkpoint
from study_parts import values_of

from grpo.common.records import Completion, Problem, Rollout, read_examples
from grpo.evaluation import evaluate as module
from grpo.evaluation.teacher import traces_of
from grpo.study import paths
from grpo.study.config import SampledTraces
from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.keyword_inclusion import Keyword
from grpo.tasks.task import Task

Grpo = Callable[..., tuple[int, str, str]]
MATH, WORDS = Arithmetic(4, 4, levels=1, seed=0), Keyword(seed=0)
PROBLEM, PAIR = Problem("p", "What is 1 + 1?", "2"), Problem("k", "apple, red", "apple, red")


def settings(prompt: str, asked_in: str, **more: Any) -> SampledTraces:
    model = {"source": "local", "path": "teacher"}
    return SampledTraces.model_validate({"source": "sampled", "prompt": prompt, "asked_in": asked_in, "model": model, **more})


def response(text: str, problem: Problem = PROBLEM, ended_by: str = "stop") -> Rollout:
    return Rollout(problem, (1,), Completion((2,), text, (-1.0,), ended_by))


@pytest.mark.parametrize(
    ("task", "problem", "asked_in", "prompt", "text", "trace"),
    [
        (MATH, PROBLEM, "chat", "r1_zero", "1 + 1\nis \\boxed{2}.", " 1 + 1\nis \\boxed{2}. </think> <answer>2</answer>"),
        (
            *(MATH, PROBLEM, "chat", "r1_zero"),
            "<think>\nTwo?\n</think>\n\nIt is \\boxed{2}.",
            " Two?\n\n\nIt is \\boxed{2}. </think> <answer>2</answer>",
        ),
        (MATH, PROBLEM, "chat", "question_only", "It is \\boxed{2}.", " It is \\boxed{2}."),
        (MATH, PROBLEM, "question_only", "chat", " It is \\boxed{2}.", "It is \\boxed{2}."),
        (MATH, PROBLEM, "r1_zero", "chat", " Two. </think> <answer>2</answer>", "Two.  <answer>2</answer> \\boxed{2}"),
        (MATH, PROBLEM, "chat", "r1_zero", "It is 2.", None),
        (WORDS, PAIR, "chat", "keyword", "The apple is red. I like it.", " The apple is red."),
        (WORDS, PAIR, "chat", "keyword", "\nNo stop", None),
    ],
)
def test_responses_as_traces(task: Task, problem: Problem, asked_in: str, prompt: str, text: str, trace: str | None) -> None:
    traces, counts = traces_of(task, settings(prompt, asked_in), [response(text, problem)])
    expected = [] if trace is None else [(task.formats[prompt].prompt(problem.question), problem, trace)]
    assert traces == expected
    assert counts == {"responses": 1, "cut_off": 0, "without_answer": int(trace is None), "repeated": 0}
    if trace is not None and asked_in != prompt:  # its answer is read from it again
        assert (task.formats[prompt].read(trace) or "").strip() == task.formats[asked_in].read(text)


def test_what_is_cut_off_or_repeated_is_left_out_and_counted() -> None:
    other = Problem("q", "What is 2 + 2?", "4")
    rollouts = [
        *(response("\\boxed{2}"), response("\\boxed{2}", ended_by="length"), response("\\boxed{3}"), response(" \\boxed{2}")),
        *(response("\\boxed{2}", other), response("2", ended_by="length"), response("2")),
    ]
    traces, counts = traces_of(MATH, settings("r1_zero", "chat"), rollouts)
    end = " </think> <answer>{}</answer>"
    assert [(problem.id, text) for _, problem, text in traces] == [
        ("p", " \\boxed{2}" + end.format(2)),
        ("p", " \\boxed{3}" + end.format(3)),
        ("q", " \\boxed{2}" + end.format(2)),
    ]
    assert counts == {"responses": 7, "cut_off": 2, "without_answer": 1, "repeated": 1}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grpo: Grpo) -> Path:
    """A workspace whose keyword traces are those of a tiny Llama, asked in chats; one in ten of its tokens ends a response."""
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint(
        tmp_path / "teacher", "llama", "like_llama3", ["The red apple lies.", "Write a sentence."], initializer_range=0.1
    )
    ends = tmp_path / "teacher" / "generation_config.json"
    ends.write_text(json.dumps({"eos_token_id": [*json.loads(ends.read_text())["eos_token_id"], *range(100, 130)]}))
    use(tmp_path)
    assert grpo("dataset", "keyword")[0] == 0, grpo("dataset", "keyword")
    return tmp_path


def use(folder: Path, **changes: Any) -> None:
    values = values_of("smoke")
    traces = settings("keyword", "chat", questions=400, samples=2, max_tokens=40, seed=3).model_dump(exclude_none=True)
    values["sft_datasets"]["keyword"] = traces | changes
    (folder / "params.yaml").write_text(json.dumps(values))


def made(folder: Path) -> tuple[bytes, dict[str, Any]]:
    return paths.sft_examples("keyword").read_bytes(), json.loads((folder / paths.sft_report("keyword")).read_text())


def test_the_stage_keeps_what_the_teacher_says(project: Path, grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEQUENCES_PER_CHUNK", 200)  # four chunks
    code, _, error = grpo("sft_dataset", "keyword")
    assert code == 0, error
    first, report = made(project)
    examples = read_examples(paths.sft_examples("keyword"))
    sampled = report["sampled"]
    assert sampled["teacher"] == "teacher" and sampled["responses"] == 800
    left_out = sum(sampled[key] for key in ("cut_off", "without_answer", "repeated"))
    assert report["source"] == "sampled" and report["examples"] == 800 - left_out == len(examples) > 5
    assert all(example.prompt.startswith("Write a sentence that includes") for example in examples)
    assert all(example.response.startswith(" ") and example.response.endswith(".") for example in examples)

    paths.sft_examples("keyword").unlink()
    assert grpo("sft_dataset", "keyword")[0] == 0
    assert made(project) == (first, report)
    use(project, seed=4)
    assert grpo("sft_dataset", "keyword")[0] == 0
    assert made(project)[0] != first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"questions": 9999}, "sft_datasets.keyword.questions: 9999 are asked for, but there are 1232"),
        ({"max_tokens": 1}, "sft_datasets.keyword: of 800 responses none can be used (cut_off: 7"),
        ({"top_p": 1e-9}, "sft_datasets.keyword: of 800 responses none can be used"),  # the likeliest tokens are no sentence
        (
            {"asked_in": "r1_zero"},
            "sft_datasets.keyword.asked_in: the task keyword has no format 'r1_zero' (known: keyword, chat)",
        ),
    ],
)
def test_what_cannot_be_sampled_is_told(project: Path, grpo: Grpo, changes: dict[str, Any], message: str) -> None:
    use(project, **changes)
    code, _, error = grpo("sft_dataset", "keyword")
    assert code == 2 and message in error
    assert not paths.sft_examples("keyword").exists()
