"""What docs/successor.md shows: tables and the figure of benchmarks/successor.py's results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from committed import ROOT, machine, result

from perfed.report import layout
from perfed.report.layout import Table
from perfed.report.tables import quantity, spread

SMALL = 10  # training samples
HARM = 2.0  # points
FAMILIES = {"digits": "digits, MLP", "vgg": "CIFAR-10 / 100, VGG11"}
NAMES = {
    "c=1": "PerFed-CKT c=1",
    "c=2": "PerFed-CKT c=2",
    "c=3": "PerFed-CKT c=3",
    "c=4": "PerFed-CKT c=4",
    "evidence": "**PerFed-Evidence**",
    "evidence, always taught": "PerFed-Evidence, always taught",
    "fedavg": "FedAvg",
    "ditto": "Ditto",
    "fedfomo": "FedFomo",
}

Gains = Sequence[Sequence[float]]  # points above local, training samples, labels; of each client


def comparison(family: str) -> str:
    """Every method in every setting of a family."""
    record = result(f"successor_{family}")
    tables = []
    for partition in dict.fromkeys(row["partition"] for row in record["rows"]):
        rows = [r for r in record["rows"] if r["partition"] == partition]
        shown = [_cells(row) for row in rows if "clients" in row]
        header = ("", "accuracy", "above local", "n < 10", "harmed %", "bytes a round")
        tables.append(Table(partition, header, shown))
    note = (
        f"{FAMILIES[family]}, {record['config']['clients']} clients, "
        f"{record['config']['rounds']} rounds, seeds {record['seeds']}. Accuracy: mean over "
        "clients, ± standard deviation over seeds. Above local: points above the client's own "
        "model trained alone at the same times, mean over the clients of all seeds ± its "
        "standard error; n < 10: of clients with fewer than ten training samples. Harmed: clients "
        f"more than 2 points below their local model {machine(record['environment'])}."
    )
    tables[-1] = Table(tables[-1].title, tables[-1].header, tables[-1].rows, note)
    return layout.markdown(tables)


def _cells(row: dict[str, Any]) -> list[str]:
    method, gains = row["method"], row["clients"]
    cells = [NAMES.get(method, method), spread(row["accuracy"])]
    if method == "local":
        return [*cells, "–", "–", "–", "–"]
    return [
        *cells,
        f"{_mean(gains):+.1f} ± {_error(gains):.1f}",
        f"{_mean(_small(gains)):+.1f}" if _small(gains) else "–",
        f"{_harmed(gains):.0f}",
        quantity(row["bytes_per_round"], "B"),
    ]


def _mean(gains: Gains) -> float:
    return statistics.mean(gain[0] for gain in gains)


def _error(gains: Gains) -> float:
    return statistics.stdev(gain[0] for gain in gains) / len(gains) ** 0.5


def _small(gains: Gains) -> Gains:
    return [gain for gain in gains if gain[1] < SMALL]


def _harmed(gains: Gains) -> float:
    return 100 * statistics.mean(gain[0] < -HARM for gain in gains)


def promise() -> str:
    """Does PerFed-Evidence lose to local training anywhere?"""
    rows, small = [], []
    for family, title in FAMILIES.items():
        for row in result(f"successor_{family}")["rows"]:
            if row["method"] != "evidence":
                continue
            gains = row["clients"]
            if _small(gains):
                small.append(_mean(_small(gains)))
            kept = _mean(gains) >= -_error(gains)
            cells = [
                f"{title}, {row['partition']}",
                f"{_mean(gains):+.1f} ± {_error(gains):.1f}",
                "yes" if kept else "**no**",
                f"{_harmed(gains):.1f}",
                "yes" if _harmed(gains) <= 5 else "**no**",
                f"{_mean(_small(gains)):+.1f}" if _small(gains) else "–",
            ]
            rows.append(cells)
    header = ("", "above local", "not below it", "harmed %", "at most 5 %", "n < 10")
    note = (
        f"Clients with fewer than ten training samples, mean over these {len(small)} settings: "
        f"{statistics.mean(small):+.1f} points (wanted: +5)."
    )
    return layout.markdown([Table("", header, rows, note)])


def who_gains(path: Path = ROOT / "docs" / "who-gains.png") -> Path:
    """Before and after: every client's gain over local training, by data and by labels."""
    from matplotlib.figure import Figure

    record = result("successor_digits")
    methods = {"c=3": "PerFed-CKT, c=3", "evidence": "PerFed-Evidence"}
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey=True)
    for line, (method, title) in zip(axes, methods.items(), strict=True):
        clients = [
            client for row in record["rows"] if row["method"] == method for client in row["clients"]
        ]
        for axis, position in zip(line, (1, 2), strict=True):
            _scatter(axis, clients, position)
        lost = 100 * statistics.mean(client[0] < -HARM for client in clients)
        line[0].set_title(
            f"{title}: {statistics.mean(c[0] for c in clients):+.1f} points, {lost:.0f} % harmed",
            loc="left",
        )
        line[0].set_ylabel("points above local")
    axes[0][0].set_xscale("log")
    axes[0][0].set_xticks([2, 5, 10, 20, 50], labels=["2", "5", "10", "20", "50"])
    axes[0][0].minorticks_off()
    axes[1][0].set_xlabel("training samples of the client")
    axes[1][1].set_xlabel("labels among them")
    figure.savefig(path, dpi=120)
    return path


def _scatter(axis: Any, clients: Gains, position: int) -> None:
    """One dot a client; blue above its local model, orange below, a line through the means."""
    import numpy as np

    random = np.random.default_rng(0)
    gain = np.array([client[0] for client in clients])
    place = np.array([float(client[position]) for client in clients])
    spread_out = place * np.exp(random.normal(0, 0.03, len(place)))  # dots side by side
    colours = np.where(gain > HARM, "#0072B2", np.where(gain < -HARM, "#D55E00", "#999999"))
    axis.scatter(spread_out, gain, s=9, c=colours, alpha=0.45, lw=0)
    edges = np.unique(np.quantile(place, np.linspace(0, 1, 7)))
    middles, means = [], []
    for low, high in zip(edges, [*edges[1:], np.inf], strict=True):
        inside = (place >= low) & (place < high)
        if inside.any():
            middles.append(place[inside].mean())
            means.append(gain[inside].mean())
    axis.plot(middles, means, color="black", lw=1.5, marker="o", ms=4)
    axis.axhline(0, color="#666666", lw=0.8)
    axis.grid(alpha=0.25)


BLOCKS = {
    "successor-promise": promise,
    **{f"successor-{name}": lambda name=name: comparison(name) for name in FAMILIES},
}

if __name__ == "__main__":
    print(who_gains())
