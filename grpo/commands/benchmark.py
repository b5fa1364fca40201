"""Run a task of EleutherAI's lm-evaluation-harness on a checkpoint, and grade the same responses with this package's grader.

The harness writes the prompts, samples, extracts the answers and compares them. The result has both accuracies and every
problem on which harness and grader disagree. https://github.com/EleutherAI/lm-evaluation-harness
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
from grpo.common.safe_text import MARKDOWN
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
SHOWN = 300  # characters shown of a response's end


@dataclass(frozen=True)
class Asked:
    """The options of `grpo benchmark`; None: the task's or the harness's default."""

    task: str
    file: Path | None = None
    shots_file: Path | None = None
    shots: int | None = None
    limit: int | None = None
    max_tokens: int | None = None


def benchmark(study: Study, checkpoint: Path, asked: Asked, out: Path) -> dict[str, Any]:
    """Run one task of the harness on a checkpoint with the study's engine, and grade its responses.

    Writes to ``out``: TASK.yaml (the task as it was run), TASK.jsonl (every response with all verdicts), TASK.json (the
    numbers) and TASK.md (the numbers and the disagreements).

    Returns:
        the content of TASK.json.

    Raises:
        UserError: the harness is missing, does not know the task or cannot load it; a file cannot be read; there is no
            checkpoint; or ``out`` cannot be written.
    """
    require_checkpoint(checkpoint)
    for package in ("lm_eval", "accelerate"):  # the harness needs accelerate for models of transformers
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
    """A task file for the harness that includes the task and changes what the options say."""
    from lm_eval.tasks import TaskManager

    task = asked.task
    if Path(task).suffix in {".yaml", ".yml"}:
        if not Path(task).is_file():
            raise UserError(f"--task {task}: no such file. Correct its path, or name a task of the harness, such as gsm8k.")
        base, name = Path(task).absolute(), Path(task).stem
    else:
        entry = TaskManager().task_index.get(task)
        if entry is None or entry.yaml_path is None or entry.kind.name != "TASK":
            raise UserError(
                f"--task {task}: the harness has no single task of this name. `lm_eval ls tasks` lists its tasks, such as "
                "gsm8k, hendrycks_math500, aime24; or give the path of a YAML file in its format."
            )
        base, name = entry.yaml_path, task
    settings: dict[str, Any] = {"include": str(base), "task": name}
    if asked.shots is not None:
        settings["num_fewshot"] = asked.shots
    if asked.file is not None:
        settings |= _from_files(asked.file, asked.shots_file)
    elif asked.shots_file is not None:
        raise UserError("--shots-file: needs --file. Give both or neither.")
    return settings


def _from_files(file: Path, shots_file: Path | None) -> dict[str, Any]:
    files = {"test": file} | ({"train": shots_file} if shots_file else {})
    for path in files.values():
        if not path.is_file() or path.suffix not in FORMATS:
            raise UserError(f"{path}: no such file, or its name does not end in {', '.join(FORMATS)}. Correct its path.")
    if len({path.suffix for path in files.values()}) > 1:
        raise UserError(f"--file, --shots-file: {file.name} and {shots_file} have different formats. Give two of one format.")
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
    """Load the harness's task with its data; UserError if its responses cannot be graded or it lacks data or examples."""
    from lm_eval.tasks import TaskManager

    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.yaml"
            path.write_text(settings, encoding="utf-8")
            task = TaskManager(include_defaults=False).load([str(path)])["tasks"][name]
    except Exception as error:  # of the harness, of `datasets`, of the Hub, of the task's own code
        raise UserError(
            f"--task {name}: the harness could not load it ({reason(error)}). Without the Hub, give its problems with --file "
            "(all columns of its dataset); install what the message says is missing."
        ) from error
    if task.OUTPUT_TYPE != "generate_until":
        raise UserError(f"--task {name}: answered by {task.OUTPUT_TYPE}, not by text that can be graded. Name another task.")
    examples = task.config.fewshot_split or getattr(task.config.fewshot_config, "samples", None)
    if task.config.num_fewshot and not examples and "data_files" in (task.config.dataset_kwargs or {}):
        raise UserError(
            f"--task {name}: its prompt needs {task.config.num_fewshot} examples. Give a file of them with --shots-file, or "
            "--shots 0."
        )
    return task


def _run(study: Study, checkpoint: Path, task: Any, asked: Asked) -> tuple[str, dict[str, Any]]:
    """Run the task; return the harness's name of the backend, and its results."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    backend, arguments = _model(study, checkpoint)
    try:
        return backend, lm_eval.simple_evaluate(
            model=backend,
            model_args=arguments,
            tasks=[task],
            task_manager=TaskManager(include_defaults=False),  # the default reads thousands of files
            limit=asked.limit,
            batch_size=min(study.engine.max_batch_size, 64) if backend == "hf" else "auto",
            device=study.engine.device if backend == "hf" else None,
            gen_kwargs=None if asked.max_tokens is None else {"max_gen_toks": asked.max_tokens},
            bootstrap_iters=0,
        )
    except AssertionError as error:
        raise UserError(f"{checkpoint}: {reason(error).rstrip('.')}. Lower --max-tokens.") from error


def _model(study: Study, checkpoint: Path) -> tuple[str, dict[str, Any]]:
    """The harness's name of the backend for the study's engine, and its arguments."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    arguments: dict[str, Any] = {"pretrained": str(checkpoint), "dtype": study.engine.dtype}
    # AutoTokenizer chooses by the model's type and may ignore tokenizer.json, as it does for the small models.
    own = PreTrainedTokenizerFast.from_pretrained(checkpoint) if (checkpoint / "tokenizer.json").exists() else None
    if study.engine.name != "vllm":
        return "hf", arguments | ({"tokenizer": own} if own else {})
    theirs = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    if own and own(_SAMPLE)["input_ids"] != theirs(_SAMPLE)["input_ids"]:
        raise UserError(
            f"{checkpoint}: vLLM would use another tokenizer than it was trained with. Set engine.name to transformers."
        )
    return "vllm", arguments | {"gpu_memory_utilization": study.grpo.gpu_memory_utilization, "seed": study.evaluation.seed}


# -------------------------------------------------------------------------------------------------------------- the verdicts


def judge(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make one record per problem with the verdicts of the harness's metrics and of the grader.

    Args:
        samples: as the harness logs them, once per problem and filter.

    Returns:
        records with ``problem`` (its number), ``prompt``, ``response``, ``answer`` as the grader reads it, ``ground_truth``,
        ``verdicts`` by judge, and ``unjudged`` (the reason) if the grader could not judge.
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
    r"""Extract the answer of a response or of a dataset's solution, whatever the prompt.

    The first that exists of: the last ``\boxed{}``; the last answer tags; what follows the last ``####``, without
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
    """Compute each judge's accuracy with a Wilson interval, and where judges disagree; UserError without records."""
    if not records:
        raise UserError("--task: it has no problems. Check its file.")
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
    """Format the numbers and the disagreements as Markdown."""
    environment = Environment(
        loader=PackageLoader("grpo.commands"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= MARKDOWN | {"interval": format_interval}
    return environment.get_template("benchmark.md.j2").render(result, shown=SHOWN)
