"""The lengths of a study's prompts in tokens: counted if problems and tokenizer are on this machine, else assumed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from grpo.common.files import read_json
from grpo.common.records import read_problems
from grpo.study import paths
from grpo.study.schema import Study
from grpo.tasks.task import Format, find_format

ASSUMED = 200  # tokens: about the r1_zero prompt with a question


class Lengths(NamedTuple):
    """Lengths of a task's prompts in tokens, without what a chat template adds."""

    mean: float
    longest: int
    counted: bool


def prompt_lengths(study: Study, task: str, prompt: str) -> Lengths:
    """Count the tokens of the prompts in data/dataset, if the study's stages made these problems and the model."""
    report, tokenizer = paths.dataset_report(task), paths.model(task) / "tokenizer.json"
    files = (paths.train(task), paths.validation(task))
    if not all(path.exists() for path in (report, tokenizer, *files)):
        return Lengths(ASSUMED, ASSUMED, False)
    if read_json(report, f"dataset@{task}", keys=("task",))["task"] != study.tasks[task]["use"]:  # of another study
        return Lengths(ASSUMED, ASSUMED, False)
    changed = tuple(path.stat().st_mtime_ns for path in (tokenizer, *files))
    return _counted(Path.cwd(), files, tokenizer, find_format(study.task(task), prompt), changed)


@cache
def _counted(_folder: Path, files: tuple[Path, ...], tokenizer: Path, format: Format, _changed: tuple[int, ...]) -> Lengths:
    from tokenizers import Tokenizer

    prompts = [format.prompt(problem.question) for file in files for problem in read_problems(file)]
    counts = [len(encoded.ids) for encoded in Tokenizer.from_file(str(tokenizer)).encode_batch(prompts)]
    return Lengths(sum(counts) / len(counts), max(counts), True)
