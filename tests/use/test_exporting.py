"""Exported models say what torch says, and need no perfed to say it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call

from perfed.core.errors import RunError
from perfed.core.inputs import Inputs
from perfed.core.predictor import (
    Adjusted,
    ClassPrior,
    Mixture,
    NearestPrototype,
    OfNetwork,
    Predictor,
    Spliced,
    What,
)
from perfed.core.tree import OWN, Weights
from perfed.data.needs import Needs
from perfed.models import architectures, build_module
from perfed.runs.model_file import module_of
from perfed.use.exporting import TOLERANCE, export_model
from perfed.use.opening import Ready, of_module, open_model

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MODELS = {f"perfed.models.{name}" for name in ("architectures", "pictures", "sequences")}
PICTURES = Needs(shape=(1, 8, 8), classes=3, names=("cat", "dog", "emu"), pixels=(-1.0, 1.0))
NETWORKS: dict[str, tuple[nn.Module, str]] = {
    OWN: (nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3)), "3"),
    "small": (nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 3)), "3"),
    "between": (nn.Linear(9, 5), ""),
}


def weights(name: str, seed: int) -> Weights:
    stream = torch.Generator().manual_seed(seed)
    module = NETWORKS[name][0]
    return Weights(
        {n: torch.randn(p.shape, generator=stream) for n, p in module.named_parameters()}, {}
    )


class Plainly:
    """What networks say, in a second way: one layer after another, with the weights at hand."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.count = x, len(x)

    def __call__(self, weights: Weights, what: What = "logits", network: str = OWN) -> Tensor:
        layers = NETWORKS[network][0][:-1] if what == "features" else NETWORKS[network][0]
        few = {n: t for n, t in weights.params.items() if int(n.split(".")[0]) < len(layers)}
        said: Tensor = functional_call(layers, few, (self.x,))
        return said

    def on(self, features: Tensor, weights: Weights, network: str = OWN) -> Tensor:
        layer = NETWORKS[network][0]
        if network == OWN:
            given = {n: weights.params[f"3.{n}"] for n in ("weight", "bias")}
            made: Tensor = functional_call(layer[-1], given, (features,))
        else:
            made = functional_call(layer, weights.params, (features,))
        return made


def every_kind() -> Predictor:
    """A mixture of each kind of model that an algorithm can return."""
    random = torch.Generator().manual_seed(1)
    kinds: list[Predictor] = [
        weights(OWN, 2),
        Adjusted(weights(OWN, 3), torch.tensor(0.5), torch.tensor([1.0, 0.0, -1.0])),
        NearestPrototype(
            weights(OWN, 4), torch.randn(3, 5, generator=random), torch.tensor([2.0, 0.0, 1.0])
        ),
        ClassPrior(torch.tensor([0.1, 0.2, 0.7]).log()),
        OfNetwork(weights("small", 5), "small"),
        Spliced(weights(OWN, 6), weights("small", 7), weights("between", 8), ("small", "between")),
        Mixture([weights(OWN, 9), ClassPrior(torch.zeros(3))], torch.tensor([0.9, 0.1])),
    ]
    return Mixture(kinds, torch.full((len(kinds),), 1 / len(kinds)))


@pytest.mark.parametrize("ending", ["onnx", "pt"])
def test_every_kind_of_model_is_one_graph(ending: str, tmp_path: Path) -> None:
    predictor = every_kind()
    module = module_of(predictor.tensors(), lambda name: NETWORKS[name]).eval()
    ready = of_module(module, PICTURES, {"run": "trial", "client": "1"})
    out = tmp_path / f"model.{ending}"
    export_model(ready, out)
    exported = open_model(out)
    for count in (1, 7):  # a graph that was traced with three samples
        x = torch.randn(count, 1, 8, 8)
        must = predictor.logits(Plainly(x)).softmax(1).numpy()
        assert np.abs(exported.probabilities(x.numpy()) - must).max() < TOLERANCE
    assert exported.needs == PICTURES
    assert exported.card["run"] == "trial"


