"""No tensor is on the wrong device: experiments on a GPU that is not there (tests/elsewhere.py)."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfed.core.algorithm import algorithms
from perfed.core.hostile import attacks
from tests import elsewhere, warm

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not elsewhere.supported(), reason="needs a torch with backends in Python"),
]
Case = tuple[str, str, dict[str, Any]]
KIN = {"algorithm": "perfed-kin"}
CKT = {"algorithm": {"name": "perfed-ckt", "clusters": 2}}
FEDAVG = {"algorithm": "fedavg"}
FEW_STEPS = {
    "cfd": {"student_steps": 2},
    "cosmos": {"digest_steps": 2, "steps": 2},
    "feddf": {"steps": 2},
    "fedgen": {"steps": 2},
    "fedtgp": {"epochs": 2},
}
"""Of the server's own training."""


def training(**changes: Any) -> dict[str, Any]:
    return {"training": elsewhere.SMALL["training"] | changes}


def compared(cases: list[Case]) -> dict[str, Any]:
    """What is not the same here and there."""
    done: subprocess.CompletedProcess[str] = warm.perform([elsewhere.__file__, json.dumps(cases)])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(cases)
    return {name: made for name, made in found.items() if not alike(made)}


def alike(made: Any) -> bool:
    return isinstance(made, list) and np.allclose(*made, rtol=1e-4)


@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_every_method(engine: str) -> None:
    names = (
        algorithms.built_in()
        if engine == "stacked"
        else ["fedgen", "fedkd", "perfed-ckt", "perfed-kin"]
    )
    cases = [(n, engine, {"algorithm": {"name": n} | FEW_STEPS.get(n, {})}) for n in names]
    assert compared(cases) == {}


def test_every_stage_attack_and_link() -> None:
    wires = {
        "bits": CKT | {"wire": [{"name": "probability-bits", "bits": 4}, "deflate"]},
        "top": CKT | {"wire": ["top-probabilities"]},
        "cached": CKT | {"wire": ["cached"]},
        "weights": FEDAVG | {"wire": ["top-changes", {"name": "number-bits", "bits": 8}]},
        "median": FEDAVG | {"wire": ["median"]},
        "trimmed": FEDAVG | {"wire": ["trimmed", "bounded"]},
        **{f"{link}, kin": KIN | {"link": link} for link in ("tiny", "robust", "private")},
        "tiny, ckt": CKT | {"link": "tiny"},
    }
    hostile = {f"{name}": CKT | {"hostile": {"name": name, "share": 0.4}} for name in attacks}
    cases = [(name, "stacked", change) for name, change in (wires | hostile).items()]
    assert compared(cases) == {}


def test_pictures_tokens_and_ways_to_train(tmp_path: Path) -> None:
    random, file = np.random.default_rng(0), tmp_path / "pictures.npz"
    x, public = (random.integers(0, 256, (n, 3, 16, 16), dtype=np.uint8) for n in (300, 40))
    np.savez(file, x=x, y=random.integers(0, 4, 300), public=public)
    pictures = {"data": {"name": "npz", "path": str(file)}}
    convolutions = {"models": [{"name": "cnn", "batchnorm": True}]}
    tokens = {
        "data": {"name": "phrases", "clients": 5, "each": 40, "public": 40},
        "partition": "given",
        "models": [{"name": "token-mean", "padding": 0}],
    }
    turned = {"shift": {"name": "rotation", "groups": [1, 1]}}
    held_out = {
        "split": {"train": [0.4], "validation": 0.3, "test": 0.3, "second_validation": True}
    }
    changes = {
        "pictures": pictures | KIN | convolutions,
        "joint tests": pictures | CKT | convolutions | {"shared_test": True, "fresh_mix": "held"},
        "flipped": pictures | FEDAVG | training(augment=["flip"]),
        "vit": pictures | FEDAVG | {"models": ["vit"]},
        "tokens": tokens | KIN,
        "turned": turned | KIN | held_out,
        "adam": CKT | training(optimizer="adam"),
        "momentum": FEDAVG | training(optimizer={"name": "sgd", "momentum": 0.9}),
        "private statistics": CKT | convolutions | training(public_batchnorm="private"),
        "shared statistics": CKT | convolutions | training(public_batchnorm="shared"),
    }
    cases = [(name, "stacked", change) for name, change in changes.items()]
    assert compared(cases) == {}


def test_sites() -> None:
    """What comes over the network is on the CPU: a site with a GPU could not train with it."""
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perfed[flower]'")
    wire = {"wire": ["history", {"name": "probability-bits", "bits": 4}, "cached", "deflate"]}
    same = {"models": [{"name": "mlp", "hidden": [8]}] * 3}
    changes = {
        "kin": KIN,
        "kin, in few bits": KIN | wire,
        "ckt": {},
        "scaffold": {"algorithm": "scaffold"} | same,
        "hypcluster": {"algorithm": "hypcluster"} | same,
    }
    cases = [(name, "sites", change) for name, change in changes.items()]
    assert compared(cases) == {}


def test_a_tensor_on_the_wrong_device_is_found(tmp_path: Path) -> None:
    """What the tests above rest on: a method that forgets to move what it makes."""
    method = tmp_path / "careless.py"
    method.write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from perfed.core.algorithm import Algorithm, supervised\n"
        "from perfed.core.message import Message\n"
        "@dataclass(frozen=True)\n"
        "class Careless(Algorithm):\n"
        "    def client_round(self, client, message):\n"
        "        client.weights = client.sgd(client.weights, supervised)\n"
        "        counts = client.label_counts() + torch.ones(10)\n"
        "        return Message(counts=counts)\n"
    )
    found = compared([("careless", "stacked", {"algorithm": f"{method}:Careless"})])
    assert "tensors on two devices: [10] on elsewhere:0, [10] on cpu" in found["careless"]
