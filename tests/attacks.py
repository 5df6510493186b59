"""What was tried (``attacks.yaml``), and which tests show what happens.

A test that shows it carries ``@pytest.mark.attack(13)``, or the name of an entry. With
``--attacks FILE`` pytest writes the outcome of each marked test to a file; ``python
benchmarks/attacks.py`` does so, and docs/security.md is rendered from it.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parent
Entry = int | str


def parts() -> list[dict[str, Any]]:
    """Groups of entries, as they are in the file."""
    read: list[dict[str, Any]] = yaml.safe_load((FOLDER / "attacks.yaml").read_text("utf-8"))
    return read


def entries() -> dict[Entry, dict[str, Any]]:
    return {one["entry"]: one for part in parts() for one in part["entries"]}


def marked() -> dict[str, list[Entry]]:
    """The entries of each marked test, by ``tests/…/test_x.py::test_y``, read from the source."""
    found: dict[str, list[Entry]] = {}
    for path in sorted(FOLDER.rglob("test_*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"{path.relative_to(FOLDER.parent).as_posix()}::{node.name}"
                found[name] = list(_marks(node))
    return {name: numbers for name, numbers in found.items() if numbers}


def _marks(test: ast.FunctionDef) -> Iterator[Entry]:
    """Of the test itself, and of single parameters of it."""
    for decorator in test.decorator_list:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.attack":
                yield from (ast.literal_eval(argument) for argument in node.args)


@dataclass
class Outcomes:
    """A plug-in of pytest: the outcomes of marked tests, by entry and test."""

    path: Path
    counts: dict[Entry, dict[str, Counter[str]]] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:  # setting up and tidying up
            return
        test = report.nodeid.partition("[")[0]
        for entry in dict(report.user_properties).get("attacks", ()):
            self.counts.setdefault(entry, {}).setdefault(test, Counter())[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        rows = [
            {"entry": entry, "tests": {test: dict(tests[test]) for test in sorted(tests)}}
            for entry, tests in sorted(self.counts.items(), key=lambda pair: str(pair[0]).zfill(3))
        ]
        self.path.write_text(json.dumps(rows, indent=1), "utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "run marked tests only, and write their outcomes here"
    parser.addoption("--attacks", type=Path, help=words)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--attacks")
    if path and not hasattr(config, "workerinput"):  # pytest-xdist's workers report to one process
        config.pluginmanager.register(Outcomes(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A report carries the entries of its test, also from another process."""
    for item in items:
        numbers = [number for mark in item.iter_markers("attack") for number in mark.args]
        if numbers:
            item.user_properties.append(("attacks", numbers))
    if config.getoption("--attacks"):
        items[:] = [item for item in items if item.get_closest_marker("attack")]
