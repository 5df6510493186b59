"""What docs/successor.md and docs/kin-parts.md show of benchmarks/kin.py's results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from committed import machine, result
from drawn import COLOUR_OF
from matplotlib.figure import Figure

from perfed.core import layout
from perfed.core.layout import Table
from perfed.report.theme import RC
from perfed.runs.tables import HARM, quantity

FAMILIES = {
    "digits": "digits, MLP",
    "digits-three": "digits, three networks",
    "cifar": "CIFAR-10, CNN",
    "cifar-three": "CIFAR-10, three networks",
}
OTHERS = {
    "evidence": "PerFed-Evidence",
    "c=3": "PerFed-CKT c=3",
    "hypcluster c=3": "HypCluster c=3",
    "hypcluster, right c": "HypCluster, right c",
    "fedavg-ft": "FedAvg-FT",
    "ditto": "Ditto",
    "fedfomo": "FedFomo",
    "fedfomo, trained kept": "FedFomo, trained kept",
    "fedavg": "FedAvg",
}
ABLATED = {
    "kin": "PerFed-Kin",
    "oracle": "true groups given",
    "evidence": "one table (PerFed-Evidence)",
    "trusting": "without asking who is a stranger",
    "by validation": "without training samples in the gate",
    "own labels": "not told which labels to expect",
    "forgetful": "without the server's memory",
}
ABLATED_WITH_THREE = {
    name: ABLATED[name] for name in ("kin", "oracle", "by validation", "own labels")
}
GIVEN = {
    "c=3": "PerFed-CKT c=3",
    "c=3, memory": "with the server's memory",
    "c=3, gate": "with the gate",
    "c=3, kin": "with kin for c-means",
    "kin": "PerFed-Kin",
}
CLUSTERS = {f"c={number}": f"c={number}" for number in (1, 2, 3, 4)} | {"kin": "PerFed-Kin"}
GATES = {
    "trusting": "what others gained counts for all",
    "by validation": "and against strangers",
    "cautious": "and twice the caution",
    "training 20": "training samples count 20",
    "training 40": "**training samples count 40**",
    "training 80": "training samples count 80",
}
DRAWN = {
    "fedavg-ft": ("FedAvg-FT (weights)", "s", "#6a6a6a"),
    "ditto": ("Ditto (weights)", "D", COLOUR_OF["ditto"]),
    "hypcluster c=3": ("HypCluster, c=3 (weights)", "^", COLOUR_OF["hypcluster"]),
    "c=3": ("PerFed-CKT, c=3", "v", COLOUR_OF["perfed-ckt"]),
    "kin": ("PerFed-Kin", "o", COLOUR_OF["perfed-kin"]),
}
"""Title, marker and colour; the last one lies above the others."""
MINORITY = ("kin", "oracle", *(name for name in OTHERS if name != "fedavg"))
DRAWS = 2000

Clients = Sequence[Sequence[float]]  # gain, group, repaired; of each client of a seed


def gains(row: dict[str, Any], group: int | None = None) -> list[list[float]]:
    """Of each seed the gain of every client, or of those of a group."""
    return [
        [client[0] for client in clients if group is None or client[1] == group]
        for clients in row["clients"]
    ]


def interval(by_seed: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % of the mean gain, when seeds are drawn anew and clients in each."""
    random = np.random.default_rng(0)
    values = [np.array(clients) for clients in by_seed]
    means = [
        np.mean(
            [
                random.choice(values[seed], len(values[seed])).mean()
                for seed in random.integers(len(values), size=len(values))
            ]
        )
        for _ in range(DRAWS)
    ]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def cell(row: dict[str, Any] | None, group: int | None = None) -> str:
    """Mean gain and how many of a hundred clients are harmed."""
    if row is None:
        return "–"
    by_seed = gains(row, group)
    mean = statistics.mean(statistics.mean(clients) for clients in by_seed)
    return f"{mean:+.1f} / {_harmed(by_seed):.0f}"


def _harmed(by_seed: Iterable[Sequence[float]]) -> float:
    everyone = [gain for clients in by_seed for gain in clients]
    return 100 * statistics.mean(gain < -HARM for gain in everyone)


def _found(family: str) -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    """Of methods that have run with every seed."""
    record = result(f"kin_{family}")
    whole = [row for row in record["rows"] if len(row["seeds"]) == len(record["seeds"])]
    return record, {(row["setting"], row["method"]): row for row in whole}


