"""What leaves the machine: `grpo publish`, `make submission`, and a course's tests run against this package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import course as courses
import numpy as np
import pytest
from huggingface_hub import HfApi, ModelCard
from report_parts import run, store
from scipy.stats import binomtest
from study_parts import Grpo, activate

from grpo.common.files import read_json, write_json, write_text
from grpo.common.yaml_file import to_yaml
from grpo.study import paths
from grpo.study.schema import load_study
from grpo.study.stages import stages_of
from grpo.study.training_inputs import task_inputs

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))

import submission

RUN, EQUAL = "grpo_learning_rate/3e-4/0", "grpo_baselines/reinforce_with_baseline/0"
BEST = paths.CHECKPOINTS / RUN / "best"
RIGHT = ((0, 3, 32), (8, 20, 32), (16, 40, 64))  # step, right answers, problems


@pytest.fixture
def project(workdir: Path) -> Path:
    """The smoke study with two finished runs, of which the second equals the first."""
    activate("smoke", workdir)
    outcomes = [(np.arange(problems) < right).astype(float) for _, right, problems in RIGHT]
    made = run("3e-4", [*outcomes[:2], outcomes[2][:32]])
    made.validation.loc[2, "val/answer_reward"] = outcomes[2].mean()
    study = load_study()
    write_text(paths.STAGES, to_yaml(stages_of(study)))
    made.config.update({"method": "grpo", "task": task_inputs(study, "main")})
    store(replace(made, last=outcomes[2]))
    arm = {"experiment": "grpo_baselines", "arm": "reinforce_with_baseline", "config": made.config | {"same_as": RUN}}
    store(replace(made, last=outcomes[2], **arm))
    for kind, (step, right, problems) in {"best": RIGHT[1], "last": RIGHT[2]}.items():
        write_text(paths.CHECKPOINTS / RUN / kind / "model.safetensors", f"weights of step {step}")
        about = {"step": step, "answer_reward": right / problems, "prompt": "r1_zero", "started_from": f"{workdir}/model"}
        write_json(paths.CHECKPOINTS / RUN / kind / "metadata.json", about)
    return workdir


def interval(step: int, right: int, problems: int) -> str:
    """Value and Wilson interval by scipy, and the number of problems."""
    ends = binomtest(right, problems).proportion_ci(method="wilson")
    return f"{right / problems:.3f} ({ends.low:.3f} to {ends.high:.3f}) | {problems}"


def test_the_card_says_what_the_result_files_say(project: Path, grpo: Grpo) -> None:
    code, said, error = grpo("publish", RUN, "--out", "shared", "--license", "apache-2.0")
    assert code == 0 and "shared: best checkpoint of" in said, error
    card = ModelCard.load("shared/README.md")
    assert (card.data.license, card.data.base_model, card.data.tags) == ("apache-2.0", None, ["grpo"])
    rows = dict(line.strip("| ").split(" | ", 1) for line in card.text.splitlines() if line.startswith("| "))
    for row, label in zip(RIGHT, ("before training", "**this checkpoint**", "the run's last evaluation"), strict=True):
        assert rows[f"{row[0]}: {label}"] == interval(*row)
    assert "the highest of 2 evaluations" in card.text and f"commit: `{'1' * 40}`\n" in card.text
    assert f"`dvc repro train@grpo_learning_rate-3e-4` and `grpo publish {RUN} --kind best`" in card.text
    assert "task `arithmetic`" in card.text and load_study().task("main").formats["r1_zero"].template in card.text
    assert str(project) not in card.text and "base model: a local folder" in card.text
    assert [path.name for path in Path("shared").iterdir() if path.name != "README.md"] == ["model.safetensors"]
    code, said, _ = grpo("publish", RUN, "--kind", "last")
    text = Path("published/grpo_learning_rate--3e-4--0-last/README.md").read_text()
    assert code == 0 and "not chosen by its reward" in text and "licence of these weights: not stated" in text


def test_a_run_that_equals_another_has_its_weights(project: Path, grpo: Grpo) -> None:
    code, said, _ = grpo("publish", EQUAL, "--out", "shared")
    assert code == 0 and f"{EQUAL} equals {RUN}; this is the checkpoint of that run" in said
    assert Path("shared/model.safetensors").read_bytes() == (BEST / "model.safetensors").read_bytes()
    assert f"The run equals `{RUN}`" in Path("shared/README.md").read_text()


def test_a_base_model_of_the_hub_is_named_and_its_licence_not_invented(project: Path, grpo: Grpo) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    text = Path("params.yaml").read_text()
    start, end = text.index("  main:\n    source: pretrain"), text.index("  keyword:", text.index("models:"))
    hub = f"  main: {{source: hub, repo: someone/model, revision: {revision}}}\n"
    Path("params.yaml").write_text(text[:start] + hub + text[end:])
    assert grpo("publish", RUN, "--out", "from-another")[0] == 0  # what the run started from is not the model that is named now
    assert ModelCard.load("from-another/README.md").data.base_model is None
    write_json(BEST / "metadata.json", read_json(BEST / "metadata.json", "") | {"started_from": f"someone/model at {revision}"})
    assert grpo("publish", RUN, "--out", "shared")[0] == 0
    card = ModelCard.load("shared/README.md")
    assert card.data.base_model == "someone/model" and card.data.license is None
    assert f"at revision `{revision}`" in card.text and "licence is on its page" in card.text


def other_reward() -> None:
    write_json(BEST / "metadata.json", read_json(BEST / "metadata.json", "") | {"answer_reward": 0.9})


def link() -> None:
    write_text(Path("id_rsa"), "PRIVATE KEY")
    (BEST / "more").mkdir()
    (BEST / "more/notes.txt").symlink_to(Path("id_rsa").absolute())


@pytest.mark.parametrize(
    ("arguments", "before", "message"),
    [
        (["grpo_learning_rate/5e-4/0"], None, "no arm '5e-4' (known: 3e-4, 1e-3)"),
        (["grpo_learning_rate"], None, "Name it as EXPERIMENT/ARM/SEED"),
        ([RUN, "--out", "data"], None, "data: already exists and is not empty"),
        ([RUN], other_reward, "damaged (it differs from validation.csv at this step)"),
        ([EQUAL], lambda: shutil.rmtree(BEST), "no checkpoint. Choose another with --kind: last"),
        ([RUN], link, "notes.txt is a symbolic link to a file elsewhere"),
    ],
)
def test_a_mistake_publishes_nothing(
    arguments: list[str], before: Callable[[], None] | None, message: str, project: Path, grpo: Grpo
) -> None:
    if before:
        before()
    code, _, error = grpo("publish", *arguments)
    assert code == 2 and message in error
    assert not Path("published").exists()


def test_the_folder_is_uploaded_to_a_private_repository(project: Path, grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, dict[str, Any]] = {}

    def upload(_: HfApi, **how: Any) -> SimpleNamespace:
        asked["upload"] = how
        return SimpleNamespace(commit_url="https://huggingface.co/someone/model/commit/1")

    monkeypatch.setattr(HfApi, "create_repo", lambda _, repo, **how: asked.update(create={"repo": repo, **how}))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    code, said, error = grpo("publish", RUN, "--out", "shared", "--repo", "someone/model")
    assert code == 0 and "uploaded: https://huggingface.co/someone/model/commit/1" in said, error
    assert asked["create"] == {"repo": "someone/model", "private": True, "exist_ok": True}
    assert (asked["upload"]["repo_id"], asked["upload"]["folder_path"]) == ("someone/model", Path("shared"))

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(HfApi, "create_repo", fail)
    code, _, error = grpo("publish", RUN, "--out", "again", "--repo", "someone/model")
    assert code == 2 and "the upload failed" in error and "`hf upload someone/model again`" in error
    assert Path("again/README.md").exists()


# ------------------------------------------------------------------------------------------------------------------- handing in


TESTS = """
import torch

