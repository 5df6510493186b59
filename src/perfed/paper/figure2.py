"""Figure 2: which network each client has, and how many samples of each label.

The paper draws one of three networks for each client, a larger one with a probability in proportion
to the client's dataset, and divides CIFAR-10 by Dir(0.01). Its figure shows one draw; here is seed
0's, and the numbers over many seeds.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

from perfed.data import build_federation
from perfed.paper.tables import plan
from perfed.report.layout import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS, QUICK_SEEDS = 20, 3


def figure2(quick: bool = False) -> dict[str, Any]:
    """Architectures and label counts of seed 0, and what several seeds have in common."""
    chosen = plan(2, quick)
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
    }


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
    ]
    title = f"Figure 2: {clients} clients, Dir(0.01) on {result['data']}"
    header = ("", "seed 0", f"mean of {result['seeds']} seeds", "smallest", "largest")
    return [Table(title, header, rows)]


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
