"""MATH and GSM8K: reading, checks and overlap, on made-up rows; and on the real files where they are present."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest

from grpo.common.errors import UserError
from grpo.common.records import Problem
from grpo.grader.grader import is_equivalent
from grpo.tasks.build import separate
from grpo.tasks.downloaded import SUBJECTS, Counts, Downloaded, Gsm8k, Math
from grpo.tasks.rows import HubDataset, LocalFiles, Row
from grpo.tasks.task import Task, make_task

REAL = Path(__file__).parents[3] / "shared" / "data"
REVISION = "0" * 40


def math_row(number: int, **changes: Any) -> dict[str, Any]:
    row = {"problem": f"What is {number} + 1?", "level": "Level 2", "subject": "Algebra", "answer": str(number + 1)}
    return {**row, **changes}


def gsm8k_row(number: int, answer: str = "We add.\n#### 1,234") -> dict[str, Any]:
    return {"question": f"How many apples are {number} apples?", "answer": answer}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def local_task(
    folder: Path, train: list[dict[str, Any]], validation: list[dict[str, Any]], name: str = "math", **options: Any
) -> Downloaded:
    source = LocalFiles(train=write(folder / "train.jsonl", train), validation=write(folder / "val.jsonl", validation))
    return {"math": Math, "gsm8k": Gsm8k}[name](source, **options)


def load(task: Downloaded) -> tuple[list[Problem], list[Problem]]:
    return task.problems("train"), task.problems("validation")


def test_math_from_local_files(tmp_path: Path) -> None:
    boxed = {"problem": "Half?", "level": "Level ?", "type": "Prealgebra", "solution": r"\boxed{9} no \boxed{\frac{1}{2}}."}
    counts = Counts(train=2, validation=1)
    task = local_task(tmp_path, [math_row(1), boxed], [math_row(5, unique_id="test/a/5.json")], expected=counts)
    train, validation = load(task)
    assert train[0] == Problem("math/train/0", "What is 1 + 1?", "2", 2, "Algebra")
    assert train[1] == Problem("math/train/1", "Half?", r"\frac{1}{2}", 0, "Prealgebra")
    assert validation[0].id == "math/validation/test/a/5.json"
    assert load(local_task(tmp_path, [math_row(1, unique_id="")], [math_row(5)]))[0][0].id == "math/train/0"


def test_an_answer_without_a_box_is_read_by_math_verify_where_that_is_asked_for(tmp_path: Path) -> None:
    row = {"problem": "p", "level": "Level 1", "type": "a", "solution": "We add, so that the answer is $\\frac{3}{4}$."}
    boxed = row | {"problem": "q", "solution": r"As 7 is odd, \boxed{8}."}
    train, _ = load(local_task(tmp_path, [row, boxed], [math_row(1)], parse_solutions=True))
    assert [is_equivalent(problem.ground_truth, truth) for problem, truth in zip(train, ("3/4", "8"), strict=True)] == [
        True,
        True,
    ]


def test_a_dataset_of_one_split_is_cut_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in qwedsacf/competition_math, which has neither configurations nor a test split."""
    rows = [math_row(number) for number in range(20)]
    asked = []

    def read(source: HubDataset, split: str, columns: Any, key: str, config: str | None = None) -> list[Row]:
        asked.append((source.hub, split, config))
        return [Row(f"row {number}", row, key) for number, row in enumerate(rows)]

    monkeypatch.setattr(HubDataset, "rows", read)
    task = Math(HubDataset(hub="qwedsacf/competition_math", revision=REVISION, held_out=5), Counts(train=15, validation=5))
    train, validation = load(task)
    questions = [{problem.question for problem in split} for split in (train, validation)]
    assert len(questions[1]) == 5 and not questions[0] & questions[1] and len(questions[0] | questions[1]) == 20
    assert load(task) == (train, validation) and set(asked) == {("qwedsacf/competition_math", "train", None)}
    with pytest.raises(UserError, match=r"tasks\.NAME\.source: the train split of math is empty"):
        Math(HubDataset(hub="qwedsacf/competition_math", revision=REVISION, held_out=21)).problems("train")


