"""What `mkdocs build` adds to the pages of docs/: the report, and what becomes of links to other files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK_OUT_OF_DOCS = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)\s#]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Copy the report and its figures into the site."""
    for path in (ROOT / "reports/index.html", *sorted((ROOT / "reports").rglob("*.svg"))):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolve links from a page to files outside docs/, which GitHub's view of the page follows as they are.

    A file that the site holds is linked there, another one at ``repo_url``; without an address its name stays as text.

    Raises:
        PluginError: the file does not exist.
    """

    def resolve(match: re.Match[str]) -> str:
        image, text, path, anchor = match.groups()
        if files.get_file_from_path(path):
            return f"{image}[{text}]({path}{anchor})"
        if not (ROOT / path).exists():
            raise PluginError(f"docs/{page.file.src_uri} links to {path}, which does not exist")
        return f"[{text}]({config.repo_url}/blob/main/{path}{anchor})" if config.repo_url else text

    return LINK_OUT_OF_DOCS.sub(resolve, markdown)
