"""A model as one file that needs no perfed: ONNX, or TorchScript.

The graph takes samples as the network does and gives class probabilities, whatever the model
consists of: a mixture of two networks is one graph. What a sample must be, the names of classes and
a model card are in the file. Before it is written, its answers are compared with torch's.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perfed.core.errors import ConfigError, PerfedError, RunError, one_line
from perfed.core.extras import needed
from perfed.core.schema import to_mapping
from perfed.core.streams import torch_stream
from perfed.core.tensorfile import write_atomically
from perfed.runs.directory import versions
from perfed.use.opening import ABOUT, ONNX, TORCHSCRIPT, Ready, open_model

TOLERANCE = 1e-5  # between its probabilities and torch's
TRIED = (1, 5)  # numbers of samples that both are asked about
TRACED = 3  # another one: what is exported must not depend on it
SAMPLES, PROBABILITIES = "samples", "probabilities"


class Probabilities(nn.Module):
    """What is exported: the model, and softmax."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, samples: Tensor) -> Tensor:
        logits: Tensor = self.model(samples)
        return logits.float().softmax(1)


def export_model(model: Ready, out: Path) -> float:
    """Write ``model`` as what the ending of ``out`` says; returns how far its probabilities are
    from torch's, at most."""
    writers: dict[str, Callable[[nn.Module, Tensor, dict[str, str]], bytes]] = {
        ONNX: _onnx,
        TORCHSCRIPT: _torchscript,
    }
    writer = writers.get(out.suffix.lower())
    if writer is None:
        endings = f"{ONNX} (ONNX) or {TORCHSCRIPT} (TorchScript)"
        raise ConfigError(f"'{out}' must end in {endings}", "OUT")
    if model.module is None:
        raise ConfigError("is exported already: export the model that it was made from", "MODEL")
    graph = Probabilities(model.module).eval()
    with torch_stream(0, "export"):
        x = model.needs.inputs.random(TRACED)
    with _quietly():
        try:
            content = writer(graph, x, _metadata(model))
        except PerfedError:
            raise
        except Exception as error:  # whatever a network cannot be exported for
            raise RunError(
                f"this model cannot be exported as {out.suffix}: {_innermost(error)}"
            ) from None
    temporary = out.with_name(f".{out.stem}.part{out.suffix.lower()}")
    try:
        write_atomically(temporary, content)
        far = difference(model, open_model(temporary))
        if far > TOLERANCE:
            raise RunError(
                f"{out} is not written: its probabilities differ from torch's by {far:.1e}, more "
                f"than {TOLERANCE:g}"
            )
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return far


def difference(model: Ready, exported: Ready) -> float:
    """The largest, over probabilities of random samples."""
    far = 0.0
    for count in TRIED:
        with torch_stream(count, "export"):
            x = model.needs.inputs.random(count).numpy()
        if not model.needs.vocabulary:
            x = 2 * x - 1
        far = max(far, float(np.abs(model.run(x) - exported.run(x)).max()))
    return far


def _onnx(graph: nn.Module, x: Tensor, metadata: dict[str, str]) -> bytes:
    onnx = needed("onnx", "export", "OUT")
    needed("onnxscript", "export", "OUT")
    shapes = {SAMPLES: {0: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(graph, (x,), dynamic_shapes=shapes, strict=False)
    aten = torch.ops.aten
    unknown: Any = {aten.cdist.default: _distances, aten._cdist_forward.default: _distances}
    program = torch.onnx.export(
        exported.run_decompositions(unknown),
        (x,),
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=[SAMPLES],
        output_names=[PROBABILITIES],
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata)
    proto.doc_string = metadata["model_card"]
    content: bytes = proto.SerializeToString()
    return content


def _distances(a: Tensor, b: Tensor, p: float = 2.0, mode: int | None = None) -> Tensor:
    """What ONNX has no word for: between rows, Euclidean (p is 2 where a model of ours asks)."""
    return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1).sqrt()


def _torchscript(graph: nn.Module, x: Tensor, metadata: dict[str, str]) -> bytes:
    with torch.no_grad():
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            graph, (x,), check_trace=False
        )
    file = io.BytesIO()
    torch.jit.save(traced, file, _extra_files=metadata)
    return file.getvalue()


def _metadata(model: Ready) -> dict[str, str]:
    """For perfed as one text, and for people and other programs."""
    needs, card = model.needs, dict(model.card)
    card["made by"] = f"perfed {versions()['packages'].get('perfed', '')}".strip()
    names = [needs.name(label) for label in range(needs.classes)]
    said = {"needs": to_mapping(needs), "card": card}
    return {
        ABOUT: json.dumps(said, allow_nan=False),
        "classes": json.dumps(names),
        "preprocessing": "\n".join(needs.steps()),
        "model_card": _card_text(model, card, names),
    }


def _card_text(model: Ready, card: dict[str, str], names: list[str]) -> str:
    lines = [f"- {name}: {value}" for name, value in card.items()]
    few = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    return "\n".join(
        [
            "# Model card",
            "",
            *lines,
            f"- takes: {model.needs.described()}",
            f"- gives: probabilities of {len(names)} classes: {few}",
            "",
            "It was trained for one client of a federation. On data unlike this client's it may be",
            "wrong, and still be sure. The accuracy above is of samples like the client's own.",
        ]
    )


def _innermost(error: BaseException) -> str:
    """The exporter wraps what went wrong in advice to its own developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return one_line(text[:200])


@contextmanager
def _quietly() -> Iterator[None]:
    """TorchScript is deprecated and works; the exporter speaks of libraries that are not there."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
