"""benchmarks/successor.py: what its tables rest on. In a process of its own, since it registers
algorithms."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
import perfed, successor

def accuracies(name, **options):
    what = successor.experiment("digits", "Dir(0.1)", {"name": name, **options}, 5)
    what = replace(what, rounds=6, evaluate_every=6, clients_per_round=15)
    folder = Path(sys.argv[1]) / (name + "-".join(map(str, options.values())))
    result = perfed.run(what, folder, how=perfed.Execution(device="cpu", save_models=False))
    assert result.table() and result.report().stat().st_size > 10_000  # of unusual kinds too
    last = result.per_client()
    return {kind: rows["test_accuracy"].tolist() for kind, rows in last.groupby("model")}

beside = accuracies("evidence-beside-local")
apart = {
    "personal": accuracies("perfed-evidence")["personal"],
    "cautious": accuracies("perfed-evidence", caution=successor.CAUTION)["personal"],
    "local": accuracies("local", participation="drawn")["personal"],
}
assert beside == apart
assert len({tuple(of_clients) for of_clients in apart.values()}) == 3, "nothing to tell apart"
"""


def test_one_run_beside_local_training_is_three_runs(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
