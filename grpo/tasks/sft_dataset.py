"""The ``sft_dataset`` stage: responses to fine-tune on, each with its task's reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from grpo.common.errors import UserError
from grpo.common.files import atomic_folder, files_digest, write_jsonl
from grpo.common.imports import call_with
from grpo.common.records import Example, Problem, write_records
from grpo.tasks.build import layout_free
from grpo.tasks.rows import REVISION, Row, on_the_hub, read_rows
from grpo.tasks.task import PLACEHOLDER, SPLITS, Format, Settings, Task, find_format


class TaskTraces(Settings, extra="allow"):
    """Traces of the task itself; further keys are arguments of :meth:`grpo.tasks.task.Task.traces`."""

    source: Literal["task"]
    prompt: str  # the format of the traces


class JsonlTraces(Settings):
    """Traces from a JSONL file with the columns ``prompt``, ``response`` and ``ground_truth``."""

    source: Literal["jsonl"]
    prompt: str
    path: str


class HubTraces(Settings):
    """Traces from such a file on the Hugging Face Hub, at a fixed revision."""

    source: Literal["hub"]
    prompt: str
    repo: str
    file: str
    revision: str = REVISION


Trace = tuple[str, Problem, str]  # the whole prompt, the problem, the response


def find_traces(task: Task, settings: TaskTraces | JsonlTraces | HubTraces, where: str) -> list[Trace]:
    """Read existing traces: the task's own, or the rows of a file.

    ``where``: key of the settings in params.yaml, for messages. Raises UserError if the source is missing, or a row lacks a
    column.
    """
    format = find_format(task, settings.prompt)
    if isinstance(settings, TaskTraces):
        options = settings.model_extra or {}
        own = call_with(task.traces, {"format": settings.prompt, **options}, where)
        return [(format.prompt_of(problem), problem, response) for problem, response in own]
    if isinstance(settings, JsonlTraces):
        rows = read_rows(settings.path, f"{where}.path")
    else:
        import huggingface_hub

        with on_the_hub(f"{settings.repo} {settings.file}", settings.revision, where):
            at = {"repo_type": "dataset", "revision": settings.revision}
            rows = read_rows(huggingface_hub.hf_hub_download(settings.repo, settings.file, **at), f"{where}.file")
    return [_trace(row, format) for row in rows]


def build_sft_dataset(
    task: Task, source: str, prompt: str, traces: list[Trace], validation: Sequence[Problem], target: Path
) -> dict[str, Any]:
    """Leave out traces of validation questions, score the others, and write them to ``target``.

    Of a teacher's right responses, ``train_prompt_answer.jsonl`` has those to the first four fifths of the questions, and
    ``validation_prompt_answer.jsonl`` the others (CSE599-O, problem 16). Returns the report: number of examples, by reward;
    number left out; and a digest. Raises UserError if no trace is left.

    Args:
        source: origin of the traces, for the report.
        prompt: format of the traces.
        validation: the task's validation problems.
    """
    kept = _without_validation(traces, find_format(task, prompt), validation)
    scored = task.score(prompt, [problem for _, problem, _ in kept], [response for *_, response in kept]).rewards
    examples = [
        Example(prompt, response, problem.ground_truth, reward=score["reward"])
        for (prompt, problem, response), score in zip(kept, scored, strict=True)
    ]
    with atomic_folder(target.parent) as folder:
        write_records(folder / target.name, examples)
        written = files_digest(folder / target.name)
        if source == "sampled":
            right = [(example.prompt, example.response) for example in examples if example.reward == 1.0]
            questions = list(dict.fromkeys(prompt for prompt, _ in right))
            training = {*questions[: len(questions) * 4 // 5]}
            for split in SPLITS:
                rows = [{"prompt": p, "answer": a} for p, a in right if (p in training) == (split == "train")]
                write_jsonl(folder / f"{split}_prompt_answer.jsonl", rows)
    wrong = [score for score in scored if score["reward"] < 1.0]
    wrong_form = sum(score["format_reward"] < 1.0 for score in wrong)
    return {
        "source": source,
        "examples": len(examples),
        "correct": len(examples) - len(wrong),
        "wrong_answer": len(wrong) - wrong_form,
        "wrong_form": wrong_form,
        "left_out_as_validation_question": len(traces) - len(kept),
        "digest": written,
    }


def _trace(row: Row, format: Format) -> Trace:
    """Convert a row; the question is the part of the prompt at the format's placeholder, else the whole prompt."""
    prompt = row.text("prompt")
    question = format.question_of(prompt)
    problem = Problem(row.where, prompt if question is None else question, row.text("ground_truth"))
    return prompt, problem, row.text("response")


def _without_validation(traces: list[Trace], format: Format, validation: Sequence[Problem]) -> list[Trace]:
    """Leave out traces whose prompt asks a validation question, in any layout. Raises UserError if no trace is left."""
    held_out = {layout_free(problem.question) for problem in validation}
    before, after = (layout_free(part) for part in format.template.split(PLACEHOLDER, 1))

    def asks_one(text: str) -> bool:
        if text.startswith(before) and text.endswith(after):
            return text[len(before) : len(text) - len(after)] in held_out
        return any(question in text for question in held_out)  # another template

    kept = [trace for trace in traces if not asks_one(layout_free(trace[0]))]
    if not kept:
        raise UserError("sft_datasets: no example is left that is not a validation question. Use another source.")
    return kept
