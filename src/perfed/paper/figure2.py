"""Figure 2: which network each client has, and how many samples of each label.

The paper draws one of three networks for each client, a larger one with a probability in proportion
to the client's dataset, and divides CIFAR-10 by Dir(0.01). Its figure shows one draw; here is seed
0's, and the numbers over many seeds: also what they mean for who is ever selected, and for the cost
of sending such networks, which the paper's Table 2 states for FedDF.
"""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

from perfed.core.inputs import Inputs
from perfed.core.layout import Table
from perfed.core.selection import select_clients
from perfed.data import Federation, build_federation
from perfed.models import Architecture, Models, parameter_count
from perfed.paper.tables import COST_ROUNDS, table_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS, QUICK_SEEDS = 20, 3


def figure2(quick: bool = False) -> dict[str, Any]:
    """Architectures and label counts of seed 0, and what several seeds have in common."""
    chosen = table_run(2, quick)
    draws = []
    for seed in range(QUICK_SEEDS if quick else SEEDS):
        experiment = chosen.experiment({"name": "local"}, chosen.fractions[0], seed)
        federation = build_federation(
            experiment.data, experiment.partition, experiment.split, experiment.clients, seed
        )
        dealt = experiment.models.deal(federation.train_sizes, seed)
        counts = [
            np.sum(list(client["labels"].values()), axis=0).tolist()
            for client in federation.record()["clients"]
        ]
        draws.append(
            {
                "architectures": [architecture.label() for architecture in dealt],
                "labels": counts,
                "train_sizes": federation.train_sizes.tolist(),
                "moved": federation.partition_facts["moved_to_minimum"],
                **_selected_by_size(federation.train_sizes, seed, chosen.fractions[0]),
                **_feddf_costs(experiment.models, federation, seed),
            }
        )
    order = [architecture.label() for architecture in experiment.models.architectures]
    return {
        "data": "digits" if quick else "cifar10",
        "order": order,
        "example": draws[0],
        "seeds": len(draws),
        "shares": {
            name: [draw["architectures"].count(name) / len(draw["labels"]) for draw in draws]
            for name in order
        },
        "labels_per_client": [
            statistics.mean(sum(count > 0 for count in client) for client in draw["labels"])
            for draw in draws
        ],
        "largest": [max(map(sum, draw["labels"])) for draw in draws],
        "at_the_minimum": [
            sum(sum(client) == min(map(sum, draw["labels"])) for client in draw["labels"])
            for draw in draws
        ],
        "moved": [draw["moved"] for draw in draws],
        **{
            key: [draw[key] for draw in draws]
            for key in ("never_in_100", "never_in_500", "cost_uniform", "cost_by_size")
        },
    }


def _selected_by_size(sizes: np.ndarray, seed: int, fraction: float) -> dict[str, int]:
    """Clients that are never selected, if they are selected in proportion to their data."""
    trained: set[int] = set()
    found = {}
    for round_number in range(500):
        trained.update(
            select_clients(sizes, round(fraction * len(sizes)), True, seed, round_number)
        )
        if round_number + 1 in (100, 500):
            found[f"never_in_{round_number + 1}"] = len(sizes) - len(trained)
    return found


def _feddf_costs(models: Models, federation: Federation, seed: int) -> dict[str, float]:
    """Parameters that FedDF sends and receives over 200 rounds of ten clients, in 10⁷."""
    dealt = models.deal(federation.train_sizes, seed)
    inputs, classes = federation.inputs, federation.samples.classes
    sizes = {a: _parameters(a, inputs, classes) for a in models.architectures}
    costs = {}
    for name, by_size in (("cost_uniform", False), ("cost_by_size", True)):
        total = 0
        for round_number in range(COST_ROUNDS):
            selected = select_clients(federation.train_sizes, 10, by_size, seed, round_number)
            up = [dealt[client] for client in selected]
            total += sum(sizes[a] for a in up) + sum(sizes[a] for a in set(up))
        costs[name] = total / 1e7
    return costs


@functools.cache
def _parameters(architecture: Architecture, inputs: Inputs, classes: int) -> int:
    return parameter_count(architecture.build_for(inputs, classes))


def tables(result: dict[str, Any]) -> list[Table]:
    clients = len(result["example"]["labels"])
    rows = [
        [f"share with {name} (%)", *_row([100 * share for share in shares])]
        for name, shares in result["shares"].items()
    ]
    rows += [
        ["labels that a client has", *_row(result["labels_per_client"])],
        ["samples of the largest client", *_row(result["largest"])],
        ["clients at the minimum", *_row(result["at_the_minimum"])],
        ["samples moved to reach it", *_row(result["moved"])],
        ["selected by size, never in 100 rounds", *_row(result["never_in_100"])],
        ["selected by size, never in 500 rounds", *_row(result["never_in_500"])],
        ["FedDF's cost, selected uniformly", *_row(result["cost_uniform"])],
        ["FedDF's cost, selected by size", *_row(result["cost_by_size"])],
    ]
    title = f"Figure 2: {clients} clients, Dir(0.01) on {result['data']}"
    header = ("", "seed 0", f"mean of {result['seeds']} seeds", "smallest", "largest")
    return [Table(title, header, rows, NOTE)]


NOTE = "FedDF's cost: 10⁷ parameters for ten clients a round, 200 rounds; the paper says 1780."


def _row(values: list[float]) -> list[str]:
    return [f"{v:.3g}" if v < 1000 else f"{v:.0f}" for v in _facts(values)]


def _facts(values: list[float]) -> tuple[float, ...]:
    return values[0], statistics.mean(values), min(values), max(values)


def plot(result: dict[str, Any]) -> Figure:
    """Left, how many clients have which network; right, a bubble for each client and label."""
    from matplotlib.figure import Figure  # not pyplot: a notebook's own backend stays as it is

    example = result["example"]
    counts = np.array(example["labels"])
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    bars, bubbles = figure.subplots(1, 2, width_ratios=(1, 3.4))
    colours = ("#56B4E9", "#0072B2", "#D55E00")
    for position, (name, colour) in enumerate(zip(result["order"], colours, strict=True)):
        number = example["architectures"].count(name)
        bars.bar(position, number, color=colour)
        bars.annotate(str(number), (position, number), ha="center", va="bottom")
    bars.set_xticks(range(len(result["order"])), result["order"], fontsize=8)
    bars.set_ylabel("clients")
    bars.margins(y=0.12)
    bars.set_title("(a) networks", fontsize=10)
    colour_of = dict(zip(result["order"], colours, strict=True))
    for client, row in enumerate(counts):
        labels = np.flatnonzero(row)
        bubbles.scatter(
            np.full(len(labels), client),
            labels,
            s=260 * row[labels] / counts.max() + 3,
            color=colour_of[example["architectures"][client]],
            alpha=0.7,
            linewidths=0,
        )
    bubbles.set(xlabel="client", ylabel="label", yticks=range(counts.shape[1]))
    bubbles.set_title("(b) samples of each label; the colour is the client's network", fontsize=10)
    bubbles.grid(alpha=0.2)
    for axis in (bars, bubbles):
        axis.spines[["top", "right"]].set_visible(False)
    return figure
