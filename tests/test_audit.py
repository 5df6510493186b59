"""The audit of dependencies, without a network."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests import audit

CLEAN = {"name": "a", "version": "1", "vulns": []}
UNKNOWN = {"name": "b", "skip_reason": "Dependency not found on PyPI"}
BAD = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}


def test_it_says_what_it_could_not_check() -> None:
    lines, found = audit.report([CLEAN, UNKNOWN, UNKNOWN])
    assert lines == ["audit: 1 of 3 packages checked, 2 could not be; 0 vulnerabilities"]
    assert not found


def test_a_vulnerability_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, found = audit.report([CLEAN, BAD])
    assert found
    assert lines[1:] == ["audit: c 2: CVE-1, fixed in 3"]
    monkeypatch.setitem(audit.ACCEPTED, "CVE-1", "only on another system")
    assert audit.report([BAD])[1] is False


@pytest.mark.parametrize("output", ["", "not JSON", "{}"])
def test_without_an_index_it_passes_and_says_so(
    output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], 1, output, "a trace\nno network\n")

    monkeypatch.setattr(subprocess, "run", run)
    audit.main()
    assert capsys.readouterr().out == "audit: no package could be checked: no network\n"
