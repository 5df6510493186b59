"""Methods and an optimizer outside the package, in small experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLUGINS = Path(__file__).parent / "plugins"
DIFFERENT = ["mlp", "cnn"]
ONE_WIDTH = [{"name": "mlp", "hidden": [50]}, {"name": "mlp", "hidden": [9, 50]}, "cnn"]
TRAINING = {"steps": 3, "batch_size": 8, "public_batch_size": 8, "learning_rate": 0.1}
HEAVY_BALL = {"optimizer": {"name": f"{PLUGINS}/heavy_ball.py:HeavyBall", "momentum": 0.7}}
CASES: dict[str, dict[str, Any]] = {
    "fedproto": {"algorithm": f"{PLUGINS}/fedproto.py:FedProto", "models": ONE_WIDTH},
    "fml": {
        "algorithm": {
            "name": f"{PLUGINS}/fml.py:FML",
            "small": {"name": "cnn", "batchnorm": True},
        },
        "models": DIFFERENT,
    },
    "lg-fedavg": {"algorithm": f"{PLUGINS}/lg_fedavg.py:LGFedAvg", "models": ONE_WIDTH},
    "fedmd": {"algorithm": f"{PLUGINS}/fedmd.py:FedMD", "models": DIFFERENT},
    "momentum": {
        "algorithm": {"name": "perfed-ckt", "clusters": 2},
        "models": DIFFERENT,
        "training": TRAINING | HEAVY_BALL | {"optimizer_state": "kept"},
    },
}


def case(name: str, **changes: Any) -> dict[str, Any]:
    return {"training": TRAINING} | CASES[name] | changes
