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
FEW = 10  # clients; of fewer no mean is shown
HARM = 2.0  # points
FAMILIES = {
    "digits": "digits, MLP",
    "cifar": "CIFAR-10 / 100, small CNN",
    "vgg": "CIFAR-10 / 100, VGG11",
    "mixed": "CIFAR-10 / 100, CNN, VGG11 and VGG13",
}
NAMES = {
    "c=1": "PerFed-CKT c=1",
    "c=2": "PerFed-CKT c=2",
    "c=3": "PerFed-CKT c=3",
    "c=4": "PerFed-CKT c=4",
    "local again": "local, other mini-batches",
    "evidence": "**PerFed-Evidence**",
    "cautious": "**PerFed-Evidence**, caution 8",
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
        "standard error; n < 10: of clients with fewer than ten training samples, where there are "
        "ten of them. Harmed: clients more than 2 points below their local model "
        f"{machine(record['environment'])}."
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
        _gain(gains),
        f"{_mean(_small(gains)):+.1f}" if _small(gains) else "–",
        f"{_harmed(gains):.0f}",
        quantity(row["bytes_per_round"], "B"),
    ]


def _mean(gains: Gains) -> float:
    return statistics.mean(gain[0] for gain in gains)


def _error(gains: Gains) -> float:
    return statistics.stdev(gain[0] for gain in gains) / len(gains) ** 0.5


def _small(gains: Gains) -> Gains:
    small = [gain for gain in gains if gain[1] < SMALL]
    return small if len(small) >= FEW else []


def _harmed(gains: Gains) -> float:
    return 100 * statistics.mean(gain[0] < -HARM for gain in gains)


def promise() -> str:
    """Does PerFed-Evidence lose to local training anywhere?"""
    rows, small = [], []
    for family, title in FAMILIES.items():
        found = {(r["partition"], r["method"]): r for r in result(f"successor_{family}")["rows"]}
        for partition in dict.fromkeys(partition for partition, _ in found):
            gains = found[partition, "evidence"]["clients"]
            again, cautious = (found.get((partition, m)) for m in ("local again", "cautious"))
            if _small(gains):
                small.append(_mean(_small(gains)))
            rows.append(
                [
                    f"{title}, {partition}",
                    _gain(gains),
                    "yes" if _mean(gains) >= -_error(gains) else "**no**",
                    f"{_mean(_small(gains)):+.1f}" if _small(gains) else "–",
                    f"{_harmed(gains):.1f}",
                    f"{_harmed(again['clients']):.1f}" if again else "–",
                    _gain(cautious["clients"]) if cautious else "–",
                    f"{_harmed(cautious['clients']):.1f}" if cautious else "–",
                ]
            )
    header = (
        "",
        "above local",
        "not below it",
        "n < 10",
        "harmed %",
        "by chance %",
        "caution 8: above local",
        "harmed %",
    )
    note = (
        "n < 10: of clients with fewer than ten training samples, where there are ten of them; the "
        f"mean of these {len(small)} settings is {statistics.mean(small):+.1f} points. By chance: "
        "of local training itself, once more with other mini-batches."
    )
    return layout.markdown([Table("", header, rows, note)])


def families() -> str:
    """The same in a few lines: the means over a family's settings, of both methods."""
    rows, records = [], []
    for family, title in FAMILIES.items():
        record = result(f"successor_{family}")
        records.append(record)
        cells = [title, str(len({row["partition"] for row in record["rows"]}))]
        for method in ("c=3", "evidence"):
            of_settings = [r["clients"] for r in record["rows"] if r["method"] == method]
            if not of_settings:
                cells += ["–", "–"]
                continue
            cells.append(f"{statistics.mean(map(_mean, of_settings)):+.1f}")
            cells.append(f"{statistics.mean(map(_harmed, of_settings)):.0f}")
        rows.append(cells)
    header = (
        "",
        "settings",
        "PerFed-CKT c=3, above local",
        "harmed %",
        "PerFed-Evidence, above local",
        "harmed %",
    )
    note = (
        f"Points above the client's own local model, means over settings; seeds "
        f"{records[0]['seeds']}. Harmed: clients more than 2 points below it."
    )
    return layout.markdown([Table("", header, rows, note)])


def _gain(gains: Gains) -> str:
    return f"{_mean(gains):+.1f} ± {_error(gains):.1f}"


def first_hand() -> str:
    """What a teacher is worth that is made of students, and one made of witnesses."""
    record = result("first_hand")
    settings = list(dict.fromkeys(row["setting"] for row in record["rows"]))
    cells: dict[str, list[str]] = {}
    for row in record["rows"]:
        cells.setdefault(row["method"], []).append(f"{100 * statistics.mean(row['accuracy']):.1f}")
    note = (
        f"Test accuracy of the taught model, mean over clients and tuning seeds {record['seeds']}; "
        f"digits, CNN, {record['config']['rounds']} rounds {machine(record['environment'])}."
    )
    rows = [[method, *accuracies] for method, accuracies in cells.items()]
    return layout.markdown([Table("", ("who speaks", *settings), rows, note)])


def who_gains(path: Path = ROOT / "docs" / "who-gains.png") -> Path:
    """Before and after: every client's gain over local training, by data and by labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.8), layout="constrained")
    halves = figure.subfigures(1, 2, wspace=0.04)
    for half, family in zip(halves, ("digits", "vgg"), strict=True):
        half.suptitle(FAMILIES[family], fontweight="bold")
        _before_and_after(half, result(f"successor_{family}"))
    figure.savefig(path, dpi=120)
    return path


def _before_and_after(figure: Any, record: dict[str, Any]) -> None:
    methods = {"c=3": "PerFed-CKT, c=3", "evidence": "PerFed-Evidence"}
    axes = figure.subplots(2, 2, sharex="col", sharey=True)
    for line, (method, title) in zip(axes, methods.items(), strict=True):
        clients = [
            client for row in record["rows"] if row["method"] == method for client in row["clients"]
        ]
        for axis, position in zip(line, (1, 2), strict=True):
            _scatter(axis, clients, position)
        line[0].set_title(
            f"{title}: {_mean(clients):+.1f} points, {_harmed(clients):.0f} % harmed", loc="left"
        )
        line[0].set_ylabel("points above local")
    axes[0][0].set_xscale("log")
    most = max(client[1] for row in record["rows"] for client in row.get("clients", ()))
    ticks = [tick for tick in (2, 5, 10, 20, 50, 100, 200, 500) if tick <= most]
    axes[0][0].set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes[0][0].minorticks_off()
    axes[1][0].set_xlabel("training samples of the client")
    axes[1][1].set_xlabel("labels among them")


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
    "successor-families": families,
    "first-hand": first_hand,
    **{f"successor-{name}": lambda name=name: comparison(name) for name in FAMILIES},
}

if __name__ == "__main__":
    print(who_gains())
