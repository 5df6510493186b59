"""What mkdocs does to a page beside rendering it (``hooks`` in mkdocs.yml).

The pages are read on a code host too, where a link such as ``../benchmarks/results`` leads to the
file. The site has no such file: there it leads to the repository, if mkdocs.yml names one, and
is otherwise shown as a path. CONTRIBUTING.md and SECURITY.md, which code hosts look for in the
root, are pages of the site too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
BRANCH = "main"
# In the root, and what they are on the site.
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "reporting.md"}


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for name, page in ROOT_PAGES.items():
        text = (root / name).read_text("utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)
    return with_links_out(markdown, folder, config.repo_url or "")


def with_links_out(markdown: str, folder: str, repository: str) -> str:
    """The page (in ``folder``, seen from docs/), with its links out of docs/ rewritten."""

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if "://" in target or not path.startswith("../"):
            return match[0]
        path = path.removeprefix("../")
        if path in ROOT_PAGES:
            return f"[{text}]({ROOT_PAGES[path]}{anchor})"
        if repository:
            return f"[{text}]({repository.rstrip('/')}/blob/{BRANCH}/{path}{anchor})"
        return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Docstrings name classes as Sphinx does; shown is the name."""
    return re.sub(r":\w+:<code>~?(?:\w+\.)*(\w+)</code>", r"<code>\1</code>", html)