def test_gsm8k_from_local_files(tmp_path: Path) -> None:
    task = local_task(tmp_path, [gsm8k_row(1)], [gsm8k_row(2, "#### -7")], name="gsm8k")
    train, validation = load(task)
    assert train == [Problem("gsm8k/train/0", "How many apples are 1 apples?", "1234")]
    assert validation[0].ground_truth == "-7"
    with pytest.raises(UserError, match=r"val\.jsonl:1: no short answer after '####'"):
        load(local_task(tmp_path, [gsm8k_row(1)], [gsm8k_row(2, "We add.\n#### ")], name="gsm8k"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (math_row(1, level="hard"), "train.jsonl:2: level 'hard'"),
        (math_row(1, level="Level 6"), "train.jsonl:2: level 'Level 6'"),
        (math_row(1, answer=" "), "train.jsonl:2: an empty 'answer'"),
        (math_row(1, answer=r"\text{}"), "train.jsonl:2: the ground truth .* is empty"),
        ({"problem": "p", "level": "Level 1", "type": "a", "solution": "It is 5."}, r"train.jsonl:2: no \\boxed\{\}"),
        ({"problem": "p", "level": "Level 1", "type": "a"}, "train.jsonl:2: no column 'answer' or 'solution'"),
    ],
)
def test_unusable_math_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(local_task(tmp_path, [math_row(7), row], [math_row(8)]))


@pytest.mark.parametrize(
    ("train", "validation", "told"),
    [
        (2, 3, "validation: 3 problems expected, but the source has 1"),
        (1, 1, "train: 1 problems expected, but the source has 2"),
        (3, 1, "train: 3 problems expected, but the source has 2"),
    ],
)
def test_wrong_counts(tmp_path: Path, train: int, validation: int, told: str) -> None:
    counts = Counts(train=train, validation=validation)
    task = local_task(tmp_path, [math_row(1), math_row(3)], [math_row(2)], expected=counts)
    with pytest.raises(UserError, match=rf"tasks.NAME.expected.{told}"):
        load(task)


@pytest.mark.parametrize(
    ("name", "row", "response"),
    [
        ("math", {"level": "Level 1", "type": "a", "problem": "1 + 1?", "solution": r"It is \boxed{2}."}, r" It is \boxed{2}."),
        ("gsm8k", gsm8k_row(1, "Half is 48/2 = <<48/2=24>>24.\nSo <<24>>24.\n#### 24"), " Half is 48/2 = 24.\nSo 24."),
    ],
)
def test_solutions_are_traces_that_earn_the_reward(name: str, row: dict[str, Any], response: str, tmp_path: Path) -> None:
    task = local_task(tmp_path, [row], [row], name=name)
    ((problem, trace),) = task.traces("r1_zero")
    assert trace == f"{response} </think> <answer>{problem.ground_truth}</answer>" and [problem] == task.problems("train")
    assert task.score("r1_zero", [problem], [trace]).rewards[0]["reward"] == 1.0


# ------------------------------------------------------------------------------------------------------------- overlap


def problems(split: str, *questions: str) -> list[Problem]:
    return [Problem(f"{split}/{number}", question, "1") for number, question in enumerate(questions)]


def test_overlap_is_refused_or_dropped() -> None:
    train = problems("train", r"Find  $x\,$.", "Something else", r"what is $34,\!560$?")
    validation = problems("validation", "find $x$.\n", "What is $34,560$?", "New")
    source = LocalFiles(train="a", validation="b")
    with pytest.raises(UserError, match=r"2 questions .* \[.train/0., .train/2.\]. Set `tasks.NAME.drop_overlap: true` to"):
        separate(Gsm8k(source), train, validation)
    assert separate(Gsm8k(source, drop_overlap=True), train, validation) == ([train[1]], ["train/0", "train/2"])
    with pytest.raises(UserError, match=r"every training question is also a validation question"):
        separate(Gsm8k(source, drop_overlap=True), train[::2], validation)
    with pytest.raises(UserError, match=r"Set `drop_overlap = True` in the class Task to"):
        separate(Task(), train, validation)


def test_duplicate_ids_are_refused(tmp_path: Path) -> None:
    task = local_task(tmp_path, [math_row(1, unique_id="a"), math_row(2, unique_id="a")], [math_row(3)])
    with pytest.raises(UserError, match="math/train/a"):
        separate(task, *load(task))


