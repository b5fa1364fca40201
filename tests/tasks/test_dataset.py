"""A task from two columns of a dataset, in each kind of file and in a repository; prompts, also those too long."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from grpo.common.errors import UserError
from grpo.common.records import Completion, Problem, read_problems, write_records
from grpo.models.tokenizer import Tokenizer
from grpo.tasks.build import build_dataset, longest_prompt
from grpo.tasks.formats import QUESTION_ONLY, R1_ZERO
from grpo.tasks.keyword_inclusion import KEYWORD
from grpo.tasks.rewards import apply_reward, find_reward
from grpo.tasks.rows import read_rows
from grpo.tasks.task import Format, ScoredBatch, Split, Task, make_task, rewards

ROWS = {
    "train": [{"asked": "1 + 1?", "solved": "2", "id": 7}, {"asked": "Half, as a decimal?", "solved": "0.5", "id": 8}],
    "validation": [{"asked": "What is 3 {times} 2?", "solved": "6", "id": 9}],
}
EXPECTED = {
    "train": [Problem("train/0", "1 + 1?", "2"), Problem("train/1", "Half, as a decimal?", "0.5")],
    "validation": [Problem("validation/0", "What is 3 {times} 2?", "6")],
}
REVISION = "0123456789" * 4


def _with_a_column_twice() -> bytes:
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table([["?"], ["!"], ["1"]], ["asked", "asked", "solved"]), buffer)
    return bytes(buffer.getvalue())


TWICE = _with_a_column_twice()


@pytest.fixture(autouse=True)
def _nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def write(folder: Path, ending: str, rows: dict[str, list[dict[str, Any]]] = ROWS) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    files = {split: str(folder / f"{split}.{ending}") for split in rows}
    for split, file in files.items():
        frame = pandas.DataFrame(rows[split])
        if ending == "csv":
            frame.to_csv(file, index=False)
        elif ending == "parquet":
            frame.to_parquet(file)
        else:
            frame.to_json(file, orient="records", lines=True)
    return files


def task(**settings: Any) -> Any:
    return make_task({"use": "dataset", "question": "asked", "answer": "solved", **settings}, "tasks.main")


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_two_columns_of_files_are_problems(tmp_path: Path, ending: str) -> None:
    found = task(files=write(tmp_path / "rows", ending))
    for split in ("train", "validation"):
        assert found.problems(split) == found.problems(split) == EXPECTED[split]


# Ground truths as JSON and CSV write them; each must come out as it stands there.
AS_WRITTEN = ["1", "0.5", "9007199254740993", "007", "1.50", "0.10000000000000001", "-0", "1e3", "12345678901234567890123"]


@pytest.mark.parametrize("n", [1, 9, 10, 101])
def test_parts_of_one_file_share_its_rows_out(tmp_path: Path, n: int) -> None:
    path = tmp_path / "rows[1].jsonl"
    path.write_text("".join(json.dumps({"question": str(row)}) + "\n" for row in range(n)))
    first, middle, last = (read_rows(f"{path}[{part}]", "files") for part in (":60%", "60%:90%", "90%:"))
    assert [row.text("question") for row in [*first, *middle, *last]] == [str(row) for row in range(n)]
    assert len(first) == n * 60 // 100 and len(last) == n - n * 90 // 100
    assert len(read_rows(str(path), "files")) == n  # brackets of a name are no part


@pytest.mark.parametrize("verify", ["exact", "math"])
def test_a_ground_truth_is_the_text_that_stands_in_the_file(tmp_path: Path, verify: str) -> None:
    rows = [f"What is it?,{text}" for text in AS_WRITTEN]
    (tmp_path / "a.csv").write_text(
        "\n".join(["asked,solved", *rows, '"Two\nlines, and ""quotes""",None']), encoding="utf-8-sig"
    )
    of_json = [text for text in AS_WRITTEN if text != "007"]  # which JSON can hold as a string only
    lines = [f'{{"asked": "a\u2028b\x85c", "solved": {text}}}' for text in of_json]  # characters that end no line of a file
    lines += ['{"asked": "?", "solved": "007"}']
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines))
    (tmp_path / "c.json").write_text("[" + ",\n".join(lines) + "]")
    found = task(files={"train": f"{tmp_path}/a.csv", "validation": f"{tmp_path}/b.jsonl"}, verify=verify)
    csv = found.problems("train")
    assert [p.ground_truth for p in csv] == [*AS_WRITTEN, "None"]
    assert csv[-1].question == 'Two\nlines, and "quotes"'
    assert [p.ground_truth for p in found.problems("validation")] == [*of_json, "007"]
    whole = task(files={"train": f"{tmp_path}/c.json", "validation": f"{tmp_path}/b.jsonl"}, verify=verify)
    assert [p.ground_truth for p in whole.problems("train")] == [*of_json, "007"]


