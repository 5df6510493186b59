"""Every built-in network, exported to ONNX and TorchScript, against torch.

    python benchmarks/exports.py        # one to three minutes on one core

The largest difference between class probabilities, on random samples.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from committed import RESULTS

from perfed.core.inputs import Inputs
from perfed.core.streams import torch_stream
from perfed.data.needs import Needs
from perfed.models import architectures, build_module
from perfed.runs.directory import environment
from perfed.use.exporting import export_model
from perfed.use.opening import of_module

CLASSES = 10
TOKENS, SERIES, PICTURES = Inputs.with_vocabulary((12,), 50), Inputs((9, 4)), Inputs((3, 32, 32))


def inputs_of(name: str) -> Inputs:
    if architectures[name].takes == "tokens":
        return TOKENS
    return SERIES if name == "gru" else PICTURES


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in architectures:
            if name == "imported":
                continue
            inputs = inputs_of(name)
            with torch_stream(0, "exports"):
                module = build_module(architectures.build(name), inputs, CLASSES).eval()
            needs = Needs(shape=inputs.shape, classes=CLASSES, vocabulary=inputs.vocabulary)
            ready = of_module(module, needs, {})
            found[name] = {
                kind: export_model(ready, Path(folder, f"m.{ending}"))
                for kind, ending in (("ONNX", "onnx"), ("TorchScript", "pt"))
            }
            print(name, found[name], flush=True)
    record = {"differences": found, "environment": environment(torch.device("cpu"))}
    (RESULTS / "exports.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
