"""benchmarks/versions.py: which versions it takes, and what it reads from pytest."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import versions

SAID = """..F.s.E                                             [100%]
=========================== short test summary info ============================
FAILED tests/core/test_tree.py::test_a[a network] - assert 1 == 2
ERROR tests/runs/test_resume.py::test_b
1 failed, 2003 passed, 30 skipped, 5 warnings, 1 error in 7.02s (0:00:07)
"""


def test_every_dependency_has_a_lowest_version() -> None:
    assert versions.lowest(Requirement("typer>=0.12.4,<0.21")) == "typer==0.12.4"
    lowest = [versions.lowest(one) for one in versions.requirements()]
    assert any(one.startswith("torch==") for one in lowest)


def test_tests_are_counted_and_the_bad_ones_named() -> None:
    counted = versions.outcome(SAID)
    names = ["tests/core/test_tree.py::test_a[a network]", "tests/runs/test_resume.py::test_b"]
    assert counted == {
        "passed": 2003,
        "failed": 1,
        "skipped": 30,
        "errors": 1,
        "not_passed": names,
    }