def small(names: list[str], shape: tuple[int, ...]) -> Ready:
    networks = [build_module(architectures.build(name), shape, 3).eval() for name in names]

    class Together(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.networks = nn.ModuleList(networks)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([network(x) for network in self.networks]).mean(0)

    return of_module(Together(), Needs(shape=shape, classes=3, pixels=(-1.0, 1.0)), {})


def test_networks_of_each_kind_are_exported(tmp_path: Path) -> None:
    """ONNX; benchmarks/exports.py does it for all of them, one by one."""
    networks: list[Any] = [
        {"name": "cnn", "batchnorm": True},
        {"name": "resnet4", "features": 8},
        {"name": "vit", "depth": 1},
    ]
    assert export_model(small(networks, (3, 8, 8)), tmp_path / "pictures.onnx") < TOLERANCE
    inputs = Inputs.with_vocabulary((6,), 20)
    module = build_module(architectures.build("token-gru"), inputs, 3).eval()
    tokens = of_module(module, Needs(shape=(6,), classes=3, vocabulary=20), {})
    assert export_model(tokens, tmp_path / "tokens.onnx") < TOLERANCE


def test_all_networks_have_been_exported_once() -> None:
    """The record of benchmarks/exports.py, which takes minutes, lacks none of them."""
    record = json.loads((RESULTS / "exports.json").read_text("utf-8"))["differences"]
    built_in = {name for name in architectures if architectures[name].__module__ in MODELS}
    assert record.keys() == built_in - {"imported"}
    assert max(far for by_kind in record.values() for far in by_kind.values()) < TOLERANCE


def test_a_stranger_can_use_the_file_by_what_is_written_in_it(tmp_path: Path) -> None:
    """With onnx, onnxruntime, Pillow and NumPy; the steps are those that the file names."""
    module = build_module(architectures.build("mlp"), (1, 8, 8), 3).eval()
    ready = of_module(module, PICTURES, {"run": "trial"})
    export_model(ready, tmp_path / "m.onnx")
    held = {p.key: p.value for p in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert json.loads(held["classes"]) == ["cat", "dog", "emu"]
    assert held["preprocessing"].splitlines()[:3] == [
        "convert the picture to grey",
        "resize it to 8×8, bilinear (Pillow's Image.resize)",
        "bytes 0 … 255 become -1 … 1, linearly",
    ]
    assert "# Model card" in held["model_card"]
    colours = np.random.default_rng(0).integers(0, 256, (20, 12, 3), dtype=np.uint8)
    picture = Image.fromarray(colours).convert("L").resize((8, 8), Image.Resampling.BILINEAR)
    x = (np.asarray(picture, np.float32) / 127.5 - 1)[None, None]
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (said,) = session.run(["probabilities"], {"samples": x})
    file = io.BytesIO()
    Image.fromarray(colours).save(file, "png")
    ours = ready.probabilities(PICTURES.from_picture(file.getvalue()))
    assert np.abs(said - ours).max() < TOLERANCE


class Fickle(nn.Module):
    """Its answer depends on how many samples there are, which a trace does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made * 3 if len(x) > 4 else made


def test_a_file_that_says_something_else_is_not_written(tmp_path: Path) -> None:
    ready = of_module(Fickle().eval(), Needs(shape=(4,), classes=3), {})
    with pytest.raises(RunError, match=r"not written: its probabilities differ from torch's"):
        export_model(ready, tmp_path / "m.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ending", ["onnx", "pt"])
def test_what_is_no_model_is_refused_in_one_line(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"m.{ending}"
    for content in (b"", b"junk" * 100):
        file.write_bytes(content)
        with pytest.raises(RunError, match=r"m\.\w+ is no \w+ model") as caught:
            open_model(file)
        assert "\n" not in str(caught.value)
