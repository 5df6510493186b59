"""The communication-cost column of Table 1, from messages really built, without training.

The column follows one rule: per round the uplink counts once per selected client, the downlink once
per distinct thing broadcast, times T = 200 rounds (the text says 500; only 200 gives the column).
Here every algorithm builds the messages of one round for m VGG11 clients, and the channel counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Predictor,
    Reply,
    Server,
    algorithms,
)
from perfed.core.channel import Channel
from perfed.core.layout import Table
from perfed.core.message import Message
from perfed.core.streams import stream_key
from perfed.core.threads import cpu_threads
from perfed.core.tree import Tree, Weights
from perfed.models import architectures, initial_weights
from perfed.paper.published import TABLE_1 as PUBLISHED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS, CLIENTS, CLASSES, PUBLIC = 200, 100, 10, 2000
ARCHITECTURE = "vgg11-bn"
UNIT = 1e7


@dataclass(frozen=True)
class Counted:
    """A row: the paper's cost at C=0.1 and C=0.15, in units of 10⁷ parameters, and what counts."""

    label: str
    algorithm: Mapping[str, Any]
    paper: tuple[float, float]
    counted: Callable[[str], bool] = lambda name: True
    """Which parts of a message this row counts."""


def _rows() -> Iterator[Counted]:
    """The methods of Table 1 that have a cost."""
    for row in PUBLISHED:
        if row.cost is None or row.label.endswith("(GM)"):  # crosses as its local model (LM) does
            continue
        label, algorithm = row.label.removesuffix(" (LM)"), row.algorithm
        if label == "Scaffold":
            yield Counted(f"{label}, without control variates", algorithm, row.cost, _no_control)
            label = f"{label}, as it crosses"
        if label == "FedDF":
            algorithm = {**algorithm, "steps": 0}  # nothing is trained here
        yield Counted(label, algorithm, row.cost)


def _no_control(name: str) -> bool:
    return not name.startswith("control")


TABLE_1 = tuple(_rows())


class DryClient:
    """A client that says what it would say, with a model that never changes."""

    steps, learning_rate = 1, 1.0

    def __init__(self, number: int, weights: Weights) -> None:
        self.weights = weights
        self.state: Tree = {}
        self.samples = torch.tensor(1)
        generator = torch.Generator().manual_seed(stream_key(0, "dry-client", number))
        self._soft_decisions = torch.rand(PUBLIC, CLASSES, generator=generator).softmax(1)

    def soft_decisions(self, weights: Weights | None = None) -> Tensor:
        return self._soft_decisions

    def sgd(self, weights: Weights, *_: Any, **__: Any) -> Weights:
        return weights.clone()

    def losses(self, models: Sequence[Weights], part: str) -> Tensor:
        return torch.zeros(len(models))

    def likelihoods(self, models: Sequence[Predictor], part: str) -> Tensor:
        return torch.ones(len(models), 1)

    def label_counts(self) -> Tensor:
        return torch.ones(CLASSES)


def round_cost(
    algorithm: Algorithm,
    clients: int,
    weights: Weights,
    counted: Callable[[str], bool] = lambda name: True,
) -> int:
    """Parameters that cross in one round: the first in which the server has something to say."""
    infos = [ClientInfo(number, ARCHITECTURE, samples=1) for number in range(clients)]
    # It has what the methods of the table use.
    dry = {info.id: cast(Client, DryClient(info.id, weights)) for info in infos}
    server = _server(weights)
    state = algorithm.start(server)
    up = {k: m for k, client in dry.items() if (m := algorithm.first_message(client)) is not None}
    down: dict[int, Message] = {}
    while not any(message.arrays for message in down.values()):
        if up:
            replies = [Reply(info, up[info.id], 1.0) for info in infos]
            state = algorithm.merge(server, state, replies)
        down = {info.id: algorithm.broadcast(server, state, info) for info in infos}
        up = {k: algorithm.client_round(dry[k], message) for k, message in down.items()}
    channel = Channel()
    channel.down({k: _only(counted, message) for k, message in down.items()})
    channel.up({k: _only(counted, message) for k, message in up.items()})
    return channel.total.parameters


def _only(counted: Callable[[str], bool], message: Message) -> Message:
    return Message.from_arrays({n: t for n, t in message.arrays.items() if counted(n)})


def _server(weights: Weights) -> Server:
    return Server(
        seed=0,
        round=0,
        architectures={ARCHITECTURE: CLIENTS},
        initial=lambda architecture, number: weights if number == 0 else weights.clone(),
        modules={},
        public=lambda: torch.empty(0),
    )


def costs(quick: bool = False) -> list[dict[str, Any]]:
    """Every row: the paper's cost and ours at C=0.1 and C=0.15, in units of 10⁷ parameters.

    ``quick`` is no different: nothing is trained.
    """
    weights = initial_weights(architectures.build(ARCHITECTURE), (3, 32, 32), CLASSES, seed=0)
    table = []
    with cpu_threads(1):
        for row in TABLE_1:
            algorithm = algorithms.build(row.algorithm)
            ours = [
                ROUNDS * round_cost(algorithm, clients, weights, row.counted) / UNIT
                for clients in (10, 15)
            ]
            table.append({"row": row.label, "paper": list(row.paper), "ours": ours})
    return table


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")


NOTE = """\
In units of 10⁷ parameters, T = 200 rounds of m = 10 and 15 VGG11 clients, public set of 2,000.
Scaffold: the paper leaves out the control variates, which really cross and double its cost.
PerFed-CKT also sends m·|P|·N once before the first round, which the paper does not count."""


def tables(result: Sequence[dict[str, Any]]) -> list[Table]:
    """A star where three digits differ from the paper's."""
    rows = []
    for row in result:
        cells = [row["row"]]
        for paper, ours in zip(row["paper"], row["ours"], strict=True):
            differs = three_digits(ours) != paper
            cells += [f"{paper:g}", f"{three_digits(ours):g}" + "*" * differs]
        rows.append(cells)
    header = ("", "paper, C=0.10", "ours", "paper, C=0.15", "ours")
    return [Table("The cost column of Table 1", header, rows, NOTE)]


def plot(result: Sequence[dict[str, Any]]) -> Figure:
    """The costs at C=0.10 on a logarithmic scale, ours and the paper's."""
    from matplotlib.figure import Figure  # not pyplot: a notebook's own backend stays as it is

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axis = figure.subplots()
    heights = [-n for n in range(len(result))]
    axis.barh(heights, [row["ours"][0] for row in result], color="#56B4E9", label="ours")
    axis.plot(
        [row["paper"][0] for row in result], heights, "D", c="#D55E00", mfc="w", label="paper"
    )
    axis.set_yticks(heights, [row["row"] for row in result])
    axis.set(xscale="log", xlabel="parameters communicated, 10⁷ (T = 200 rounds, C = 0.10)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    return figure
