"""What docs/one-table.md shows: tables and the figure of benchmarks/successor.py's results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from committed import ROOT, machine, result
from successor import CAUTION, MIDDLE

from perfed.core import layout
from perfed.core.layout import Table, with_minus
from perfed.runs.tables import HARM, SMALL, quantity, spread

FEW = 10  # clients; of fewer no mean is shown
CAUTIOUS = f"caution {CAUTION:g}"
FAMILIES = {
    "digits": "digits, MLP",
    "cifar": "CIFAR-10, CNN",
    "vgg": "CIFAR-10, VGG11",
    "mixed": "CIFAR-10, mixed",
}
SHORT = {"digits": "digits", "cifar": "CNN", "vgg": "VGG11", "mixed": "mixed"}
NAMES = {
    "majority": "majority",
    "local": "local",
    "local again": "local, other mini-batches",
    "evidence": "**PerFed-Evidence**",
    "cautious": f"**PerFed-Evidence**, {CAUTIOUS}",
    **{
        f"c={clusters}{weight}": f"PerFed-CKT c={clusters}"
        for weight in ("", f" at {MIDDLE}")
        for clusters in (1, 2, 3, 4)
    },
    "fedavg": "FedAvg",
    "ditto": "Ditto",
    "fedfomo": "FedFomo",
}

TUNED = {"perfed-ckt": "PerFed-CKT c=3", "ditto": "Ditto"}

Gains = Sequence[Sequence[float]]  # points above local, training samples, labels; of each client
BySeed = Sequence[Gains]


def comparison(family: str, judge: str = "") -> str:
    """Every method in every setting of a family."""
    record = result("_".join(filter(None, ["successor", family, judge])))
    tables = []
    for partition in dict.fromkeys(row["partition"] for row in record["rows"]):
        rows = {r["method"]: r for r in record["rows"] if r["partition"] == partition}
        settings = record["methods"][partition]
        shown = [
            _cells(rows[method], settings[method], len(record["seeds"]))
            for method in NAMES
            if method in rows
        ]
        header = ("", "accuracy", "above local", "n < 10", "harmed %", "bytes a round")
        tables.append(Table(partition, header, shown))
    note = (
        f"{FAMILIES[family]}, {record['config']['clients']} clients, "
        f"{record['config']['rounds']} rounds, seeds {record['seeds']}. Accuracy: mean over "
        "clients, ± standard deviation over seeds. Above local: points above the client's own "
        "model trained alone at the same times, mean over clients ± standard error over seeds; "
        "n < 10: of clients with fewer than ten training samples, where there are "
        "ten of them. Harmed: clients more than 2 points below their local model. Evaluated on "
        f"{_evaluated_on(record)} "
        f"{' and '.join(map(machine, [record['environment'], *record['other_environments']]))}."
    )
    tables[-1] = Table(tables[-1].title, tables[-1].header, tables[-1].rows, note)
    return layout.markdown(tables)


def _evaluated_on(record: dict[str, Any]) -> str:
    config = record["config"]
    if not config.get("fresh_test", 0):
        return "the clients' own test samples"
    mix = {"held": "of all it holds", "test": "of its own test samples"}[config["fresh_mix"]]
    return f"{config['fresh_test']:,} fresh samples for each client, with the label mix {mix}"


def _cells(row: dict[str, Any], setting: dict[str, Any], seeds: int) -> list[str]:
    method, gains = row["method"], row["clients"]
    name = NAMES[method] + (f", λ={setting['weight']:g}" if "weight" in setting else "")
    if len(row["seeds"]) < seeds:  # the others diverged, or were not run
        name += f" (seeds {row['seeds']})"
    cells = [name, spread(row["accuracy"])]
    if method == "local":
        return [*cells, "–", "–", "–", "–"]
    return [
        *cells,
        _gain(gains),
        _small_gain(gains),
        f"{_harmed(gains):.1f}",
        quantity(row["bytes_per_round"], "B"),
    ]


def _mean(gains: Gains) -> float:
    return statistics.mean(gain[0] for gain in gains)


def _gain(gains: BySeed) -> str:
    nbsp = "\N{NO-BREAK SPACE}"
    return f"{_mean(_all(gains)):+.1f}{nbsp}±{nbsp}{_error(gains):.1f}"


def _error(gains: BySeed) -> float:
    """Over seeds: clients of one seed have one server, and are not independent."""
    return statistics.stdev(map(_mean, gains)) / len(gains) ** 0.5


def _all(gains: BySeed) -> Gains:
    return [client for of_seed in gains for client in of_seed]


def _small(gains: BySeed) -> Gains:
    small = [gain for gain in _all(gains) if gain[1] < SMALL]
    return small if len(small) >= FEW else []


def _small_gain(gains: BySeed) -> str:
    return f"{_mean(_small(gains)):+.1f}" if _small(gains) else "–"


def _harmed(gains: BySeed) -> float:
    return 100 * statistics.mean(gain[0] < -HARM for gain in _all(gains))


def promise() -> str:
    """Does PerFed-Evidence lose to local training anywhere?"""
    rows, small = [], []
    for family in FAMILIES:
        found = _by_setting(f"successor_{family}")
        others = {judge: _by_setting(f"successor_{family}_{judge}") for judge in ("alike", "own")}
        if family == "digits":  # where there are no others to judge by
            others["own"] = found
        for partition in dict.fromkeys(partition for partition, _ in found):
            gains = found[partition, "evidence"]["clients"]
            if _small(gains):
                small.append(_mean(_small(gains)))
            rows.append(
                [
                    f"{SHORT[family]}, {partition}",
                    _gain(gains),
                    "yes" if _mean(_all(gains)) >= -_error(gains) else "**no**",
                    _small_gain(gains),
                    f"{_harmed(gains):.1f}",
                    "yes" if _harmed(gains) <= 5 else "**no**",
                    f"{_harmed(found[partition, 'cautious']['clients']):.1f}",
                    _gain_and_harm(others["alike"].get((partition, "evidence"))),
                    _gain_and_harm(others["own"].get((partition, "evidence"))),
                    quantity(found[partition, "evidence"]["bytes_per_round"], "B"),
                ]
            )
    header = (
        "",
        "above local",
        "not below it",
        f"n < {SMALL}",
        "harmed %",
        "at most 5 %",
        f"{CAUTIOUS}, harmed %",
        "evaluated alike: above local, harmed %",
        "by own tests: above local, harmed %",
        "bytes a round",
    )
    note = (
        "Above local: mean over clients ± standard error over seeds. n < 10: of clients with fewer "
        f"than ten training samples, where there are ten of them; the mean of these {len(small)} "
        f"settings is {statistics.mean(small):+.1f} points. Harmed: more than {HARM:g} points "
        "below the own local model. CIFAR-10: evaluated on 2,000 samples that no client holds, "
        "with the label mix of all that the client has. Evaluated alike: with the mix of its own "
        "test samples. By own tests: by these samples themselves, which is all there is with the "
        "digits."
    )
    return layout.markdown([Table("", header, rows, note)])


def _gain_and_harm(row: dict[str, Any] | None) -> str:
    return f"{_gain(row['clients'])}, {_harmed(row['clients']):.1f}" if row else "–"


def _by_setting(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a result; none, where it is not there."""
    if not (ROOT / "benchmarks" / "results" / f"{name}.json").is_file():
        return {}
    return {(row["partition"], row["method"]): row for row in result(name)["rows"]}