# ----------------------------------------------------------------------------------------------------------------- Hub


def repository(folder: Path, files: dict[str, list[dict[str, Any]]]) -> str:
    """A folder laid out like a dataset on the Hub: parquet files CONFIG/SPLIT-00000-of-00001.parquet."""
    lines = []
    for name, rows in files.items():
        path = folder / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pandas.DataFrame(rows).to_parquet(path)
    for config in dict.fromkeys(name.partition("/")[0] for name in files):
        parts = [f"{{split: {split}, path: {config}/{split}-*}}" for split in ("train", "test")]
        lines.append(f"- {{config_name: {config}, data_files: [{', '.join(parts)}]}}\n")
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(lines)}---\n")
    return str(folder)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the arguments of calls to `datasets`, which keeps nothing."""
    calls: list[tuple[Any, ...]] = []
    load = datasets.load_dataset

    def noted(**where: Any) -> Any:
        calls.append(tuple(where[key] for key in ("path", "name", "split", "revision")))
        return load(**where)

    monkeypatch.setattr(datasets, "load_dataset", noted)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return calls


def hub_task(name: str, folder: str) -> Downloaded:
    task = make_task({"use": name, "source": {"hub": folder, "revision": REVISION}})
    assert isinstance(task, Downloaded) and isinstance(task.source, HubDataset)
    return task


def test_math_from_the_hub(tmp_path: Path, asked: list[tuple[Any, ...]]) -> None:
    files = {}
    for split in ("train", "test"):
        for number, subject in enumerate(SUBJECTS):
            row = {"problem": f"{split} {subject}?", "level": "Level 5", "type": subject}
            files[f"{subject}/{split}"] = [{**row, "solution": rf"So $\boxed{{{number}}}$."}]
    folder = repository(tmp_path / "math", files)
    train, validation = load(hub_task("math", folder))
    assert [p.ground_truth for p in train] == [str(n) for n in range(7)] == [p.ground_truth for p in validation]
    assert train[1] == Problem("math/train/1", "train counting_and_probability?", "1", 5, "counting_and_probability")
    assert asked == [(folder, *name.split("/"), REVISION) for name in files]


def test_gsm8k_from_the_hub(tmp_path: Path, asked: list[tuple[Any, ...]]) -> None:
    folder = repository(
        tmp_path / "gsm8k", {"main/train": [gsm8k_row(0), gsm8k_row(2, "nothing")], "main/test": [gsm8k_row(1)]}
    )
    task = hub_task("gsm8k", folder)
    (validation,) = task.problems("validation")
    assert (validation.ground_truth, validation.id) == ("1234", "gsm8k/validation/0")
    with pytest.raises(UserError, match=r"gsm8k main train row 2: no short answer"):
        task.problems("train")


# ---------------------------------------------------------------------------------------------------------- real files


def real_task(name: str, validation: str, expected: Counts) -> Downloaded:
    source = LocalFiles(train=str(REAL / name / "train.jsonl"), validation=str(REAL / name / validation))
    if not all(Path(path).exists() for path in (source.train, source.validation)):
        pytest.skip("the real files are not here")
    return {"math": Math, "gsm8k": Gsm8k}[name](source, expected)


def test_real_math() -> None:
    task = real_task("math", "validation.jsonl", Counts(train=7500, validation=5000))
    train, validation = load(task)
    with pytest.raises(UserError, match=r"2 questions of the training set are also in the validation set"):
        separate(task, train, validation)
    kept, dropped = separate(replace(task, drop_overlap=True), train, validation)
    assert (len(kept), len(dropped)) == (7498, 2)
    assert {p.level for p in validation} == {1, 2, 3, 4, 5}
    # The two problems that were published without a solution.
    assert {p.ground_truth for p in train if re.search(r"number_theory/711[57]\.json$", p.id)} == {"0"}


def test_real_gsm8k() -> None:
    task = real_task("gsm8k", "test.jsonl", Counts(train=7473, validation=1319))
    train, validation = load(task)
    assert separate(task, train, validation) == (train, [])
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", p.ground_truth) for p in (*train, *validation))