def comparison(family: str) -> str:
    """PerFed-Kin with its interval, and the others beside it."""
    record, rows = _found(family)
    shown = [name for name in OTHERS if any(method == name for _, method in rows)]
    lines = []
    for setting in record["settings"]:
        kin = rows.get((setting, "kin"))
        if kin is None:
            continue
        low, high = interval(gains(kin))
        local = statistics.mean(rows[setting, "local"]["accuracy"])
        own = f"**{cell(kin)}**"
        others = [cell(rows.get((setting, name))) for name in shown]
        lines.append((setting, f"{100 * local:.1f}", own, f"{low:+.1f} … {high:+.1f}", *others))
    sent = ["bytes a round", "0", _bytes_a_round(rows, "kin"), ""]
    sent += [_bytes_a_round(rows, name) for name in shown]
    header = ("", "local", "PerFed-Kin", "95 %", *(OTHERS[name] for name in shown))
    return layout.markdown([Table("", header, [*lines, sent], _note(family, record))])


def gain_and_harm(family: str) -> Figure:
    """In every setting: how much clients gain, and how many are harmed."""
    record, rows = _found(family)
    settings = [setting for setting in record["settings"] if (setting, "kin") in rows]
    places = range(len(settings), 0, -1)  # the first at the top
    with mpl.rc_context(RC):
        drawing = Figure(figsize=(9, 0.34 * len(settings) + 1.4), layout="constrained")
        axes = drawing.subplots(1, 2, sharey=True)
        for method, (title, marker, colour) in DRAWN.items():
            by_setting = [gains(rows[setting, method]) for setting in settings]
            means = [statistics.mean(map(statistics.mean, by_seed)) for by_seed in by_setting]
            size = 9 if method == "kin" else 6
            look = {"ls": "", "marker": marker, "ms": size, "color": colour, "label": title}
            for axis, values in zip(axes, (means, map(_harmed, by_setting)), strict=True):
                axis.plot([*values], places, **look, clip_on=False, zorder=3)
        for axis in axes:
            axis.axvline(0, color="#6a6a6a", linewidth=0.8)
            axis.grid(axis="x", visible=False)
        axes[0].set_yticks(places, settings)
        axes[0].set_xlabel("points above local training")
        axes[1].set_xlabel(f"clients that lose more than {HARM:g} points, %")
        drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return drawing


def _bytes_a_round(rows: dict[tuple[str, str], dict[str, Any]], method: str) -> str:
    sent = [row["bytes_per_round"] for (_, name), row in rows.items() if name == method]
    return quantity(max(sent), "B")


def own_tests() -> str:
    """Who seems harmed by clients' own test samples, and who by those of all clients."""
    families = ("digits-own", "digits", "digits-three-own", "digits-three")
    found = [_found(family) for family in families]
    lines = [
        (setting, *(cell(rows[setting, "kin"]) for _, rows in found))
        for setting in found[0][0]["settings"]
    ]
    header = ("", "MLP: own", "of all", "three networks: own", "of all")
    return layout.markdown([Table("", header, lines)])


def minority(family: str) -> str:
    """Only those whose labels mean something else."""
    record, rows = _found(family)
    settings = [s for s in record["settings"] if s.endswith("other labels") and (s, "kin") in rows]
    names = {"kin": "**PerFed-Kin**", "oracle": "PerFed-Kin, true groups given"} | OTHERS
    lines = [
        (names[method], *(cell(rows.get((setting, method)), group=1) for setting in settings))
        for method in MINORITY
        if any((setting, method) in rows for setting in settings)
    ]
    return layout.markdown([Table("", ("", *settings), lines)])


def side_by_side(family: str, titles: Mapping[str, str]) -> str:
    """Some methods in all settings."""
    record, rows = _found(family)
    settings = [setting for setting in record["settings"] if (setting, "kin") in rows]
    names = [name for name in titles if any(method == name for _, method in rows)]
    lines = [
        (setting, *(cell(rows.get((setting, name))) for name in names)) for setting in settings
    ]
    return layout.markdown([Table("", ("", *(titles[name] for name in names)), lines)])