def weights() -> str:
    """What was tried for λ, and what it was worth on validation data."""
    records = {family: result(f"successor_tune_{family}") for family in ("digits", "cifar", "vgg")}
    trials = {
        f"{FAMILIES[family]}, {partition}: {TUNED[method]}": scores
        for family, record in records.items()
        for partition, methods in record["validation_accuracy"].items()
        for method, scores in methods.items()
    }
    tried = sorted({weight for scores in trials.values() for weight in scores}, key=float)

    def cell(scores: dict[str, float], weight: str) -> str:
        if weight not in scores:
            return ""
        text = f"{100 * scores[weight]:.1f}"
        return f"**{text}**" if scores[weight] == max(scores.values()) else text

    rows = [[name, *(cell(scores, w) for w in tried)] for name, scores in trials.items()]
    header = ("", *(f"λ={weight}" for weight in tried))
    seeds = records["digits"]["seeds"]
    note = f"Validation accuracy in %, mean over clients and seeds {seeds}; the best in bold."
    return layout.markdown([Table("", header, rows, note)])


def step_sizes() -> str:
    """Methods at several step sizes, with the small CNN."""
    record = result("successor_steps_cifar")
    tried: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
    for row in record["rows"]:
        by_step = tried.setdefault((row["partition"], row["method"]), {})
        by_step[row["step_size"]] = row

    def cell(row: dict[str, Any], best: float) -> str:
        accuracy = row["validation_accuracy"]
        text = f"{100 * accuracy:.1f}"
        text = f"**{text}**" if accuracy == best else text
        return text if row["weight"] is None else f"{text} (λ={row['weight']:g})"

    lines = []
    for (partition, method), by_step in tried.items():
        best = max(row["validation_accuracy"] for row in by_step.values())
        name = f"{partition}: {TUNED.get(method, method)}"
        lines.append([name, *(cell(row, best) for row in by_step.values())])
    steps = next(iter(tried.values()))
    note = (
        "CIFAR-10, CNN: validation accuracy in %, mean over clients and seeds "
        f"{record['seeds']}, with the best λ of those tried there; the best in bold "
        f"{machine(record['environment'])}."
    )
    return layout.markdown([Table("", ("", *(f"η={step:g}" for step in steps)), lines, note)])