from .adapters import (
    run_compute_policy_gradient_loss as compute_policy_gradient_loss,
    run_masked_normalize as masked_normalize,
    run_parse_mmlu_response as parse_mmlu_response,
)


def test_no_baseline(scale):
    loss, _ = compute_policy_gradient_loss(torch.full((1, 2), -0.5), "no_baseline", torch.tensor([[scale]]), None, None, None)
    assert loss.tolist() == [[1.0, 1.0]]


def test_masked_normalize():
    assert masked_normalize(tensor=torch.ones(2, 2), mask=torch.eye(2), dim=-1, normalize_constant=4.0).tolist() == [0.25, 0.25]


def test_of_the_optional_part():
    assert parse_mmlu_response({}, "The answer is B.") == "B"
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course's repository, as a student has it before the assignment: its adapters raise NotImplementedError."""
    tests = tmp_path / "course/tests"
    tests.mkdir(parents=True)
    (tests / "test_grpo.py").write_text(TESTS)
    (tests / "conftest.py").write_text("import pytest\n\n\n@pytest.fixture\ndef scale():\n    return 2.0\n")
    (tests / "adapters.py").write_text("def run_masked_normalize(*arguments):\n    raise NotImplementedError\n")
    return tmp_path / "course"


@pytest.mark.slow
def test_a_courses_tests_run_against_this_package(course: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (course / "tests/adapters.py").read_text()
    assert courses.run(course) == 0
    out = capfd.readouterr().out
    assert "2 passed, 1 skipped" in out and "run_parse_mmlu_response" in out
    assert (course / "tests/adapters.py").read_text() == before
    (course / "tests/test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    assert courses.run(course / "tests") == 1


def test_the_document_is_the_write_up_and_its_pictures_are_found(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/a b.svg").write_text("<svg/>")
    (tmp_path / "writeup.md").write_text("# t & u\n\n<script>x</script>\n\n![a](<figures/a b.svg>)\n\n| a |\n|---|\n| b |\n")
    page = submission.document(tmp_path)
    assert "<title>t &amp; u</title>" in page and "<td>b</td>" in page
    assert "<script" not in page  # what a model wrote stays text
    (picture,) = re.findall(r'src="file://([^"]+)"', page)
    assert Path(unquote(picture)).is_file()


def test_tracked_files_are_packed_as_they_are_now_and_nothing_else(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    for name in ("a.py", "gone.py", "untracked.py"):
        (repo / name).write_text(name)
    (repo / "link").symlink_to("a.py")
    git = ("git", "-C", repo, "-c", "user.name=t", "-c", "user.email=t@t")
    for command in (("init", "-q"), ("add", "a.py", "gone.py", "link"), ("commit", "-qm", "Start")):
        subprocess.run([*git, *command], check=True)
    submission.write_zip(repo, tmp_path / "clean.zip")
    (repo / "gone.py").unlink()
    (repo / "a.py").write_text("edited")
    submission.write_zip(repo, tmp_path / "code.zip")
    with zipfile.ZipFile(tmp_path / "clean.zip") as before, zipfile.ZipFile(tmp_path / "code.zip") as packed:
        assert before.namelist() == ["a.py", "gone.py", "link"] and before.read("a.py") == b"a.py"
        assert packed.namelist() == ["a.py", "link"] and packed.read("a.py") == b"edited"
        assert packed.getinfo("link").external_attr >> 16 == 0o120777 and packed.read("link") == b"a.py"
    assert (repo / "untracked.py").exists() and not (repo / "gone.py").exists()
