"""`make submission`: what is printed, and what is packed. WeasyPrint itself is not installed here."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import unquote

import pytest

from grpo.common.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))
from submission import document, write_pdf, write_zip

REPORTS = Path(__file__).parents[2] / "reports"


def test_the_document_holds_every_section_and_each_picture_is_there() -> None:
    page = document(REPORTS)
    first = (REPORTS / "writeup.md").read_text()
    names = {"writeup.md", "answers.md", *re.findall(r"\((sections/\w+\.md)\)", first)}
    assert set(re.findall(r'<section id="([^"]+)"', page)) == names and len(names) > 10
    pictures = re.findall(r'src="file://([^"]+)"', page)
    assert len(pictures) > 20 and all(Path(unquote(picture)).is_file() for picture in pictures)
    assert set(re.findall(r'href="#([^"]+)"', page)) <= names and "&lt;details" not in page


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    (tmp_path / "writeup.md").write_text(
        "# t\n\n<script>x</script>\n\n<details><summary>more</summary>\n\n[a](tables/a.md)\n\n</details>\n"
    )
    page = document(tmp_path)
    assert "<script" not in page and "<strong>more</strong>" in page and "tables/a.md" not in page and ">a<" in page


def test_without_a_report_or_the_printer_one_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"writeup.md: no report. Run `make repro` first"):
        document(tmp_path)
    with pytest.raises(UserError, match=r"WeasyPrint is not installed. Run `make submission`"):
        write_pdf("", tmp_path / "writeup.pdf")
    with pytest.raises(UserError, match="Run `make submission` in a clone"):
        write_zip(tmp_path, tmp_path / "code.zip")
    assert list(tmp_path.iterdir()) == []


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
