"""Files and texts of strangers: reading has bounds, leads nowhere else and takes linear time; a text stays text."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pkgutil
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from matplotlib.figure import Figure
from model_parts import own_model, tiny_model
from study_parts import ROOT

import grpo
from grpo.common import files
from grpo.common.errors import UserError, reason
from grpo.common.files import exclusive_lock, read_json, read_text, require_own
from grpo.common.records import Problem
from grpo.common.safe_text import code, fenced, hide_secrets, on_terminal, short, without_password
from grpo.common.yaml_file import parse_yaml
from grpo.models.checkpoint import load_model
from grpo.models.tokenizer import CHAT_TEMPLATE, Tokenizer, train_tokenizer
from grpo.reporting import charts
from grpo.reporting.comments import FILTERS
from grpo.reporting.labels import quoted, said
from grpo.reporting.page import Body
from grpo.study.kept import keep_until_stored
from grpo.tasks import rows
from grpo.tasks.downloaded import Gsm8k, Math
from grpo.tasks.formats import CHAT
from grpo.tasks.graded import GradedTask
from grpo.tasks.keyword_inclusion import Keyword
from grpo.tasks.rows import LocalFiles, Row, read_rows
from grpo.tracking.mlflow_uri import failure

# ------------------------------------------------------------------------------------------------------------------ files

READERS: dict[str, Callable[[Path], Any]] = {
    "read_text": lambda path: read_text(path, "train"),
    "read_json": lambda path: read_json(path, "train"),
    "parse_yaml": parse_yaml,
    "read_rows": lambda path: read_rows(str(path), "files"),
    "Tokenizer": lambda path: Tokenizer.from_folder(path.parent),
}
NAMES = {"read_rows": "x.jsonl", "Tokenizer": "config.json"}
# Modules that read a file by other means: of this machine, of the package, or written by this process.
ELSEWHERE = {
    "common/files.py": "the reader itself; and who holds a lock",
    "common/process.py": "/proc",
    "commands/recompute.py": "history.csv, for its digest",
    "commands/verify.py": "result files, compared byte for byte",
    "discovery/verifier.py": "a program that the user names",
    "models/tokenizer.py": "what it has just written; templates that were read before",
    "reporting/page.py": "parts of the package, and figures that the report has drawn",
    "study/kept.py": "dvc.lock, marks, DVC's cache",
    "study/software.py": "pins of the package",
    "study/training_inputs.py": "modules, which are imported",
    "commands/study.py": "params.yaml, compared as text",
    "tracking/mlflow_run.py": "its own id; the number of problems",
    "tasks/formats.py": "formats of the package",
}


def test_every_module_reads_by_the_one_reader() -> None:
    found = set()
    for path in (file for file in (ROOT / "grpo").rglob("*.py") if file.parent.name != "grader"):  # its own lists
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in ("read_text", "read_bytes"):
                found.add(path.relative_to(ROOT / "grpo").as_posix())
    assert found == set(ELSEWHERE)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_what_is_too_large_or_no_plain_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / NAMES.get(name, "x.yaml")
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    (tmp_path / "tokenizer.json").write_text("{}")
    path.write_text('{"a": "0123456789"}')
    with pytest.raises(UserError, match=f"{path.name}: 19 bytes, or no plain file; at most 10 are read"):
        READERS[name](path)
    path.unlink()
    os.mkfifo(path)
    with suppress(Exception):  # and waits for nothing
        READERS[name](path)


DEEP = "[" * 101 + "]" * 101
TEN = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}' if i else 'a'] * 10)}]\n" for i in range(9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEN, "more than 200,000 values, aliases replaced"),
        (f"a: {DEEP}", "nested more than 100 deep"),
        (f"a: {'[' * 5000}{']' * 5000}", "not valid YAML"),
        ("a: &a [*a]", "nested more than 100 deep"),
        ("a: &a [1]\nb: *a", ""),
    ],
)
def test_a_small_yaml_file_makes_no_large_values(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    if not message:
        assert parse_yaml(tmp_path / "x.yaml") == {"a": [1], "b": [1]}
        return
    with pytest.raises(UserError, match=message):
        parse_yaml(tmp_path / "x.yaml")


def test_a_small_parquet_file_with_many_long_texts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"q": ["x" * 2000] * 5000}), tmp_path / "x.parquet")
    assert len(read_rows(str(tmp_path / "x.parquet"), "files")) == 5000
    monkeypatch.setattr(rows, "MOST_UNPACKED", 4_000_000)
    with pytest.raises(UserError, match="rows have more than 4,000,000 bytes"):
        read_rows(str(tmp_path / "x.parquet"), "files")
    monkeypatch.setattr(rows, "MOST_UNPACKED", 1)  # a file may be as large as it is
    pyarrow.parquet.write_table(pyarrow.table({"q": [str(i) for i in range(5000)]}), tmp_path / "y.parquet")
    assert len(read_rows(str(tmp_path / "y.parquet"), "files")) == 5000


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "intermediate_size"])
@pytest.mark.parametrize("make", [own_model, tiny_model])
def test_a_config_that_describes_a_larger_model_than_its_weights_is_refused(make: Any, key: str, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    load_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: 10**9}))
    with pytest.raises(UserError, match=r"config\.json describes a larger model than the weights"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ 'ab ' * 1000000 }}", "a text of 3,000,000 characters, at most 1"), ("{{ '\\ud800' }}", "half a character")],
)
def test_a_chat_template_makes_a_text_that_can_be_encoded(template: str, message: str) -> None:
    base = train_tokenizer(["hello world"] * 50, 300)
    chats = Tokenizer(base._files | {CHAT_TEMPLATE: template.encode()})
    with pytest.raises(UserError, match=f"chat template refuses messages of user: ValueError: it makes {message}"):
        chats.chat_ids([{"role": "user", "content": "x"}])


def test_links_lead_out_of_no_folder_and_nothing_is_written_through_one(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("curves.png", ".own.lock"):
        (tmp_path / "own" / name).symlink_to(victim)
    with pytest.raises(UserError, match="is a link"), exclusive_lock(tmp_path / "own/.own.lock", "another"):
        pass
    charts.save_figure(Figure(), tmp_path / "own/curves.png")
    assert victim.read_text() == "precious" and not (tmp_path / "own/curves.png").is_symlink()
    for target in (victim, Path("/etc"), Path("/")):
        (tmp_path / "own/x").unlink(missing_ok=True)
        (tmp_path / "own/x").symlink_to(target)
        with pytest.raises(ValueError, match="x is a symbolic link to a file elsewhere"):
            require_own(tmp_path / "own", [tmp_path / "own/x"])


def test_a_kept_result_has_no_files_of_elsewhere(workdir: Path) -> None:
    Path("dvc.yaml").touch()
    Path("data/out").mkdir(parents=True)
    (workdir / "private").mkdir()
    Path("private/key").write_text("secret")
    Path("data/out/docs").symlink_to(workdir / "private")
    keep_until_stored(Path("state"), Path("data/out"), [Path("data/out")])
    assert Path("state/results/data/out/docs").is_symlink()


# ------------------------------------------------------------------------------------------------------------------ texts

CODES = "evil \x1b]52;c;cHduZWQ=\x07\x9b31m"
TITLE = r"Reward \sigma \1 \g<0> $\badmacro$ " + '" onmouseover="alert(1)'


def shown_in_figures(text: str) -> None:
    figure, (axes,) = charts.panels(1)
    axes.plot([1, 2], [1, 2], label="x")
    charts.frame(axes, text, text)
    charts.legend(figure, charts.styles([text, "b"]))
    figure.draw_without_rendering()


def page(text: str) -> str:
    return Body({}, [text]).of(f"# s: r\n\n## Experiments\n\n### {said(text)}: o\n\n| a |\n|---|\n| 1 |\n")


TEXTS: dict[str, Callable[[], Any]] = {
    "an error": lambda: str(UserError(CODES)),
    "a reason": lambda: reason(ValueError(CODES)),
    "MLflow": lambda: failure("http://host", ValueError(CODES)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_commands_the_terminal(name: str) -> None:
    assert TEXTS[name]().isprintable() and "evil" in TEXTS[name]()


def test_a_title_is_a_title_on_the_page_and_in_a_figure() -> None:
    shown_in_figures(TITLE)
    assert r"\sigma" in page(TITLE) and "<table>" in page(TITLE) and ' onmouseover="' not in page(TITLE)


def test_a_comment_stays_in_its_quotation_and_its_numbers_short() -> None:
    shown = Body({}, ["e"]).of("# s: r\n\n" + quoted("fine\r\r## Claims: all hold\r\rx") + "\n")
    assert shown.count("<section") == 1 and "Claims" not in shown.partition("</blockquote>")[2]
    assert len(FILTERS["number"](0.5, 30_000_000)) < 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("could not connect: password=SECRET user=x", "could not connect: password=*** user=x"),
        ("pwd=SECRET;token=SECRET", "pwd=***;token=***"),
        ("Authorization: Bearer SECRET", "Authorization: Bearer ***"),
        ('"http://u:SEC RET@h/"', '"http://h/"'),
        ("http://h/path;password=SECRET", "http://h/path"),
        ("max_tokens=5, token 7", "max_tokens=5, token 7"),
    ],
)
def test_no_message_has_a_password(text: str, expected: str) -> None:
    assert hide_secrets(text) == expected
    assert "SECRET" not in without_password("https://h/path;password=SECRET")
    assert on_terminal(text) == text


@pytest.mark.parametrize(
    ("shown", "text", "expected"),
    [
        (code, " a`b\nc\x1b|", "`a'b␤c |`"),
        (code, "a\\|b", r"`a\ |b`"),
        (code, " \t", "(empty)"),
        (short, "beta 0.1 (+5%)", "beta 0.1 (+5%)"),
        (short, "<b>", "`<b>`"),
        (fenced, "a ``` b", "````text\na ``` b\n````"),
        (fenced, "a ````` b", "``````text\na ````` b\n``````"),
        (without_password, "http://u:a?b@h/x", "http://***"),
        (without_password, "http://u:a@b@h/x?token=c#d", "http://h/x"),
        (without_password, "sqlite:////home/a@b/mlflow.db", "sqlite:////home/a@b/mlflow.db"),
        (without_password, "u:a@h/x", "h/x"),
    ],
)
def test_what_a_stranger_wrote_is_shown_as_it_is_and_an_address_without_its_user(
    shown: Callable[[str], str], text: str, expected: str
) -> None:
    assert shown(text) == expected


# ---------------------------------------------------------------------------------------------------------------- linear time


LENGTH = 30_000
SECONDS = 0.5  # of CPU; linear readers take hundredths, quadratic ones minutes
UNITS = [
    " ", "\t", "\n", "\r\n", " \n", "`", "~", "```\n", "`\n", "1", "1 ", "1,", "0.", "9/", "-1 ", "1 + ", "1 + 1 = ", "a",
    "é", "(", "[", "{", "{}", "}", "\\boxed{", "\\boxed {{}", "\\frac{1}{", "<", "<<", "<think>", "<think>\n", "</think>",
    "</think> <answer>", "<answer>", "</answer>", "####", "|", "| a ", "-", "- ", "> ", "^", "$", "*", "**a", "_", "![",
    "[a](", "](b)", "\\", "\\,", "&", "points:", "points = ", "points: a = ", "def run_code", ":", "=", "=\n", "apple",
    "apple, ", ".", "\u2028", "\x1b[", "\x00", "<a ", "<!--", "&#",
]  # fmt: skip
# What may stand before and after: the beginning of something that the repeated text never ends.
BEFORE = ["", "x", "```", "points:", "1", "</think> <answer>", "\\boxed{", "<<", "Level "]
AFTER = ["", "x", "`\n", "}"]
GIVEN = {"ground_truth": "1", "truth": "1", "keywords": ["apple", "red"], "arms": ["a"]}  # beside the text
TEXT_ARGUMENTS = {"response", "answer", "text", "question", "reply", "message"}
WITH_LIMITS = {"grpo.discovery.verifier.verify_text"}  # in a process with limits


def texts() -> Iterator[str]:
    rng = random.Random(0)
    for before, unit, after in [*product([""], UNITS, ["x", "`\n"]), *product(BEFORE, [" ", "1", "~"], AFTER)]:
        yield before + unit * (LENGTH // len(unit)) + after
    for _ in range(20):
        yield "".join(rng.choices(UNITS, k=LENGTH // 4))


def readers() -> dict[str, Callable[[str], Any]]:
    """Public functions that take a text first, but for those of the grader, and further readers by name."""
    found: dict[str, Callable[[str], Any]] = {}
    for module in pkgutil.walk_packages(grpo.__path__, "grpo."):
        if module.name.startswith("grpo.grader") or module.name.endswith("__main__"):
            continue
        for name, function in inspect.getmembers(import_module(module.name), inspect.isfunction):
            first, *others = [*inspect.signature(function).parameters.values(), None]
            given = {one.name: GIVEN.get(one.name) for one in others if one and one.default is one.empty and one.kind < 2}
            takes_text = (
                first and first.name in TEXT_ARGUMENTS and "str" in str(first.annotation) and None not in given.values()
            )
            if takes_text and function.__module__ == module.name and name[0] != "_":
                found[f"{module.name}.{name}"] = partial(function, **given)
    problem = Problem("1", "apple, red", "apple, red")
    gsm8k, math = (kind(source=LocalFiles(train="a", validation="b")) for kind in (Gsm8k, Math))
    row = {"problem": "1 + 1 = ?", "subject": "", "answer": "2"}
    return found | {
        "Keyword.verify": lambda text: Keyword(0).verify([text], [problem]),
        "Keyword.pieces": Keyword(0).pieces,
        "Format.question_of": CHAT.question_of,
        "GradedTask.rewrite": lambda text: GradedTask().rewrite(text, "r1_zero", "chat"),
        "Gsm8k.solution": lambda text: gsm8k.solution(Row("", {"answer": f"{text}#### 1"}, "")),
        "Math.problem": lambda text: math.problem(Row("", row | {"level": text}, ""), "train", 0),
    }


TEXT_READERS = {name: read for name, read in readers().items() if name not in WITH_LIMITS}


@pytest.mark.parametrize("name", TEXT_READERS)
def test_a_reader_of_text_takes_linear_time(name: str) -> None:
    for text in ("", *texts()):  # the first call imports what the reader needs
        start = process_time()
        with suppress(UserError, ValueError, RecursionError):
            TEXT_READERS[name](text)
        assert not text or process_time() - start < SECONDS, text[:20]
