"""``perfed doctor`` and ``perfed --version``, as real processes."""

import json
import subprocess
import sys
from pathlib import Path

import perfed


def run(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "perfed", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_doctor_says_the_same_in_words_and_in_json(tmp_path: Path) -> None:
    words, report = (
        run("doctor", folder=tmp_path),
        json.loads(run("doctor", "--json", folder=tmp_path)),
    )
    assert report["perfed"] == perfed.__version__
    for version in report["packages"].values():
        assert version in words
    for line in report["missing"]:
        assert line in words
    assert list(tmp_path.iterdir()) == []  # a look leaves nothing behind


def test_version(tmp_path: Path) -> None:
    assert run("--version", folder=tmp_path) == f"perfed {perfed.__version__}\n"
