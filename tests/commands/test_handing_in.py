"""A course's unit tests against this package (`make test-course`), and what is handed in (`make submission`)."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import unquote

import pytest
from course import run

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))
from submission import document, write_zip

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
    assert run(course) == 0
    out = capfd.readouterr().out
    assert "2 passed, 1 skipped" in out and "run_parse_mmlu_response" in out
    assert (course / "tests/adapters.py").read_text() == before
    (course / "tests/test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    assert run(course / "tests") == 1


def test_the_document_is_the_write_up_and_its_pictures_are_found(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/a b.svg").write_text("<svg/>")
    (tmp_path / "writeup.md").write_text("# t & u\n\n<script>x</script>\n\n![a](<figures/a b.svg>)\n\n| a |\n|---|\n| b |\n")
    page = document(tmp_path)
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
    write_zip(repo, tmp_path / "clean.zip")
    (repo / "gone.py").unlink()
    (repo / "a.py").write_text("edited")
    write_zip(repo, tmp_path / "code.zip")
    with zipfile.ZipFile(tmp_path / "clean.zip") as before, zipfile.ZipFile(tmp_path / "code.zip") as packed:
        assert before.namelist() == ["a.py", "gone.py", "link"] and before.read("a.py") == b"a.py"
        assert packed.namelist() == ["a.py", "link"] and packed.read("a.py") == b"edited"
        assert packed.getinfo("link").external_attr >> 16 == 0o120777 and packed.read("link") == b"a.py"
    assert (repo / "untracked.py").exists() and not (repo / "gone.py").exists()
