"""`make submission`: write writeup.pdf (the report) and code.zip (the files that git tracks), as courses ask for them.

writeup.pdf has reports/writeup.md, the answers to the handouts' questions and all sections, with figures. Exit code 2 if a
report or a tool is missing.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

from markdown_it import MarkdownIt

from grpo.common.errors import UserError
from grpo.common.repository import use_this_folders_repository
from grpo.study import paths

PDF, ZIP = Path("writeup.pdf"), Path("code.zip")
LINKED = re.compile(r"\]\((sections/\w+\.md)\)")
CSS = """
@page { size: A4; margin: 16mm 14mm; @bottom-center { content: counter(page); font-size: 8pt } }
body { font: 9.5pt/1.4 sans-serif } section { break-before: page } h1 { font-size: 15pt } h2 { font-size: 12pt }
img { max-width: 100%; max-height: 230mm } p:has(img) { text-align: center; break-inside: avoid }
table { border-collapse: collapse; width: 100%; font-size: 6.8pt } td, th { border-bottom: .3pt solid #999; padding: 1pt 3pt;
text-align: left; vertical-align: top } th { hyphens: auto }
pre, code { font-size: 7.5pt; white-space: pre-wrap; overflow-wrap: anywhere } a { color: #0072B2; text-decoration: none }
"""


def document(reports: Path) -> str:
    """Build one HTML page from the write-up, the answers and the sections, in the write-up's order; UserError without them."""
    if not (reports / "writeup.md").is_file():
        raise UserError(f"{reports}/writeup.md: no report. Run `make repro` first.")
    first = (reports / "writeup.md").read_text(encoding="utf-8")
    names = list(dict.fromkeys(["writeup.md", "answers.md", *LINKED.findall(first)]))
    pages = "".join(
        f'<section id="{name}">{_page(reports, name, names)}</section>' for name in names if (reports / name).exists()
    )
    title = html.escape(first.splitlines()[0].lstrip("# "))
    return f'<html lang="en"><head><title>{title}</title><style>{CSS}</style></head><body>{pages}</body></html>'


def _page(reports: Path, name: str, names: list[str]) -> str:
    """Convert one Markdown file of the report to HTML; unfold details, and turn links between files into links in the page."""
    text = (reports / name).read_text(encoding="utf-8")
    text = re.sub(r"<details><summary>(.*?)</summary>", r"**\1**", text).replace("</details>", "")
    page: str = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)

    def led(link: re.Match[str]) -> str:
        target, said = link.groups()
        if re.match(r"https?:", target):
            return link[0]
        within = os.path.relpath(reports / Path(name).parent / target, reports)
        return f'<a href="#{within}">{said}</a>' if within in names else said  # other files are not in the PDF

    def drawn(image: re.Match[str]) -> str:
        path = (reports / Path(name).parent / image[1]).resolve()
        png = path.parent / "png" / f"{path.stem}.png"
        return f'src="{(png if png.exists() else path).as_uri()}"'

    page = re.sub(r'<a href="([^"]*)">(.*?)</a>', led, page, flags=re.S)
    return re.sub(r'src="([^"]+)"', drawn, page).replace("&lt;br&gt;", "<br>")


def write_pdf(page: str, path: Path) -> None:
    """Print an HTML page as PDF; UserError if WeasyPrint, or the library Pango that it needs, is not installed."""
    try:
        from weasyprint import HTML
    except ImportError:
        raise UserError(f"{path}: WeasyPrint is not installed. Run `make submission`, which installs it.") from None
    except OSError as error:  # Pango is a system library
        raise UserError(
            f"{path}: WeasyPrint could not load the system library Pango ({error.args[0]}). On Debian and Ubuntu: apt-get "
            "install libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0; on macOS: brew install pango."
        ) from error
    HTML(string=page).write_pdf(path)


def write_zip(root: Path, path: Path) -> None:
    """Pack the files below ``root`` that git tracks, as they are now; UserError if it is not a git repository with a commit."""
    git = ["git", "-C", str(root), "-c", "user.name=-", "-c", "user.email=-"]
    # A commit, on no branch, of the tracked files as they are; nothing is printed if they are those of the last commit.
    now = subprocess.run([*git, "stash", "create"], capture_output=True, text=True, check=False).stdout.strip() or "HEAD"
    packed = subprocess.run([*git, "archive", "--format=zip", now], capture_output=True, check=False)
    if packed.returncode:
        raise UserError(
            f"{root}: not a git repository, and {path} has the files that git tracks. Run `make submission` in a clone."
        )
    path.write_bytes(packed.stdout)


def main() -> int:
    """Write both files; returns the exit code."""
    use_this_folders_repository()
    try:
        write_pdf(document(paths.REPORTS), PDF)
        write_zip(Path(), ZIP)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{path}: {path.stat().st_size / 1e6:.1f} MB" for path in (PDF, ZIP)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
