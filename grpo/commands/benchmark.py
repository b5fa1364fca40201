"""A checkpoint under a task of EleutherAI's lm-evaluation-harness, and the very same responses before our grader.

The harness puts the question in its own words, samples, reads the answer and compares it. The grader then judges each response
again, so that two numbers stand side by side and each problem on which they differ can be read.
https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.common.cpu import start_threads
from grpo.common.errors import UserError, reason
from grpo.common.files import files_digest, require_writable, write_json, write_text
from grpo.common.imports import require_extra
from grpo.grader.extract import boxed_answer
from grpo.grader.grader import check_ground_truth
from grpo.grader.pool import grade_batch
from grpo.models import require_checkpoint
from grpo.results.statistics import format_interval, wilson_interval
from grpo.study.schema import Study
from grpo.tasks.formats import tagged_answer
from grpo.tasks.rows import FORMATS

GRADER = "our grader"
_SAMPLE = "Question: Mia has 45 apples and 1/2 of a pear.\n\nAnswer: Let's see:"
SHOWN = 300  # characters of a response's end in the table


@dataclass(frozen=True)
class Asked:
    """What is to be run; None: as the task or the harness has it.

    Attributes:
        task: a name that the harness knows, or the path of a YAML file of its kind.
        file: rows in the place of the task's dataset: JSONL, parquet or CSV with the same columns.
        shots_file: likewise for the examples in the prompt.
        shots: how many of those.
        limit: how many problems.
        max_tokens: of a response.
    """

    task: str
    file: Path | None = None
    shots_file: Path | None = None
    shots: int | None = None
    limit: int | None = None
    max_tokens: int | None = None


def benchmark(study: Study, checkpoint: Path, asked: Asked, out: Path) -> dict[str, Any]:
    """Run one task of the harness on a checkpoint, with the engine that the study names, and grade its responses.

    Writes below ``out``: TASK.yaml (the task as it was run), TASK.jsonl (every response with all verdicts), TASK.json (the
    numbers) and TASK.md (the numbers and the disagreements, to read).

    Returns:
        what TASK.json holds.

    Raises:
        UserError: the harness is missing, does not know or cannot load the task, a file cannot be read, there is no
            checkpoint, or ``out`` cannot be written.
    """
    require_checkpoint(checkpoint)
    for package in ("lm_eval", "accelerate"):  # which the harness needs for models of transformers
        require_extra(package, "benchmark", "grpo benchmark")
    start_threads(study.threads)
    settings = _task_settings(asked)
    name = str(settings["task"])
    as_run = "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
    loaded = _load(as_run, name)
    require_writable(out, "--out")
    backend, found = _run(study, checkpoint, loaded, asked)
    records = judge(found["samples"][name])
    about = {
        "task": name,
        "task_version": found["versions"].get(name),
        "harness": f"lm-eval {version('lm-eval')}",
        "dataset": str(asked.file) if asked.file else loaded.config.dataset_path,
        "shots": loaded.config.num_fewshot,
        "generation": loaded.config.generation_kwargs,
        "checkpoint": str(checkpoint),
        "checkpoint_digest": files_digest(checkpoint),
        "engine": backend,
    }
    result = about | compare(records)
    write_text(out / f"{name}.yaml", as_run)
    write_text(out / f"{name}.jsonl", "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    write_json(out / f"{name}.json", result)
    write_text(out / f"{name}.md", page(result))
    return result


# -------------------------------------------------------------------------------------------------------------- the harness


def _task_settings(asked: Asked) -> dict[str, Any]:
    """A task file for the harness that includes the task and says what is to be otherwise."""
    from lm_eval.tasks import TaskManager

    task = asked.task
    if Path(task).suffix in {".yaml", ".yml"}:
        if not Path(task).is_file():
            raise UserError(f"{task}: no such file. Correct its path, or name a task of the harness, such as gsm8k.")
        base, name = Path(task).absolute(), Path(task).stem
    else:
        entry = TaskManager().task_index.get(task)
        if entry is None or entry.yaml_path is None or entry.kind.name != "TASK":
            raise UserError(
                f"{task}: the harness has no single task of this name. `lm_eval ls tasks` lists them, such as gsm8k, "
                "hendrycks_math500, aime24; or give the path of a YAML file of its kind."
            )
        base, name = entry.yaml_path, task
    settings: dict[str, Any] = {"include": str(base), "task": name}
    if asked.shots is not None:
        settings["num_fewshot"] = asked.shots
    if asked.file is not None:
        settings |= _from_files(asked.file, asked.shots_file)
    elif asked.shots_file is not None:
        raise UserError("--shots-file: goes with --file. Give both, or neither.")
    return settings


def _from_files(file: Path, shots_file: Path | None) -> dict[str, Any]:
    files = {"test": file} | ({"train": shots_file} if shots_file else {})
    for path in files.values():
        if not path.is_file() or path.suffix not in FORMATS:
            raise UserError(f"{path}: no such file, or none that ends in {', '.join(FORMATS)}. Correct its path.")
    if len({path.suffix for path in files.values()}) > 1:
        raise UserError(f"--file and --shots-file: {file.name} and {shots_file} are of two kinds. Give two of one kind.")
    train = "train" if shots_file else None
    return {
        "dataset_path": FORMATS[file.suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(path.absolute()) for split, path in files.items()}},
        "training_split": train,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": train,
    }


def _load(settings: str, name: str) -> Any:
    """The harness's task, with its data.

    Raises:
        UserError: it cannot be loaded, gives no text to grade, or wants examples of which nothing says where they are.
    """
    from lm_eval.tasks import TaskManager

    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.yaml"
            path.write_text(settings, encoding="utf-8")
            task = TaskManager(include_defaults=False).load([str(path)])["tasks"][name]
    except Exception as error:  # of the harness, of `datasets`, of the Hub, of the task's own code
        raise UserError(
            f"{name}: the harness could not load it ({reason(error)}). Without the Hub, give its rows by --file, with all "
            "columns of its dataset; install what it says is missing."
        ) from error
    if task.OUTPUT_TYPE != "generate_until":
        raise UserError(f"{name}: is answered by {task.OUTPUT_TYPE}, not by a text that could be graded. Name another task.")
    examples = task.config.fewshot_split or getattr(task.config.fewshot_config, "samples", None)
    if task.config.num_fewshot and not examples and "data_files" in (task.config.dataset_kwargs or {}):
        raise UserError(
            f"{name}: its prompt shows {task.config.num_fewshot} examples. Give a file with some by --shots-file, or --shots 0."
        )
    return task


def _run(study: Study, checkpoint: Path, task: Any, asked: Asked) -> tuple[str, dict[str, Any]]:
    """The harness's name of the backend, and what it found.

    Raises:
        UserError: the prompts and the tokens asked for do not fit, or as of :func:`_model`.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    backend, arguments = _model(study, checkpoint)
    try:
        return backend, lm_eval.simple_evaluate(
            model=backend,
            model_args=arguments,
            tasks=[task],
            task_manager=TaskManager(include_defaults=False),  # else it reads thousands of files to find what is loaded
            limit=asked.limit,
            batch_size=min(study.engine.max_batch_size, 64) if backend == "hf" else "auto",
            device=study.engine.device if backend == "hf" else None,
            gen_kwargs=None if asked.max_tokens is None else {"max_gen_toks": asked.max_tokens},
            bootstrap_iters=0,
        )
    except AssertionError as error:
        raise UserError(f"{checkpoint}: {reason(error).rstrip('.')}. Lower --max-tokens.") from error


