"""`make submission`: what is printed, and what is packed. WeasyPrint itself is not installed here."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))
from submission import document, write_zip


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
