"""The documentation site: built strictly, without a network, and loading nothing from one."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "benchmarks" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", target],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return target


def test_every_page_is_there(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"contributing", "reporting"}
    assert {path.stem for path in site.glob("*.html")} - {"404"} == pages


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(https?:)?//[^>]*>")
    links = re.compile(r"<link\b[^>]*\bhref=\"(https?:)?//[^>]*>")
    styles = re.compile(r"(url\(|@import )[\"']?(https?:)?//")
    for path in site.rglob("*.html"):
        text = path.read_text("utf-8")
        assert not loads.search(text), path
        assert not links.search(text), path
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not styles.search(path.read_text("utf-8")), path


def test_the_reference_says_what_docstrings_say(site: Path) -> None:
    text = (site / "api.html").read_text("utf-8")
    assert "Continue a run from its newest checkpoint" in text
    assert "A row per evaluated round, model kind and client" in text
    assert ":class:" not in text
    assert ":mod:" not in text


def test_files_outside_are_shown_as_paths(site: Path) -> None:
    text = (site / "findings.html").read_text("utf-8")
    assert "<code>benchmarks/results</code>" in text
    assert '="../' not in text


@pytest.mark.parametrize(
    ("markdown", "without", "within"),
    [
        ("[x](own.md#a)", "[x](own.md#a)", "[x](own.md#a)"),
        ("[x](https://a.b/c)", "[x](https://a.b/c)", "[x](https://a.b/c)"),
        ("![x](../a.png)", "![x](../a.png)", "![x](../a.png)"),
        ("[results](../b/r)", "results (`b/r`)", "[results](https://h/r/blob/main/b/r)"),
        ("[`r.py`](../b/r.py#L3)", "`b/r.py`", "[`r.py`](https://h/r/blob/main/b/r.py#L3)"),
    ],
)
def test_links_out_of_the_pages(markdown: str, without: str, within: str) -> None:
    rewrite = hooks().with_links_out
    assert rewrite(markdown, "", "") == without
    assert rewrite(markdown, "", "https://h/r/") == within
