"""benchmarks/successor.py: what its tables rest on. In a process of its own, since it registers
algorithms."""

from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[1]

SCRIPT = """
import itertools, json, sys
sys.path.insert(0, sys.argv[3])
from dataclasses import replace
from pathlib import Path
import numpy as np
import perfed, successor

architecture = json.loads(sys.argv[2])
successor.FAMILIES["digits"]["models"] = {"architectures": [architecture]}

def losses(name, **options):
    what = successor.experiment("digits", "Dir(0.1)", {"name": name, **options}, 5)
    what = replace(what, rounds=6, evaluate_every=6, clients_per_round=15)
    folder = Path(sys.argv[1]) / (name + "-".join(map(str, options.values())))
    result = perfed.run(what, folder, how=perfed.Execution(device="cpu", save_models=False))
    if name == "evidence-beside-local":
        assert result.table() and result.report().stat().st_size > 10_000  # of unusual kinds too
    last = result.per_client()
    return {kind: rows["test_loss"].to_numpy() for kind, rows in last.groupby("model")}

beside = losses("evidence-beside-local")
apart = {
    "personal": losses("perfed-evidence")["personal"],
    "cautious": losses("perfed-evidence", caution=successor.CAUTION)["personal"],
    "local": losses("local", participation="selected")["personal"],
}
assert beside.keys() == apart.keys()
for kind in apart:
    np.testing.assert_allclose(beside[kind], apart[kind], rtol=1e-4)
for one, other in itertools.combinations(apart.values(), 2):
    assert not np.allclose(one, other, rtol=1e-3), "nothing to tell apart"
"""


@pytest.mark.long
@pytest.mark.parametrize("architecture", ['"mlp"', '{"name": "cnn", "batchnorm": true}'])
def test_one_run_beside_local_training_is_three_runs(architecture: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = warm.perform([script, tmp_path, architecture, ROOT / "benchmarks"])
    assert done.returncode == 0, done.stderr