def test_parquet_has_numbers_of_its_own(tmp_path: Path) -> None:
    """Integers are exact, float16 and float32 have their shortest digits, and a decimal keeps its zeros."""
    columns = {
        ("9007199254740993", "7"): pyarrow.array([9007199254740993, 7]),
        ("0.1", "0.33333334"): pyarrow.array([0.1, 1 / 3], pyarrow.float32()),
        ("0.1", "0.3333"): pyarrow.array(np.array([0.1, 1 / 3], np.float16)),
        ("0.1", "0.3333333333333333"): pyarrow.array([0.1, 1 / 3]),
        ("1.50", "-0.25"): pyarrow.array([Decimal("1.50"), Decimal("-0.25")]),
        ("007", "1.0"): pyarrow.array(["007", "1.0"]).dictionary_encode(),
    }
    for told, column in columns.items():
        table = pyarrow.table({"asked": ["a", "b"], "solved": column})
        for folder in ("files", "repository"):
            (tmp_path / folder).mkdir(exist_ok=True)
            pyarrow.parquet.write_table(table, tmp_path / folder / "train.parquet")
        files = task(files=dict.fromkeys(("train", "validation"), f"{tmp_path}/files/train.parquet"), verify="exact")
        assert [p.ground_truth for p in files.problems("train")] == [*told]
        hub = task(hub=str(tmp_path / "repository"), revision=REVISION, verify="exact")
        assert [p.ground_truth for p in hub.problems("train")] == [*told]
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def on_hub(folder: Path, name: str, content: str) -> Any:
    folder.mkdir()
    (folder / name).write_text(content)
    return task(hub=str(folder), revision=REVISION, verify="exact")


def test_a_column_on_the_hub_that_was_changed_in_reading_is_refused(tmp_path: Path) -> None:
    rows = [f"?,{text}" for text in AS_WRITTEN]
    csv = on_hub(tmp_path / "csv", "train.csv", "\n".join(["asked,solved", *rows, "?,None"]))
    assert [p.ground_truth for p in csv.problems("train")] == [*AS_WRITTEN, "None"]
    whole = on_hub(
        tmp_path / "whole", "train.jsonl", '{"asked": "?", "solved": 1}\n{"asked": "?", "solved": 9007199254740993}\n'
    )
    assert [p.ground_truth for p in whole.problems("train")] == ["1", "9007199254740993"]
    for number, rows in enumerate((["1", "0.5"], ["1", '"007"'], ["1", "12345678901234567890123"])):
        lines = "".join(f'{{"asked": "?", "solved": {text}}}\n' for text in rows)
        with pytest.raises(UserError, match=r"column 'solved': .* Download the files and name them in `tasks\.main`"):
            on_hub(tmp_path / f"mixed{number}", "train.jsonl", lines).problems("train")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b'{"asked": "?", "solved": "1"}\n{"asked": "\\ud800", "solved": "1"}', r"a\.jsonl:2: column 'asked' holds"),
        ("a.jsonl", b'{"asked": ' + b"[" * 100_000, r"a\.jsonl: not valid JSONL \(line 1: it is nested too deeply\)"),
        ("a.jsonl", b'{"asked": "?", "solved": "1"}\n{"asked": "\xff", "solved": "1"}', r"a\.jsonl: not valid JSONL .*utf-8"),
        ("a.jsonl", b'{"asked": "?", "solved": true}', r"a\.jsonl:1: column 'solved' holds True"),
        ("a.csv", b"asked,solved\n?,1\n?,2,3\n", r"a\.csv: not valid CSV \(line 3: the number of cells"),
        ("a.csv", b"asked,asked,solved,,\n?,!,1,,\n", r"a\.csv: not valid CSV \(a column is there twice: asked"),
        ("a.csv", b"asked,solved\n", r"a\.csv: has no rows\. Add some, or name another file in `tasks\.main\.files\.train`\."),
        ("a.parquet", TWICE, r"a\.parquet: not valid PARQUET \(.*asked"),
        ("a.txt", b'{"asked": "?", "solved": "1"}', r"a\.txt: cannot be read\. Use a suffix of \.jsonl, .*csv"),
        ("a.csv", b"asked,solved\n?\n", r"a\.csv: not valid CSV \(line 2: the number of cells"),
        ("a.jsonl", b'{"asked": "?", "solved": " "}', r"a\.jsonl:1: the answer is empty"),
        ("a.jsonl", b'{"asked": ["user", {"role": "system"}], "solved": "1"}', r"a\.jsonl:1: column 'asked' has no message of"),
        ("a.jsonl", b'\xef\xbb\xbf{"asked": " ", "solved": "1"}', r"a\.jsonl:1: the question is empty"),
        ("a.json", b' \n[{"asked": " ", "solved": "1"}]', r"a\.json row 1: the question is empty"),
        ("a.jsonl", b'{"problem": "?", "solved": "1"}', r"a\.jsonl:1: no column 'asked' \(columns: problem, solved\)"),
        # Rows are named by their lines in an editor.
        ("a.jsonl", b'{"asked": "?", "solved": "2"}\n\n{"asked": " ", "solved": "3"}', r"a\.jsonl:3: the question is empty"),
        ("a.csv", b'asked,solved\n"one\nand one?",2\n\n" ",3\n', r"a\.csv:5: the question is empty"),
    ],
)
def test_what_the_next_hand_cannot_take_is_refused_where_it_is_read(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told):
        task(files=dict.fromkeys(("train", "validation"), f"{tmp_path}/{name}"), verify="exact").problems("train")


