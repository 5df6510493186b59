"""The direction of imports: a room imports only from rooms above it in docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import perfed

ROOT = Path(perfed.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"

NAMES_METHODS = {"config", "bench", "paper", "cli"}
"""Rooms that may name an algorithm: defaults, what is timed, the paper's tables."""
OTHER_MEANINGS = {("engines/ray/cluster.py", "local")}  # Ray's own word for this machine


def rooms() -> list[str]:
    """In their order; ``perfed`` is the package itself, what a user imports."""
    block = PAGE.read_text("utf-8").partition("## Rooms")[2].split("```")[1]
    names = re.findall(r"^([\w.]+)/?  ", block, re.MULTILINE)
    return [name.removesuffix(".py").replace("__init__", "perfed") for name in names]


def room_of(file: Path) -> str:
    first = file.relative_to(ROOT).parts[0].removesuffix(".py")
    return "perfed" if first == "__init__" else first


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for file in sorted(ROOT.rglob("*.py")):
        yield file, ast.parse(file.read_text("utf-8"))


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every module of perfed's that is imported, also inside functions and for types only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [node.module or ""]
            if node.module == "perfed":
                names = [f"perfed.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "perfed":
                yield name, node.lineno


def imported_room(name: str) -> str:
    room = [*name.split("."), "perfed"][1]
    return room if (ROOT / room).is_dir() or (ROOT / f"{room}.py").is_file() else "perfed"


def test_every_room_is_in_the_list() -> None:
    found = {room_of(file) for file, _ in modules()}
    assert found == set(rooms())


def test_a_room_imports_only_from_rooms_above_it() -> None:
    order = rooms()
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file, tree in modules()
        for name, line in imported(tree)
        if order.index(imported_room(name)) > order.index(room_of(file))
    ]
    assert wrong == []


def test_only_some_rooms_name_an_algorithm() -> None:
    wrong = []
    for file, tree in modules():
        if room_of(file) in NAMES_METHODS | {"algorithms"}:
            continue
        place = str(file.relative_to(ROOT))
        classes = [name for name, _ in imported(tree) if name.startswith("perfed.algorithms.")]
        wrong += [f"{place} imports {name}" for name in classes]
        wrong += [
            f"{place}:{node.lineno} knows '{node.value}'"
            for node in _compared(tree)
            if node.value in set(perfed.algorithms) and (place, node.value) not in OTHER_MEANINGS
        ]
    assert wrong == []


def _compared(tree: ast.Module) -> Iterator[ast.Constant]:
    """Words that something is compared with, or looked up by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Subscript | ast.MatchValue):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner
