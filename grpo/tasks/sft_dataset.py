"""The ``sft_dataset`` stage: reasoning traces in the r1_zero form, each with what the reward function gives it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from grpo import paths
from grpo.errors import UserError
from grpo.files import files_digest, whole_folder, write_json
from grpo.records import Example, read_problems, write_records
from grpo.rewards import score_batch
from grpo.sections import ArithmeticTask, GeneratedTraces, HubTraces
from grpo.study import Study
from grpo.tasks.arithmetic import derail, word_problems
from grpo.tasks.downloaded import Row, download, read_jsonl
from grpo.tasks.overlap import layout_free
from grpo.tasks.prompts import format_prompt, load_prompt

RESPONSE = " {steps} </think> <answer>{answer}</answer>"


def build_sft_dataset(study: Study) -> dict[str, Any]:
    """Generate or read the traces, reward each, leave out those that ask a validation question, and write them.

    Returns:
        the report: how many there are, how many earn the reward, how many were left out, and a digest.

    Raises:
        UserError: the source is missing, a row lacks a column, or nothing is left.
    """
    settings, prompt = study.sft_dataset, study.sft.prompt
    if isinstance(settings, GeneratedTraces):
        assert isinstance(study.task, ArithmeticTask)  # Study sees to it
        rows = generated_traces(study.task, settings)
    else:
        rows = _traces_of_file(settings)
    kept = _without_validation(rows, prompt)
    rewards = score_batch(prompt, [r for _, r, _ in kept], [truth for _, _, truth in kept]).rewards
    examples = [Example(*row, reward=score["reward"]) for row, score in zip(kept, rewards, strict=True)]
    with whole_folder(paths.SFT_EXAMPLES.parent) as folder:
        write_records(folder / paths.SFT_EXAMPLES.name, examples)
    outcomes = Counter((score["format_reward"], score["reward"]) for score in rewards)
    report = {
        "source": settings.source,
        "examples": len(examples),
        "correct": outcomes[1.0, 1.0],
        "wrong_answer": outcomes[1.0, 0.0],
        "wrong_form": outcomes[0.0, 0.0],
        "left_out_as_validation_question": len(rows) - len(kept),
        "digest": files_digest(paths.SFT_EXAMPLES),
    }
    write_json(paths.SFT_REPORT, report)
    return report


Trace = tuple[str, str, str]  # prompt, response, ground truth


def generated_traces(task: ArithmeticTask, settings: GeneratedTraces) -> list[Trace]:
    """Solutions of the first training problems; in ``wrong_share`` of them one step goes wrong, and the rest follows from it.

    Raises:
        UserError: more are asked for than there are training problems.
    """
    if settings.examples > task.train_size:
        raise UserError(
            f"params.yaml: sft_dataset.examples: {settings.examples} traces are asked for, but task.train_size is "
            f"{task.train_size}. Lower the former or raise the latter."
        )
    rng = random.Random(f"traces {settings.seed}")
    template = load_prompt("r1_zero")
    traces = []
    for _, problem in zip(range(settings.examples), word_problems(task.seed, task.levels, validation=False), strict=False):
        told = derail(problem, rng) if rng.random() < settings.wrong_share else problem
        response = RESPONSE.format(steps=told.steps, answer=told.answer)
        traces.append((format_prompt(template, problem.question), response, str(problem.answer)))
    return traces


def _traces_of_file(settings: Any) -> list[Trace]:
    if isinstance(settings, HubTraces):
        path = download(settings.repo, settings.file, settings.revision, "sft_dataset")
    else:
        path = Path(settings.path)
    rows = read_jsonl(path, "sft_dataset.path")
    return [_trace(row) for row in rows]


def _trace(row: Row) -> Trace:
    return row.text("prompt"), row.text("response"), row.text("ground_truth")


def _without_validation(traces: list[Trace], prompt: str) -> list[Trace]:
    """Those whose prompt is not that of a validation problem, whatever its layout.

    Raises:
        UserError: none is left.
    """
    template = load_prompt(prompt)
    held_out = {layout_free(format_prompt(template, problem.question)) for problem in read_problems(paths.VALIDATION)}
    kept = [trace for trace in traces if layout_free(trace[0]) not in held_out]
    if not kept:
        raise UserError("sft_dataset: no example is left that is not a validation question. Use another source.")
    return kept