@pytest.mark.parametrize("digits", [4_200, 4_400])
def test_an_integer_of_thousands_of_digits_is_read_or_refused(tmp_path: Path, digits: int) -> None:
    """Python converts no text of more than 4,300 digits to an integer, and the grader accepts no ground truth that long."""
    (tmp_path / "a.jsonl").write_text(f'{{"asked": "?", "solved": {"7" * digits}}}')
    files = dict.fromkeys(("train", "validation"), f"{tmp_path}/a.jsonl")
    assert task(files=files, verify="exact").problems("train")[0].ground_truth == "7" * digits
    with pytest.raises(UserError, match=r"a\.jsonl:1: the ground truth"):
        task(files=files).problems("train")


def test_a_repository_is_read_by_its_splits_and_parts_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS["train"] + ROWS["validation"]))
    found = task(hub=str(folder), revision=REVISION, splits={"train": "train[:2]", "validation": "train[2:]"})
    assert (found.problems("train"), found.problems("validation")) == (EXPECTED["train"], EXPECTED["validation"])
    with pytest.raises(UserError, match=r"repository test: could not be read at revision 0123.*test"):
        task(hub=str(folder), revision=REVISION).problems("validation")
    with pytest.raises(UserError, match=r"nobody/nothing train: could not be read .*HF_TOKEN"):
        task(hub="nobody/nothing", revision=REVISION).problems("train")


def test_answers_are_verified_as_the_study_says(tmp_path: Path) -> None:
    (tmp_path / "own_verifier.py").write_text("def close(answers, problems):\n    return [0.25] * len(answers)\n")
    files, half = write(tmp_path / "rows", "jsonl"), EXPECTED["train"][1]
    asked = [half] * 3
    answers = ["</think> <answer>1/2</answer>", "</think> <answer> 0.5 </answer>", "0.5"]
    for verify, expected in {"math": [1, 1, 0], "exact": [0, 1, 0], "own_verifier:close": [0.25, 0.25, 0]}.items():
        scored = task(files=files, verify=verify).score("r1_zero", asked, answers)
        assert [each["reward"] for each in scored.rewards] == expected and not any(scored.out_of_time)
    assert task(files=files, verify="own_verifier:close").own_code == ("own_verifier:close",)  # which runs depend on
    (tmp_path / "asks.py").write_text(
        "class Asks:\n    def reset(self, **row):\n        pass\n\n    def step(self, text):\n        pass\n"
    )
    asking = task(files=files, verify="own_verifier:close", environment="asks:Asks")
    assert asking.own_code == ("own_verifier:close", "asks:Asks")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_further_columns_reach_the_reward(tmp_path: Path, ending: str) -> None:
    """In text files a number stays text; without columns the files of problems are as they were."""
    (tmp_path / "by_column.py").write_text("def twice(id, answer_reward, **columns):\n    return [2 * float(i) for i in id]\n")
    own = task(files=write(tmp_path / "data", ending), columns=["id"])
    write_records(tmp_path / "train.jsonl", own.problems("train"))
    problems = read_problems(tmp_path / "train.jsonl")
    kept = 7 if ending == "parquet" else "7"
    assert problems[0].columns == {"id": kept} and replace(problems[0], columns={}) == EXPECTED["train"][0]
    completions = [Completion((1,), "", (0.0,), "stop")] * 2
    scored = ScoredBatch([rewards(True, True)] * 2, [False] * 2)
    found = apply_reward("by_column:twice", ["?"] * 2, completions, problems, scored, own.reward_columns)
    assert [each["reward"] for each in found.rewards] == [14.0, 16.0]
    find_reward("by_column:twice", own.reward_columns)
    with pytest.raises(UserError, match="missing a required argument: 'id'"):
        find_reward("by_column:twice")
    write_records(tmp_path / "plain.jsonl", EXPECTED["train"])
    assert "columns" not in (tmp_path / "plain.jsonl").read_text()


