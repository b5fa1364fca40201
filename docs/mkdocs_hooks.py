"""What `mkdocs build` adds to the pages of docs/: the report, and what becomes of links to other files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
REPORT = "reports/index.html"
LINK_OUT_OF_DOCS = re.compile(r"""(!?)\[([^\]]*)\]\(\.\./([^)\s#]+)((?:#[^)\s]*)?)((?: "[^"]*")?)\)""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Copy the report and its figures into the site."""
    for path in (ROOT / REPORT, *sorted((ROOT / "reports").rglob("*.svg"))):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolve links from a page to files outside docs/, which GitHub's view of the page follows as they are.

    A file that the site holds is linked there, and a Markdown file of the report to its section in the report's page. Other
    files are linked at ``repo_url``; without an address their paths stand as text.

    Raises:
        PluginError: the file does not exist.
    """
    report = (ROOT / REPORT).read_text(encoding="utf-8")

    def resolve(match: re.Match[str]) -> str:
        image, text, path, anchor, title = match.groups()
        if files.get_file_from_path(path):
            return f"{image}[{text}]({path}{anchor}{title})"
        if not (ROOT / path).exists():
            raise PluginError(f"docs/{page.file.src_uri} links to {path}, which does not exist")
        if path.startswith("reports/") and f'id="{Path(path).stem}"' in report:
            return f"[{text}]({REPORT}#{Path(path).stem}{title})"
        if config.repo_url:
            return f"[{text}]({config.repo_url}/blob/main/{path}{anchor}{title})"
        return f"`{path}`" if text.startswith("`") or text == Path(path).name else f"{text} (`{path}`)"

    return LINK_OUT_OF_DOCS.sub(resolve, markdown)
