"""The ``sft_dataset`` stage: reasoning traces in the r1_zero form, each with what the reward function gives it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import files_digest, whole_folder, write_json
from grpo.common.records import Example, read_problems, write_records
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.sections import ArithmeticTask, DownloadedTask, GeneratedTraces, HubTraces, JsonlTraces, WorkedSolutions
from grpo.tasks import gsm8k, math
from grpo.tasks.arithmetic import derail, word_problems
from grpo.tasks.downloaded import Row, download, read_jsonl
from grpo.tasks.formats import PLACEHOLDER, format_prompt, load_prompt
from grpo.tasks.overlap import layout_free
from grpo.tasks.rewards import score_batch

RESPONSE = " {steps} </think> <answer>{answer}</answer>"


def build_sft_dataset(study: Study) -> dict[str, Any]:
    """Generate or read the traces, reward each, leave out those that ask a validation question, and write them.

    Returns:
        the report: how many there are, how many earn the reward, how many were left out, and a digest.

    Raises:
        UserError: the source is missing, a row lacks a column, or nothing is left.
    """
    settings, prompt = study.sft_dataset, study.sft.prompt
    if isinstance(settings, GeneratedTraces) and isinstance(study.task, ArithmeticTask):
        rows = generated_traces(study.task, settings)
    elif isinstance(settings, WorkedSolutions) and isinstance(study.task, DownloadedTask):
        rows = worked_solutions(study.task)
    else:
        assert isinstance(settings, JsonlTraces | HubTraces)  # Study refuses what does not go together
        rows = _traces_of_file(settings)
    kept = _without_validation(rows, prompt)
    rewards = score_batch(prompt, [r for _, r, _ in kept], [truth for _, _, truth in kept]).rewards
    examples = [Example(*row, reward=score["reward"]) for row, score in zip(kept, rewards, strict=True)]
    with whole_folder(paths.SFT_EXAMPLES.parent) as folder:
        write_records(folder / paths.SFT_EXAMPLES.name, examples)
    wrong = [score for score in rewards if score["reward"] < 1.0]
    wrong_form = sum(score["format_reward"] < 1.0 for score in wrong)
    report = {
        "source": settings.source,
        "examples": len(examples),
        "correct": len(examples) - len(wrong),
        "wrong_answer": len(wrong) - wrong_form,
        "wrong_form": wrong_form,
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
    for problem in itertools.islice(word_problems(task.seed, task.levels, validation=False), settings.examples):
        told = derail(problem, rng) if rng.random() < settings.wrong_share else problem
        response = RESPONSE.format(steps=told.steps, answer=told.answer)
        traces.append((format_prompt(template, problem.question), response, str(problem.answer)))
    return traces


def worked_solutions(task: DownloadedTask) -> list[Trace]:
    """The training set's own solutions in the r1_zero form."""
    template = load_prompt("r1_zero")
    solved = {"math": math.solutions, "gsm8k": gsm8k.solutions}[task.name](task)
    return [
        (
            format_prompt(template, problem.question),
            RESPONSE.format(steps=solution, answer=problem.ground_truth),
            problem.ground_truth,
        )
        for problem, solution in solved
    ]


def _traces_of_file(settings: JsonlTraces | HubTraces) -> list[Trace]:
    if isinstance(settings, HubTraces):
        path = download(settings.repo, settings.file, settings.revision, "sft_dataset")
    else:
        path = Path(settings.path)
    rows = read_jsonl(path, "sft_dataset.path")
    return [_trace(row) for row in rows]


def _trace(row: Row) -> Trace:
    return row.text("prompt"), row.text("response"), row.text("ground_truth")


def _without_validation(traces: list[Trace], prompt: str) -> list[Trace]:
    """Those whose prompt does not ask a validation question, whatever its layout.

    Raises:
        UserError: none is left.
    """
    held_out = {layout_free(problem.question) for problem in read_problems(paths.VALIDATION)}
    before, after = (layout_free(part) for part in load_prompt(prompt).split(PLACEHOLDER))

    def asks_one(text: str) -> bool:
        if text.startswith(before) and text.endswith(after):
            return text[len(before) : len(text) - len(after)] in held_out
        return any(question in text for question in held_out)  # another template

    kept = [trace for trace in traces if not asks_one(layout_free(trace[0]))]
    if not kept:
        raise UserError("sft_dataset: no example is left that is not a validation question. Use another source.")
    return kept
