"""What the documentation names exists.

Of docs/handouts.md the links lead to what the rows claim, the commands run something, and the settings are those in use.
"""

from __future__ import annotations

import ast
import html
import re
import shlex
import subprocess
import sys
from functools import lru_cache, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from dvc.cli.parser import get_main_parser
from study_parts import study_named

from grpo.cli import app
from grpo.study.compose import study_path
from grpo.study.config import GrpoConfig
from grpo.study.schema import Study

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
TEXT = (DOCS / "handouts.md").read_text()
ROWS = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in TEXT.splitlines() if line.startswith("| ")]
COMMANDS = sorted({row[-1].strip("`") for row in ROWS if len(row) == 3 and row[-1].startswith("`")})
PARAMS, STAGES = (yaml.safe_load((ROOT / f"{name}.yaml").read_text()) for name in ("params", "stages"))


def test_every_row_says_where_and_how() -> None:
    rows = [row for row in ROWS if len(row) == 3 and set(row[0]) != {"-"} and row[0] != "asked"]
    assert len(rows) > 80
    assert [row for row in rows if not row[1] or not re.fullmatch(r"`[^`]+`", row[2])] == []


def section(text: str, anchor: str) -> str:
    """The section of a page under the heading that has this anchor on GitHub; ValueError if there is none."""
    level, fenced, lines = 0, False, []
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and (heading := re.fullmatch(r"(#+) (.*)", line)):
            if level and len(heading[1]) <= level:
                break
            if re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
                level = len(heading[1])
        lines += [line] if level else []
    if not level:
        raise ValueError(anchor)
    return "\n".join(lines)


@lru_cache
def said_by(link: str) -> str:
    """What a link's target says, without markup: a file, a section of a page (by its anchor), or the names in a folder."""
    name, _, anchor = link.partition("#")
    path = DOCS / (name or "handouts.md")
    text = "\n".join(entry.name for entry in path.iterdir()) if path.is_dir() else path.read_text()
    if anchor:
        text = section(text, anchor)
    if path.suffix in {".svg", ".html"}:
        text = html.unescape(re.sub(r"<[^>]+>", "\n", text))
    return " ".join(text.split())


def unsaid(cell: str) -> list[str]:
    """The links of a cell whose target is missing, that quote nothing, or whose quotes do not stand in the target."""
    found = []
    for link, quotes in re.findall(r"""\]\(([^)"]+?)(?: "([^"]+)")?\)""", cell):
        try:
            text = said_by(link)
            lost = [quote for quote in quotes.replace("\\|", "|").split("; ") if not quote or quote not in text]
        except (OSError, ValueError):
            lost = ["no such file or heading"]
        found += [f"{link}: {quote or 'quotes nothing'}" for quote in lost]
    return found


def test_every_link_of_a_row_leads_to_what_it_quotes() -> None:
    assert [fault for row in ROWS if len(row) == 3 for fault in unsaid(row[1])] == []


def test_settings_that_rows_name_exist(mini_study: Study) -> None:
    names = {name for row in ROWS if len(row) == 3 for name in re.findall(r"(?<!\[)`([a-z_]+\.[a-z_.]+)`", row[1])}
    settings = {name for name in names if hasattr(mini_study, name.partition(".")[0]) and not name.startswith("tasks.")}
    assert len(settings) > 15
    for name in settings:
        reduce(getattr, name.split("."), mini_study)


def test_settings_that_stand_beside_those_of_trl_exist(mini_study: Study) -> None:
    section = (DOCS / "settings.md").read_text().split("\n## Beside TRL\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    values = {"gspo", "cispo", "reinforce_with_baseline", "adamw_8bit", "false"}
    values |= {"masked_mean", "masked_normalize", "token_mean"}
    elsewhere = {"published_losses", "max_prompt_tokens"}  # of examples and tasks
    names = {name for row in rows for name in re.findall(r"`([a-z_.0-9]+)", row)} - values - elsewhere
    assert len(names) > 25
    for name in names - {*type(mini_study.grpo).model_fields}:
        reduce(getattr, name.split("."), mini_study)


def selected(file: str) -> list[str]:
    """The tests of a file that pytest selects by itself."""
    tree = ast.parse((ROOT / file).read_text())
    marked = re.compile(r"mark\.(slow|slurm|vllm|gpu|adapters)\b")
    if any(marked.search(ast.unparse(node)) for node in tree.body if isinstance(node, ast.Assign)):
        return []
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [test.name for test in tests if not marked.search(" ".join(map(ast.unparse, test.decorator_list)))]


def dvc_stages() -> set[str]:
    """What `dvc repro` takes in the active study."""
    found = set()
    for name, stage in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].items():
        over = (PARAMS | STAGES)[stage["foreach"][2:-1]] if "foreach" in stage else ()
        found |= {name, *(f"{name}@{key}" for key in over)}
    return found


