"""What a newcomer sees first, and docs/rounding.md, from committed results."""

from __future__ import annotations

import statistics
from typing import Any

from committed import machine, result

from perfed.runs.tables import quantity

# What is shown of the runs of every algorithm, by its label, and what crosses in it.
SHOWN = {
    "local": ("local training", "nothing"),
    "fedavg": ("FedAvg", "weights"),
    "ditto (λ=1)": ("Ditto", "weights"),
    "hypcluster (c=3)": ("HypCluster", "weights"),
    "perfed-ckt (c=3, λ=1)": ("**PerFed-CKT**", "predictions"),
    "perfed-kin (λ=2)": ("**PerFed-Kin**", "predictions"),
}


def first_look() -> str:
    record = result("all_algorithms")
    runs: dict[str, list[Any]] = {}
    for run in record["runs"]:
        runs.setdefault(run["algorithm"], []).append(run)
    alone = _mean(runs["local"], "test_accuracy")
    lines = [
        "| method | what crosses | test accuracy | above local | weakest clients |",
        "|---|---|---:|---:|---:|",
    ]
    for label, (name, crosses) in SHOWN.items():
        own = runs[label]
        accuracy, weakest = (_mean(own, f"test_accuracy{k}") for k in ("", "_worst_decile"))
        sent = statistics.mean(r["traffic"]["up_bytes"] + r["traffic"]["down_bytes"] for r in own)
        above = "–" if label == "local" else f"{accuracy - alone:+.1f}"
        crosses += f", {quantity(sent, 'B')}" if sent else ""
        lines.append(f"| {name} | {crosses} | {accuracy:.1f} % | {above} | {weakest:.1f} % |")
    seeds = sorted({run["seed"] for run in record["runs"]})
    note = (
        "Means over all clients, after forty rounds, seeds "
        f"{', '.join(map(str, seeds))}. Above local: points above local training. Weakest clients: "
        "the tenth that fares worst. HypCluster and PerFed-CKT are told that there are three "
        "groups. "
        f"{machine(record['environment'])}"
    )
    return "\n".join([*lines, "", note])


def _mean(runs: list[Any], key: str) -> float:
    """In percent, of the model that a client would use."""
    return 100 * statistics.mean(next(iter(r["models"].values()))["last"][key] for r in runs)


def chaos() -> str:
    record = result("chaos")
    rounds = sorted({row["rounds"] for row in record["rows"]})
    head = " | ".join(f"{count} round{'s' * (count > 1)}" for count in rounds)
    lines = [f"| network | what differs | {head} | accuracy, most |"]
    lines.append("|---|---|" + "---:|" * (len(rounds) + 1))
    by_network: dict[str, list[Any]] = {}
    for row in record["rows"]:
        by_network.setdefault(row["network"], []).append(row)
    for network, rows in by_network.items():
        for key, words in (("engine", "the engine"), ("rate", "the rate's eighth digit")):
            apart = {row["rounds"]: f"{row[key]['distance']:.0e}" for row in rows}
            cells = " | ".join(apart.get(count, "–") for count in rounds)
            most = max(abs(row[key]["mean_points"]) for row in rows)
            lines.append(f"| {network} | {words} | {cells} | {most:.1f} |")
    return "\n".join([*lines, "", machine(record["environment"])])


def first_example() -> str:
    local, taught = (result(f"first_example_{name}") for name in ("local", "perfed-ckt"))
    rates = local["grid"]["training.learning_rate"]
    some, everybody = taught["grid"]["clients_per_round"]
    default = 2.0  # λ of PerFed-CKT
    columns = {
        "local training": (local, {}),
        f"PerFed-CKT, {some} clients a round": (taught, {"clients_per_round": some}),
        f"PerFed-CKT, all {everybody}": (taught, {"clients_per_round": everybody}),
    }
    lines = [f"| learning rate | {' | '.join(columns)} |", "|---:|" + "---:|" * len(columns)]
    for rate in rates:
        cells = []
        for record, choice in columns.values():
            wanted = {"training.learning_rate": rate, **choice}
            if record is taught:
                wanted["algorithm.weight"] = default
            cells.append(f"{_validation(record, wanted):.1f}")
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    seeds, rounds = local["seeds"], local["config"]["rounds"]
    note = (
        f"Mean validation accuracy in %, after {rounds} rounds, λ = {default:g}, seeds "
        f"{', '.join(map(str, seeds))}. Other λ are in the record. {machine(local['environment'])}"
    )
    return "\n".join([*lines, "", note])


def _validation(record: dict[str, Any], choice: dict[str, float]) -> float:
    found = next(trial for trial in record["trials"] if trial["choice"] == choice)
    return 100 * statistics.mean(found["validation_accuracy"])


BLOCKS = {"first-look": first_look, "first-example": first_example, "chaos": chaos}