def _model(study: Study, checkpoint: Path) -> tuple[str, dict[str, Any]]:
    """The harness's name of a backend, and its arguments.

    Raises:
        UserError: vLLM would not cut texts into the tokens that the checkpoint was trained with.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    arguments: dict[str, Any] = {"pretrained": str(checkpoint), "dtype": study.engine.dtype}
    # By the model's type AutoTokenizer may take another tokenizer than tokenizer.json, as it does for the small models.
    own = PreTrainedTokenizerFast.from_pretrained(checkpoint) if (checkpoint / "tokenizer.json").exists() else None
    if study.engine.name != "vllm":
        return "hf", arguments | ({"tokenizer": own} if own else {})
    theirs = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    if own and own(_SAMPLE)["input_ids"] != theirs(_SAMPLE)["input_ids"]:
        raise UserError(
            f"{checkpoint}: vLLM would use another tokenizer than it was trained with. Use engine.name transformers."
        )
    return "vllm", arguments | {"gpu_memory_utilization": study.grpo.gpu_memory_utilization, "seed": study.evaluation.seed}


# -------------------------------------------------------------------------------------------------------------- the verdicts


def judge(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record for each problem, with the verdict of each of the harness's metrics and of the grader.

    Args:
        samples: as the harness logs them: a problem stands there once for each of its filters.

    Returns:
        ``problem`` (its number), ``prompt``, ``response``, ``answer`` as the grader reads it, ``ground_truth``, ``verdicts`` by
        judge, and where the grader could not judge ``unjudged``: why.
    """
    records: dict[int, dict[str, Any]] = {}
    for sample in samples:
        response = str(sample["resps"][0][0])
        record = records.setdefault(
            sample["doc_id"],
            {
                "problem": sample["doc_id"],
                "prompt": str(sample["arguments"][0][0]),
                "response": response,
                "answer": final_answer(response),
                "ground_truth": final_answer(str(sample["target"])),
                "verdicts": {},
            },
        )
        judges = {f"{metric}, {sample['filter']}": sample[metric] for metric in sample["metrics"]}
        record["verdicts"] |= {name: bool(value >= 1.0) for name, value in judges.items() if isinstance(value, int | float)}
    found = [records[number] for number in sorted(records)]
    verdicts = grade_batch([(record["answer"], record["ground_truth"]) for record in found])
    for record, verdict in zip(found, verdicts, strict=True):
        try:
            check_ground_truth(record["ground_truth"])
        except UserError as error:
            record["unjudged"] = str(error)
        if verdict.timed_out:
            record["unjudged"] = "the grader ran out of time"
        record["verdicts"][GRADER] = verdict.equal
    return found