def families() -> str:
    """The same in a few lines: the means over a family's settings, of three methods."""
    rows = []
    for family, title in FAMILIES.items():
        record = result(f"successor_{family}")
        cells = [title, str(len({row["partition"] for row in record["rows"]}))]
        for method in ("c=3", "evidence", "ditto"):
            of_settings = [r["clients"] for r in record["rows"] if r["method"] == method]
            if len(of_settings) < len(record["partitions"]):
                cells += ["–", "–", "–"]
                continue
            cells.append(f"{statistics.mean(_mean(_all(gains)) for gains in of_settings):+.1f}")
            cells.append(f"{statistics.mean(map(_harmed, of_settings)):.0f}")
            cells.append(_bytes(family, method))
        rows.append(cells)
    header = (
        "",
        "settings",
        "PerFed-CKT c=3, above local",
        "harmed %",
        "bytes a round",
        "PerFed-Evidence, above local",
        "harmed %",
        "bytes a round",
        "Ditto, above local",
        "harmed %",
        "bytes a round",
    )
    note = (
        "Above local: points of test accuracy above the client's own local model, mean over "
        f"settings, seeds {result('successor_digits')['seeds']}. Harmed: clients more than "
        f"{HARM:g} points below their local model. Local training run again with other "
        f"mini-batches harms {_chance('digits')} % with digits, {_chance('cifar')} % with the CNN "
        f"and {_chance('vgg')} % with VGG11, by chance. PerFed-Evidence contains the local model "
        "it is compared with. CIFAR-10 is tested on 2,000 fresh samples "
        "for each client, the digits on the clients' own test samples. PerFed-CKT and Ditto have "
        "a λ found for each setting. Mixed networks use the λ of VGG11, which does not suit "
        "PerFed-CKT."
    )
    return layout.markdown([Table("", header, rows, note)])


def _chance(family: str) -> str:
    """Clients "harmed" by other mini-batches, in percent, mean over settings."""
    rows = [row for row in result(f"successor_{family}")["rows"] if row["method"] == "local again"]
    return f"{statistics.mean(_harmed(row['clients']) for row in rows):.0f}"


def _bytes(family: str, method: str) -> str:
    """What a method sends in a round; with mixed networks it may depend on who has which."""
    rows = [row for row in result(f"successor_{family}")["rows"] if row["method"] == method]
    sizes = [row["bytes_per_round"] for row in rows]
    shown = [quantity(size, "B") for size in (min(sizes), max(sizes))]
    return " to ".join(dict.fromkeys(shown))


def first_hand() -> str:
    """What a teacher is worth that is made of students, and one made of witnesses."""
    records = [result(f"first_hand_{family}") for family in ("digits", "cifar")]
    settings, cells = [], {}
    for title, record in zip(("digits", "CIFAR-10"), records, strict=True):
        settings += [f"{title}, {s}" for s in dict.fromkeys(r["setting"] for r in record["rows"])]
        for row in record["rows"]:
            accuracy = f"{100 * statistics.mean(row['accuracy']):.1f}"
            cells.setdefault(row["method"], []).append(accuracy)
    note = (
        "Test accuracy of the taught model, mean over clients and tuning seeds "
        f"{records[0]['seeds']}; CNN with BatchNorm, {records[0]['config']['rounds']} rounds "
        f"{machine(records[0]['environment'])}."
    )
    rows = [[method, *accuracies] for method, accuracies in cells.items()]
    return layout.markdown([Table("", ("who speaks", *settings), rows, note)])


def who_gains(path: Path = ROOT / "docs" / "who-gains.png") -> Path:
    """Before and after: every client's gain over local training, by data and by labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 13), layout="constrained")  # a page is not wider
    shown = ("digits", "cifar", "vgg")
    for part, family in zip(figure.subfigures(len(shown), 1, hspace=0.03), shown, strict=True):
        part.suptitle(FAMILIES[family], fontweight="bold")
        _before_and_after(part, result(f"successor_{family}"))
    figure.savefig(path, dpi=120)
    return path


def _before_and_after(figure: Any, record: dict[str, Any]) -> None:
    methods = {"c=3": "PerFed-CKT, c=3", "evidence": "PerFed-Evidence"}
    axes = figure.subplots(2, 2, sharex="col", sharey=True)
    for line, (method, title) in zip(axes, methods.items(), strict=True):
        seeds = [gains for r in record["rows"] if r["method"] == method for gains in r["clients"]]
        clients = _all(seeds)
        for axis, position in zip(line, (1, 2), strict=True):
            _scatter(axis, clients, position)
        line[0].set_title(
            with_minus(f"{title}: {_mean(clients):+.1f} points, {_harmed(seeds):.0f} % harmed"),
            loc="left",
        )
        line[0].set_ylabel("points above local")
    axes[0][0].set_xscale("log")
    most = max(client[1] for row in record["rows"] for client in _all(row.get("clients", ())))
    ticks = [tick for tick in (2, 5, 10, 20, 50, 200, 500) if tick <= most]
    axes[0][0].set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes[0][0].minorticks_off()
    axes[0][1].set_xticks(range(2, 11, 2))
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
    for low, high in zip(edges[:-1], [*edges[1:-1], np.inf], strict=True):
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
    "successor-weights": weights,
    "successor-steps": step_sizes,
    "successor-cifar-alike": lambda: comparison("cifar", "alike"),
    **{f"successor-{name}": lambda name=name: comparison(name) for name in FAMILIES},
}

if __name__ == "__main__":
    print(who_gains())