def gate(family: str) -> str:
    """What each gate gains, by validation samples of other clients, which it has not heard of."""
    record = result("kin_gate")
    rows = {(row["setting"], row["gate"]): row for row in record["rows"] if row["family"] == family}
    lines = []
    for setting in dict.fromkeys(setting for setting, _ in rows):
        of = [rows[setting, name] for name in GATES]
        lines.append((setting, *map(cell, of)))
        if setting.endswith("other labels"):
            lines.append(("– those alone", *(cell(row, group=1) for row in of)))
    seeds = record["seeds"]
    note = (
        f"{FAMILIES[family]}, tuning seeds {seeds[0]} to {seeds[-1]}. Points of accuracy above the "
        f"witness / percent of clients more than {HARM:g} points below it, by the validation "
        "samples of all other clients, seen in the client's way and in proportion to its labels "
        f"{machine(record['environment'])}."
    )
    return layout.markdown([Table("", ("", *GATES.values()), lines, note)])


def repaired() -> str:
    """Natural clients under Dir(0.01), and those that the minimum size made."""
    lines = []
    _, rows = _found("digits")
    for method in ("kin", "evidence", "ditto", "hypcluster c=3", "fedavg-ft"):
        row = rows.get(("Dir(0.01)", method))
        if row is None:
            continue
        parts = [
            [[client[0] for client in clients if client[2] == kind] for clients in row["clients"]]
            for kind in (0, 1)
        ]
        cells = [
            f"{statistics.mean(gain for clients in part for gain in clients):+.1f} / "
            f"{_harmed(part):.0f}"
            for part in parts
        ]
        bare = cell(rows.get(("Dir(0.01), not repaired", method)))
        name = {"kin": "**PerFed-Kin**"} | OTHERS
        lines.append((name[method], *cells, bare))
    header = ("", "natural clients", "made by the repair", "no repair: small ones left out")
    return layout.markdown([Table("", header, lines)])


def _note(family: str, record: dict[str, Any]) -> str:
    config = record["config"]
    fresh = config.get("fresh_test", 0)
    has_weights = any(row["method"] in ("ditto", "c=3") for row in record["rows"])
    tuned = _tuned(family, record["tuning_seeds"]) if has_weights else ""
    judged = (
        f"{fresh:,} fresh samples for each client"
        if fresh
        else "the test samples of all clients, as many as there are with the client's mix of labels"
        if config.get("shared_test")
        else "clients' own test samples"
    )
    return (
        f"{FAMILIES[family]}: {config['clients']} clients, {config['clients_per_round']} a round, "
        f"{config['rounds']} rounds, seeds {record['seeds']}{tuned}. Local: accuracy in percent. "
        "All others: points above local training, mean over clients / percent of clients more than "
        f"{HARM:g} points below their own local model. 95 %: interval of PerFed-Kin's mean, seeds "
        f"and clients drawn anew {DRAWS:,} times; with {len(record['seeds'])} seeds it is rather "
        f"too narrow than too wide. Evaluated on {judged} "
        f"{' and '.join(map(machine, record['environments']))}."
    )


def _tuned(family: str, seeds: Sequence[int]) -> str:
    """Of which λ one was chosen, and by what."""
    names = {"perfed-ckt": "PerFed-CKT", "ditto": "Ditto"}
    tried = result(f"kin_tune_{family}")["tried"]
    grids = [
        f"{names[method]} ({', '.join(f'{weight:g}' for weight in weights)})"
        for method, weights in tried.items()
    ]
    return f"; λ of {' and '.join(grids)} by the validation data of seeds {seeds}"


BLOCKS = {
    "kin-digits": lambda: comparison("digits"),
    "kin-minority": lambda: minority("digits"),
    "kin-ablation": lambda: side_by_side("digits", ABLATED),
    "kin-clusters": lambda: side_by_side("digits", CLUSTERS),
    "kin-ckt": lambda: side_by_side("digits", GIVEN),
    "kin-own-tests": own_tests,
    "kin-repaired": repaired,
    "kin-gate": lambda: gate("digits-three"),
    "kin-digits-three": lambda: comparison("digits-three"),
    "kin-minority-three": lambda: minority("digits-three"),
    "kin-clusters-three": lambda: side_by_side("digits-three", CLUSTERS),
    "kin-ablation-three": lambda: side_by_side("digits-three", ABLATED_WITH_THREE),
    "kin-cifar": lambda: comparison("cifar"),
    "kin-minority-cifar": lambda: minority("cifar"),
}
FIGURES = {
    "kin-digits": lambda: gain_and_harm("digits"),
    "kin-digits-three": lambda: gain_and_harm("digits-three"),
}