def parsed(arguments: list[str]) -> None:
    """Parse a command line of `grpo` down to the command that would run; an unknown name or option raises."""
    command: Any = typer.main.get_command(app)
    context = None
    while hasattr(command, "commands"):
        if not arguments or arguments[0].startswith("-"):
            return
        context = command.make_context("grpo", [], parent=context, resilient_parsing=True)
        _, command, arguments = command.resolve_command(context, arguments)
    assert command is not None, "no such command"
    command.make_context(command.name, list(arguments))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run_something(command: str) -> None:
    match command.split():
        case [file] if file.startswith("tests/"):
            assert selected(file)
        case [stage]:
            assert stage in dvc_stages()
        case ["python", script, "--file", _]:  # a file of the course
            assert subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True).stdout.count(
                "--file"
            )
        case _:
            require_command(command, "")


# Programs of others whose arguments are not looked at.
FOREIGN = {"chromium", "cd", "ln", "mkdir", "rm", "export", "mlflow", "touch", "source", "git", "lm_eval", "pip"}
PLACEHOLDER = re.compile(r"[A-Z]{2,}|[{…]|\.\.\.")


def require_command(line: str, page: str) -> None:
    """Fail unless each command of a line exists, with its options and with what it names here.

    What the page itself writes, such as a study, and names in capitals stand for something of the reader's.
    """
    for piece in line.split("&&"):
        words = [word for word in shlex.split(piece, comments=True) if word not in {"…", "..."}]
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        its_own = [word for word in words if PLACEHOLDER.search(word)]
        match words:
            case ["grpo", "study", "use" | "show" | "check", name, *_] if name not in its_own:
                parsed(words[1:])
                assert Path(name).stem in page.replace(f"use {name}", "") or study_path(name).is_file()
            case ["grpo", *arguments]:
                try:
                    parsed(arguments)
                except Exception as error:  # of the copy of click in typer
                    assert type(error).__name__ == "MissingParameter" and len(arguments) <= 2, line  # it is only named
            case ["make", "-C", _, *arguments] | ["make", *arguments]:
                targets = "\n".join((ROOT / name).read_text() for name in ("Makefile", "grpo/commands/project/Makefile"))
                for target in (word for word in arguments if "=" not in word):
                    assert re.search(rf"^{target}:", targets, re.M), line
            case ["dvc", _]:
                pass
            case ["dvc", *arguments]:
                asked = get_main_parser().parse_args(arguments)
                of_repro = [name for name in getattr(asked, "targets", None) or () if asked.cmd == "repro"]
                studies = "".join(path.read_text() for path in ROOT.glob("examples/*.yaml"))
                for name in {*of_repro} - dvc_stages() - {*its_own}:
                    assert f"{name.partition('@')[2]}:" in studies, line
            case ["snakemake", *arguments]:
                assert all((ROOT / after).is_dir() for word, after in pairwise(arguments) if word == "--profile"), line
            case ["python" | "python3", "-m", _, *_]:
                pass
            case [script, *arguments] if script == "python" or "/" in script:
                files = [word for word in (script, *arguments) if re.search(r"\.(py|sh)$", word)]
                assert all((ROOT / file).is_file() for file in files if file not in its_own), line
            case [program, *_]:
                assert program in FOREIGN or program.startswith("python"), line


NAMING = [
    *(page for page in PAGES if page.name != "CHANGELOG.md"),
    *sorted(ROOT.glob("studies/*.yaml")),
    *sorted(ROOT.glob("grpo/commands/project/**/*.*")),
]
NAMING += [*sorted(ROOT.glob("grpo/**/*.j2")), ROOT / "grpo/cli.py", ROOT / "grpo/commands/study.py"]


