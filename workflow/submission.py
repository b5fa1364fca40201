"""`make submission`: write writeup.pdf (the report) and code.zip (the files that git tracks), as courses ask for them.

writeup.pdf has the content of reports/writeup.md, with figures. Exit code 2 if the report or a tool is missing.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt

from grpo.common.errors import UserError
from grpo.common.files import read_text
from grpo.study import paths

PDF, ZIP = Path("writeup.pdf"), Path("code.zip")
# Pages lie on their side, so that figures, which have several panels in a row, can be read.
CSS = """
@page { size: A4 landscape; margin: 11mm 14mm 13mm; @bottom-center { content: counter(page); font-size: 8pt } }
body { font: 8.7pt/1.33 sans-serif } h1 { font-size: 16pt; margin: 0 } h2 { font-size: 13pt; margin: 8pt 0 2pt }
h3 { font-size: 10pt; margin: 8pt 0 1pt } h4 { font-size: 9pt; margin: 4pt 0 1pt } h1, h2, h3, h4 { break-after: avoid }
p, ul, blockquote { margin: 2pt 0 } ul { padding-left: 10pt } blockquote { padding-left: 6pt; border-left: 2pt solid #0072B2 }
img { max-width: 100%; max-height: 80mm } p:has(img) { text-align: center; break-inside: avoid }
table { border-collapse: collapse; font-size: 7.5pt; line-height: 1.2 } tr { break-inside: avoid }
td, th { border-bottom: .3pt solid #999; padding: .7pt 6pt .7pt 0; text-align: left; vertical-align: top }
code { font-size: 7pt; overflow-wrap: anywhere } a { color: inherit; text-decoration: none }
"""


def document(reports: Path) -> str:
    """Build one HTML page from the write-up; UserError without it."""
    text = read_text(reports / "writeup.md", made_by="writeup")
    page: str = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    page = re.sub(r'src="([^"]+)"', lambda image: f'src="{(reports / unquote(image[1])).resolve().as_uri()}"', page)
    title = html.escape(text.splitlines()[0].lstrip("# "))
    return f'<html lang="en"><head><title>{title}</title><style>{CSS}</style></head><body>{page}</body></html>'


def write_pdf(page: str, path: Path) -> None:
    """Print an HTML page as PDF; UserError if the library Pango is not installed. `make submission` installs WeasyPrint."""
    try:
        from weasyprint import HTML
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
