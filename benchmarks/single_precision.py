"""Steps in float32 and tf32, beside the best that a GPU's own libraries make of the same shapes.

    python benchmarks/single_precision.py --out benchmarks/results/single_precision_h200.json

With ``--steps benchmarks/results/networks_h200.json`` steps are not measured, but taken from a
record of ``networks.py``. With ``--networks vit`` only that one is measured, in seconds; what a
record at ``--out`` says of other networks stays there.

The floor of a network: of each convolution, linear layer and attention, the forward pass and the
gradients, for ten clients with 64 samples each. Every pass counts with the fastest of these ways:
cuDNN's convolution client by client, with channels first or last in memory, on one stream or on
four; cuBLAS's matrix product of the same size for all clients at once, as if the patches were there
already; PyTorch's attention. All run from CUDA graphs. Norms, activations and the update are not
part of the floor, but of the step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from networks import BATCH, CLIENTS, NETWORKS, Network, Way, experiment
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from perfed.engines import Execution
from perfed.engines.precision import PRECISIONS
from perfed.runs.directory import environment
from perfed.runs.simulation import Simulation

DEVICE = torch.device("cuda")
STREAMS = 4
LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}
WANTED = 2.5
"""At most so many times the floor."""

Work = Callable[[], Any]
Ways = dict[str, dict[str, Work]]  # by pass, then by way


@dataclass(frozen=True)
class Layer:
    """Shapes of one sample and one client."""

    kind: str
    image: tuple[int, ...]
    weight: tuple[int, ...] = ()
    geometry: tuple[tuple[int, int], ...] = ()
    groups: int = 1
    first: bool = False
    """Its input needs no gradient."""


class Layers(TorchFunctionMode):
    """Inside, every layer that is made of products is noted."""

    def __init__(self) -> None:
        self.found: Counter[Layer] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.conv2d:
            x, weight, _, *geometry, groups = args
            first = not x.requires_grad
            layer = Layer("conv", _shape(x), tuple(weight.shape), tuple(geometry), groups, first)
            self.found[layer] += 1
        elif function is F.linear:
            first = not args[0].requires_grad
            self.found[Layer("linear", _shape(args[0]), tuple(args[1].shape), first=first)] += 1
        elif function is F.scaled_dot_product_attention:
            self.found[Layer("attention", _shape(args[0]))] += 1
        return function(*args, **(kwargs or {}))


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape[1:])


def layers_of(network: Network) -> Counter[Layer]:
    with tempfile.TemporaryDirectory() as folder:
        built = Simulation(experiment(network, Path(folder), 1), how=Execution(device="cpu"))
    (module,) = built.population.modules.values()
    layers = Layers()
    with layers:
        module.train()(built.population.x[:2])
    return layers.found


def convolution_ways(layer: Layer) -> Ways:
    x = torch.randn(CLIENTS, BATCH, *layer.image, device=DEVICE)
    weight = torch.randn(CLIENTS, *layer.weight, device=DEVICE)
    rest = (*layer.geometry, layer.groups)
    places = F.conv2d(x[0, :1], weight[0], None, *rest).shape[2:]
    grad = torch.randn(CLIENTS, BATCH, layer.weight[0], *places, device=DEVICE)
    ways: Ways = {"forward": {}, "input": {}, "weight": {}}
    for layout, memory in LAYOUTS.items():
        lying = [[t.contiguous(memory_format=memory) for t in all_] for all_ in (x, weight, grad)]
        clients = list(zip(*lying, strict=True))
        for streams in (1, STREAMS):
            way = f"cuDNN, channels {layout}, {streams} streams"
            each = partial(on_streams, streams, clients)
            ways["forward"][way] = partial(each, partial(_forward, rest))
            ways["input"][way] = partial(each, partial(_backward, rest, (True, False, False)))
            ways["weight"][way] = partial(each, partial(_backward, rest, (False, True, False)))
    if layer.groups == 1:
        rows, inner = BATCH * places.numel(), weight[0, 0].numel()
        for name, products in product_ways(rows, inner, layer.weight[0]).items():
            ways[name] |= products
    return ways


def _forward(rest: Any, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    return F.conv2d(x, weight, None, *rest)


def _backward(rest: Any, wanted: Any, x: Tensor, weight: Tensor, grad: Tensor) -> Any:
    *geometry, groups = rest
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, *geometry, False, (0, 0), groups, wanted
    )


def on_streams(streams: int, clients: list[Any], work: Callable[..., Any]) -> list[Any]:
    now = torch.cuda.current_stream()
    others = [torch.cuda.Stream() for _ in range(streams)] if streams > 1 else [now]  # type: ignore[no-untyped-call]
    for stream in others:
        stream.wait_stream(now)
    made = []
    for number, client in enumerate(clients):
        with torch.cuda.stream(others[number % streams]):
            made.append(work(*client))
    for stream in others:
        now.wait_stream(stream)
    return made


def product_ways(rows: int, inner: int, outer: int) -> Ways:
    """(rows, inner) × (inner, outer), for all clients."""
    left = torch.randn(CLIENTS, rows, inner, device=DEVICE)
    right = torch.randn(CLIENTS, outer, inner, device=DEVICE)
    grad = torch.randn(CLIENTS, rows, outer, device=DEVICE)
    weight = {
        f"cuBLAS, sum of {shares}": partial(_in_shares, shares, grad, left)
        for shares in (1, 4, 16)
        if rows % shares == 0
    }
    return {
        "forward": {"cuBLAS": partial(torch.bmm, left, right.mT)},
        "input": {"cuBLAS": partial(torch.bmm, grad, right)},
        "weight": weight,
    }


def _in_shares(shares: int, grad: Tensor, left: Tensor) -> Tensor:
    """The sum over rows, cut into so many."""
    cut = [t.unflatten(1, (shares, -1)).flatten(0, 1) for t in (grad, left)]
    return torch.bmm(cut[0].mT, cut[1]).unflatten(0, (-1, shares)).sum(1)


def attention_ways(layer: Layer) -> Ways:
    inputs = torch.randn(4, CLIENTS * BATCH, *layer.image, device=DEVICE)
    backends = {"fused": SDPBackend.EFFICIENT_ATTENTION, "products": SDPBackend.MATH}

    def both(backend: SDPBackend) -> Any:
        *attended, grad = inputs
        leaves = [t.detach().requires_grad_() for t in attended]
        with sdpa_kernel(backend):
            y = F.scaled_dot_product_attention(*leaves)
            return torch.autograd.grad(y, leaves, grad)

    return {"forward and gradients": {way: partial(both, b) for way, b in backends.items()}}


def ways_of(layer: Layer) -> Ways:
    if layer.kind == "attention":
        return attention_ways(layer)
    if layer.kind == "linear":
        ways = product_ways(BATCH * math.prod(layer.image[:-1]), layer.weight[1], layer.weight[0])
    else:
        ways = convolution_ways(layer)
    if layer.first:
        del ways["input"]
    return ways


def milliseconds(work: Work) -> float:
    """Of one run from a CUDA graph; the least of three."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # what is allocated or chosen on a first call
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    graph.replay()
    times = []
    for _ in range(3):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    del kept
    return min(times)


