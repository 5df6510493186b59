"""benchmarks/kin.py: a part of it that is asked for by a wrong name loses no record."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "kin_cifar.json"


@pytest.mark.parametrize("wrong", ["methods=local+perfed-kin", "settings=IID+rotatd", "methods="])
def test_an_unknown_name_is_told_and_nothing_is_run(wrong: str, tmp_path: Path) -> None:
    before = RECORD.read_bytes()
    bench = [sys.executable, str(ROOT / "benchmarks" / "kin.py"), "run", "cifar", wrong]
    done = subprocess.run([*bench, f"out={tmp_path}"], capture_output=True, text=True)
    key, _, names = wrong.partition("=")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{key}={names.split('+')[-1]}: there is no such name; there are")
    assert done.stderr.count("\n") == 1
    assert RECORD.read_bytes() == before
    assert not any(tmp_path.iterdir())