ONE_FILE = {"train": "rows/train.csv", "validation": "rows/train.csv"}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "name either `hub` or `files`, and not both"),
        ({"hub": "a/b", "revision": REVISION, "files": ONE_FILE}, "name either `hub` or `files`, and not both"),
        ({"hub": "a/b"}, "a/b: give the `revision`, 40 hex digits"),
        ({"files": ONE_FILE, "verify": "maths"}, "verify: expected math, exact, or an import path .* it is 'maths'"),
        ({"files": {"validation": "rows/train.csv"}}, r"^tasks\.main\.files\.train: missing\. Name a file to train on"),
        ({"files": ONE_FILE | {"train": "rows/train.csv[:1%]"}}, r"^tasks\.main: the train split is empty\. Check"),
    ],
)
def test_a_source_that_is_none_is_refused(
    settings: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows", "csv")
    with pytest.raises(UserError, match=told):
        task(**settings).problems("train")


@pytest.mark.parametrize(("column", "message"), [("level", "get a level already"), ("none", "no column 'none'")])
def test_a_further_column_that_cannot_be_one_is_refused(tmp_path: Path, column: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task(files=write(tmp_path / "data", "jsonl"), columns=[column]).problems("train")


def test_rows_that_cannot_be_used_are_skipped_where_the_study_says_so(tmp_path: Path) -> None:
    """The other rows keep their numbers, and each skipped row is named by its line."""
    lines = ['{"asked": "a?", "solved": "1"}', "", '{"asked": "b?", "solved": ""}', '{"asked": "c?", "solved": "3"}']
    lines += [r'{"asked": "d?", "solved": "\\frac{1}{2"}', '{"asked": "e?"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    files = dict.fromkeys(("train", "validation"), f"{tmp_path}/a.jsonl")
    found = task(files=files, skip_unusable=True)
    assert found.problems("train") == [Problem("train/0", "a?", "1"), Problem("train/2", "c?", "3")]
    skipped = found.skipped("train")
    assert [row.partition(": ")[0] for row in skipped] == [f"{tmp_path}/a.jsonl:{line}" for line in (3, 5, 6)]
    assert "ground truth" in skipped[0] and "braces" in skipped[1] and "no column 'solved'" in skipped[2]
    for verify in ("exact", "json:dumps"):  # neither needs an answer that is mathematics
        kept = task(files=files, skip_unusable=True, verify=verify).problems("train")
        assert [one.id for one in kept] == ["train/0", "train/2", "train/3"]
    with pytest.raises(
        UserError, match=r"^tasks\.main: the train split has no usable row; the first: .*a\.jsonl:1: no column 'problem'"
    ):
        task(files=files, skip_unusable=True, question="problem").problems("train")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_of_messages_are_asked_as_a_chat_that_adds_nothing(tmp_path: Path, ending: str) -> None:
    def row(asked: str, said: str) -> dict[str, Any]:
        earlier = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", asked), ("assistant", said)]
        return {"messages": [{"role": role, "content": content} for role, content in earlier], "source": "mine"}

    rows = {"train": [row("What is 1 + 1?", "2")], "validation": [row("Name a bird.", "a crow")]}
    settings = {"question": "messages", "answer": "messages", "verify": "exact", "system": "You are brief."}
    found = task(files=write(tmp_path / "rows", ending, rows), **settings)
    assert [(one.question, one.ground_truth) for one in found.problems("validation")] == [("Name a bird.", "a crow")]
    plain = found.formats["plain_chat"]
    assert (plain.prompt("Name a bird."), plain.system, plain.chat) == ("Name a bird.", "You are brief.", True)
    assert found.formats["chat"].system == "You are brief." and not found.formats["r1_zero"].system
    for response, answer in (("<think>A bird?</think>\na crow", "a crow"), (r"It is \boxed{2}.", "2"), ("a crow", "a crow")):
        assert plain.read(response) == answer
    rows["train"][0]["messages"].pop(3)
    rows["train"][0]["messages"].pop(1)
    with pytest.raises(UserError, match="column 'messages' has no message of the user"):
        task(files=write(tmp_path / "rows", ending, rows), **settings).problems("train")


# -------------------------------------------------------------------------------------------------- prompts that are too long


class Words(Task):
    """Questions of one, two, three... words."""

    formats = {"short": Format("{question}"), "long": Format("Tell me, please: {question}")}

    def __init__(self, longest: int, first: int = 1):
        self.longest, self.first = longest, first

    def problems(self, split: Split) -> list[Problem]:
        word = {"train": "old", "validation": "new"}[split]
        return [Problem(f"{split}/{n}", " ".join([word] * n), "") for n in range(self.first, self.longest + 1)]


def words(problem: Problem) -> int:
    return len(problem.question.split())


def task_of(**settings: object) -> Task:
    return make_task({"use": "test_dataset:Words", **settings}, "tasks.main")


def test_prompts_above_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    report = build_dataset(task_of(longest=5, max_prompt_tokens=3), tmp_path / "made", {"train": {"grpo.x": 3}}, words)
    for split in ("train", "validation"):
        assert [p.id for p in read_problems(tmp_path / f"made/{split}.jsonl")] == [f"{split}/{n}" for n in (1, 2, 3)]
        assert report[f"dropped_from_{split}_as_too_long"] == [f"{split}/4", f"{split}/5"] and report[split]["problems"] == 3
    with pytest.raises(UserError, match=r"grpo\.x: 4 .* split has 3 without 2 prompts above max_prompt_tokens\. Lower"):
        build_dataset(task_of(longest=5, max_prompt_tokens=3), tmp_path / "few", {"train": {"grpo.x": 4}}, words)
    assert not (tmp_path / "few").exists()
    skipping = task_of(longest=5, max_prompt_tokens=3)
    skipping.skipped = lambda split: ["row 7: no answer"]  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"split has 3 without 1 unusable rows and 2 prompts above max_prompt_tokens\."):
        build_dataset(skipping, tmp_path / "few", {"train": {"grpo.x": 4}}, words)
    with pytest.raises(UserError, match=r"grpo\.x: 6 .* split has 5\. Lower"):
        build_dataset(task_of(longest=5), tmp_path / "few", {"train": {"grpo.x": 6}})
    with pytest.raises(UserError, match=r"a: 6 .* train split has 5; b: 7 .* validation split has 5\. Lower them"):
        build_dataset(task_of(longest=5), tmp_path / "few", {"train": {"a": 6}, "validation": {"b": 7, "c": 5}})
    for limit in (0, -1, True, 2.0, "2"):
        with pytest.raises(UserError, match=rf"tasks\.main\.max_prompt_tokens: expected .* above 0.* but it is {limit!r}"):
            task_of(longest=1, max_prompt_tokens=limit)
    without = build_dataset(task_of(longest=5), tmp_path / "all", {})
    assert without["train"]["problems"] == 5 and "dropped_from_train_as_too_long" not in without


def test_a_prompt_is_as_long_as_in_the_format_in_which_it_is_longest(tokenizer: Tokenizer) -> None:
    problem = Problem("p", "Mia has 3 apples.", "3")
    lengths = {
        name: len(tokenizer(format.prompt(problem.question), add_special_tokens=False)["input_ids"])
        for name, format in Words.formats.items()
    }
    assert lengths["short"] < lengths["long"] == longest_prompt(task_of(longest=1), ["short", "long"], tokenizer, problem)
    assert longest_prompt(task_of(longest=1), ["short"], tokenizer, problem) == lengths["short"]
    with pytest.raises(UserError, match="the question '' makes a prompt without tokens"):
        Words.formats["short"].encode(tokenizer, "")


# ------------------------------------------------------------------------------------------------------------------ templates


def test_known_ends_and_stop_strings() -> None:
    assert (QUESTION_ONLY.template, KEYWORD.template[-1]) == ("{question}", ".")  # no line end is added
    assert R1_ZERO.template.endswith("User: {question}\nAssistant: <think>")
    assert (R1_ZERO.stop, QUESTION_ONLY.stop, KEYWORD.stop) == (("</answer>",), (), (".",))


def test_braces_are_nothing_special() -> None:
    question = r"What is $\frac{1}{2}$ of {x} %s {0}?"
    assert Format("{a} {question} {}").prompt(question) == "{a} " + question + " {}"
    twice = Format("{question}; again: {question}?")
    assert [twice.question_of(text) for text in ("x; again: x?", "x; again: y?", "; again: ?", "x; again: xy?", "")] == [
        *("x", None, "", None, None)
    ]