def floor(network: Network, precision: str) -> Iterator[dict[str, Any]]:
    """A row for each pass of each kind of layer."""
    with PRECISIONS[precision].active(DEVICE):
        for layer, count in layers_of(network).items():
            for name, ways in ways_of(layer).items():
                times = {way: milliseconds(work) for way, work in ways.items()}
                best = min(times, key=times.__getitem__)
                shapes = {"kind": layer.kind, "image": layer.image, "weight": layer.weight}
                how = {"geometry": layer.geometry, "groups": layer.groups, "count": count}
                yield shapes | how | {"pass": name, "ms": times[best], "way": best, "ways": times}
            torch.cuda.empty_cache()


def recorded_step(record: Path, name: str, precision: str) -> float:
    rows = json.loads(record.read_text("utf-8"))["networks"][name]["rows"]
    found = [row for row in rows if (row["engine"], row["precision"]) == ("stacked", precision)]
    milliseconds: float = found[0]["step_ms"]
    return milliseconds


def step(network: Network, precision: str, repeats: int) -> float:
    way = Way(network, "stacked", precision, DEVICE)
    way.warm_up()
    seconds = statistics.median(way.step_seconds()[0] for _ in range(repeats))
    way.simulation.engine.close()
    return 1e3 * seconds


def main() -> None:
    names = ["resnet18", "vgg11-bn", "mobilenet-v2", "vit"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--networks", nargs="+", default=names, choices=list(NETWORKS))
    parser.add_argument("--steps", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    here = environment(DEVICE)
    record: dict[str, Any] = {"clients": CLIENTS, "batch": BATCH, "wanted": WANTED, "networks": {}}
    record["environment"] = here
    if arguments.out and arguments.out.is_file():
        record = json.loads(arguments.out.read_text("utf-8"))
    for name in arguments.networks:
        network = NETWORKS[name]
        record["networks"][name] = {"title": network.title, "environment": here, "precisions": {}}
        for precision in ("float32", "tf32"):
            rows = list(floor(network, precision))
            least = sum(row["ms"] * row["count"] for row in rows)
            if arguments.steps:
                taken = recorded_step(arguments.steps, name, precision)
            else:
                taken = step(network, precision, arguments.repeats)
            found = {"floor_ms": least, "step_ms": taken, "ratio": taken / least, "rows": rows}
            record["networks"][name]["precisions"][precision] = found
            print(
                f"{name:14}{precision:9}{taken:8.2f} ms a step, floor {least:6.2f} ms: "
                f"{taken / least:.2f} times",
                flush=True,
            )
            torch.cuda.empty_cache()
        if arguments.out:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