def final_answer(text: str) -> str:
    r"""What a response, or a solution in a dataset, gives as its answer, whatever prompt it follows.

    The first of: the last ``\boxed{}``; what the last pair of answer tags encloses; what follows the last ``####``, without
    thousands commas, as in GSM8K; the last line that says "answer"; the last line. The grader reads sentences.
    """
    for answer in (boxed_answer(text), tagged_answer(text)):
        if answer is not None:
            return answer
    _, mark, after = text.rpartition("####")
    if mark and after.strip():
        return after.strip().splitlines()[0].replace(",", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "answer" in line.lower()), lines[-1] if lines else "")


def compare(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each judge's accuracy with a 95% Wilson interval, and the problems on which the grader and another judge differ.

    Raises:
        UserError: there are no records.
    """
    if not records:
        raise UserError("grpo benchmark: the task has no problems. Check its file.")
    right = Counter(name for record in records for name, verdict in record["verdicts"].items() if verdict)
    accuracy = {}
    for name in records[0]["verdicts"]:
        low, high = wilson_interval(right[name], len(records))
        accuracy[name] = {"value": right[name] / len(records), "low": low, "high": high, "right": right[name]}
    return {
        "problems": len(records),
        "accuracy": accuracy,
        "unjudged": sum("unjudged" in record for record in records),
        "disagreements": [record for record in records if len(set(record["verdicts"].values())) > 1],
    }


def page(result: Mapping[str, Any]) -> str:
    """The numbers and the disagreements as Markdown."""
    environment = Environment(
        loader=PackageLoader("grpo.commands"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"cell": _cell, "interval": format_interval}
    return environment.get_template("benchmark.md.j2").render(result, shown=SHOWN)


def _cell(text: str) -> str:
    """A text in one cell: no line break, and nothing that ends the cell or the code in it."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`" if text.strip() else "(nothing)"
