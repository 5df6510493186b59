"""Each entry of attacks.yaml has a test that shows what happens, or says what remains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import attacks

ROOT = Path(__file__).parents[1]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "attacks.json").read_text("utf-8"))


def test_every_entry_has_a_test_or_says_what_remains() -> None:
    shown = {entry for numbers in attacks.marked().values() for entry in numbers}
    missing = [n for n, one in attacks.entries().items() if n not in shown | _remaining()]
    assert not missing
    assert [one for one in attacks.entries() if isinstance(one, int)] == [*range(1, 72)]


def test_no_test_names_an_entry_that_is_not_there() -> None:
    known = attacks.entries().keys()
    unknown = {test: {*numbers} - known for test, numbers in attacks.marked().items()}
    assert not {test: wrong for test, wrong in unknown.items() if wrong}


def test_the_results_are_of_tests_that_are_there_and_passed() -> None:
    """After a change of marks: python benchmarks/attacks.py."""
    marked, shown = attacks.marked(), set()
    for row in RESULT["rows"]:
        for test, outcomes in row["tests"].items():
            assert row["entry"] in marked.get(test, ()), f"{test} no longer shows {row['entry']}"
            assert "failed" not in outcomes, test
            if "passed" in outcomes:
                shown.add(row["entry"])
    assert attacks.entries().keys() - shown - _remaining() == set()


def _remaining() -> set[attacks.Entry]:
    return {entry for entry, one in attacks.entries().items() if "remains" in one}


@pytest.mark.parametrize("processes", [0, 2])
def test_outcomes_are_written_by_entry(processes: int, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = attack\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.attacks", "-n", str(processes)]
    command += ["--attacks", str(tmp_path / "out.json"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 passed" in done.stdout  # what is not marked is not run
    assert json.loads((tmp_path / "out.json").read_text()) == [
        {"entry": 1, "tests": {"test_it.py::test_two": {"passed": 2}}},
        {
            "entry": 7,
            "tests": {
                "test_it.py::test_broken": {"failed": 1},
                "test_it.py::test_two": {"passed": 1},
            },
        },
        {"entry": "named", "tests": {"test_it.py::test_skipped": {"skipped": 1}}},
    ]


TESTS = """
import pytest

@pytest.mark.attack(1)
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.attack(7))])
def test_two(x): ...

@pytest.mark.attack(7)
def test_broken(nothing_like_that): ...

@pytest.mark.attack("named")
def test_skipped():
    pytest.skip("not here")

def test_other(): ...
"""
