"""Run the tests that show what happens to an attack, for the tables of docs/security.md.

python benchmarks/attacks.py            (some minutes; then python benchmarks/render.py)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from committed import ROOT

from perfed.runs.directory import environment

RESULT = ROOT / "benchmarks" / "results" / "attacks.json"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "pytest", "-n", "2", "--attacks", str(rows)]
        done = subprocess.run([*command, *sys.argv[1:]], cwd=ROOT)
        record = {
            "environment": environment(torch.device("cpu")),
            "rows": json.loads(rows.read_text("utf-8")),
        }
    RESULT.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