@pytest.mark.parametrize("page", NAMING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_or_a_template_names_exists(page: Path) -> None:
    text = page.read_text()
    named = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)).splitlines()
    named += re.findall(r"`((?:grpo|make|dvc|snakemake|python) [^`\n]+)`", text)
    named += re.findall(r'epilog="Example: (.*?)"', text)
    for line in filter(None, named):
        require_command(re.sub(r"{{.*?}}", "NAME", line), text)


def setting(path: str) -> Any:
    """A value of params.yaml by its path."""
    value: Any = PARAMS
    for key in path.split("."):
        value = value[key]
    return value


def same(written: str, value: Any) -> bool:
    """Whether a cell of a table says this value."""
    read = yaml.safe_load(written)
    return str(read) == str(value) or float(read) == float(value)


def test_settings_are_those_of_the_active_study_and_deviations_have_a_reason() -> None:
    rows = [(row[0].strip("`"), row[1], *row[-2:]) for row in ROWS if len(row) in {4, 6} and row[0].startswith("`")]
    equal = re.findall(
        r"`([\w.]+)`\s(\[.*?\]|[^\s,]+)[,.]\s", TEXT.partition("\nEqual in both: ")[2].partition("\n\n")[0] + "\n"
    )
    rows += [(name, value, value, "") for name, value in equal]
    assert len(equal) > 10 and len(rows) > 40
    arm = PARAMS["grpo"] | PARAMS["experiments"]["grpo_keyword_inclusion"]["arms"]["grpo"]
    for name, handout, active, why in rows:
        assert same(active, setting(name) if "." in name else arm[name]), name
        assert why or same(handout, yaml.safe_load(active)), f"{name} deviates without a reason"
        section, _, key = name.partition(".")
        for config in (GrpoConfig(), study_named("math-2xh100").grpo) if section == "grpo" else ():
            assert same(handout, getattr(config, key)), f"{name}: the default and that of real studies are the handout's"


# --------------------------------------------------------------------------------------------------------- all pages


def test_every_link_leads_somewhere() -> None:
    broken, followed = [], 0
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", target):  # on the web
                continue
            path, _, anchor = target.partition("#")
            file, followed = (page.parent / path if path else page), followed + 1
            try:
                _ = section(file.read_text(), anchor) if anchor else file.stat()
            except (OSError, ValueError):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken
    assert followed > 100


def test_every_experiment_is_described() -> None:
    """One that somebody adds need not be."""
    assert set(PARAMS["experiments"]) <= set(re.findall(r"^- `(\w+)`: ", (DOCS / "study.md").read_text(), re.M))


def test_the_reward_the_advantage_and_the_loss_of_the_docs_do_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from grpo.learner.advantages import own_advantages
    from grpo.learner.losses import LossInputs, bind_loss
    from grpo.tasks.rewards import find_reward

    for name, code in re.findall(
        r"^```python\n# studies/(\w+\.py)\n(.*?)^```$", (DOCS / "extending.md").read_text(), re.M | re.S
    ):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = find_reward("my_rewards:short")(completion_ids=[[1, 2, 3], [1]], answer_reward=[1.0, 0.0], prompts=["", ""])
    assert rewards == pytest.approx([0.997, 0.0])
    groups, lengths = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([[2.0, 8.0, 2.0], [1.0, 2.0, 3.0]])
    advantages = own_advantages("my_advantages:shorter_first", {"weight": 0.5}, groups, lengths)
    assert advantages.tolist() == pytest.approx([2 - 3.25 / 3, 1.25 - 3.25 / 3, -3.25 / 3, 0, 0, 0])  # 1 + 0.5 * 4 / 2, * 4 / 8
    loss, measured = bind_loss("my_losses:clip_higher", {"clip_high": 0.28})
    log_ratios, ones = torch.log(torch.tensor([[1.5, 1.25, 0.5]])), torch.ones(1, 1)
    inputs = LossInputs(log_ratios, torch.zeros(1, 3), ones, ones, torch.ones(1, 3, dtype=torch.bool), cliprange=0.2)
    per_token, metrics = loss(inputs)
    assert per_token[0].tolist() == pytest.approx([-1.28, -1.25, -0.5])
    assert metrics["clipped"].tolist() == [[True, False, False]] and measured == ()
