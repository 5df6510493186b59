"""Tables 1 and 2: accuracy and communication of every method, beside the paper's.

A table is a study: a run for each method and seed, in the order of interest, resumable, in shards.
What is shown is made from the study's records alone.

Two settings. ``paper``: the learning rate, steps and batches that the paper names (for PerFed-CKT;
it gives none for the others), for all methods. ``tuned``: what ``perfed tune`` found on the
validation data of a seed used for nothing else.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from perfed.config import Comparison, Experiment, apply_override, parse, read_mapping
from perfed.core.algorithm import algorithms
from perfed.core.errors import ConfigError
from perfed.core.layout import Table
from perfed.core.metrics import SIZE_GROUPS, size_group_name
from perfed.paper.costs import three_digits
from perfed.paper.published import DISTILLATION_STEPS, FRACTIONS, TABLE_1, TABLE_2, WEIGHT, Row
from perfed.runs.study import Record, Study, client_gains
from perfed.runs.tables import HARM, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COST_ROUNDS = 200  # the cost column's, see costs.py
Number = Literal[1, 2]

# In which order methods are run, should the time not suffice for all.
INTEREST = (
    "majority",
    "local",
    "perfed-ckt",
    "fedavg",
    "fedavg-ft",
    "perfed-kin",
    "ditto",
    "fedfomo",
    "hypcluster",
    "feddf",
    "per-fedavg",
    "fedprox",
    "scaffold",
)


def tuned_settings() -> dict[str, dict[str, Any]]:
    """By algorithm. benchmarks/results/tune says how they came about, a test that they did so."""
    file = resources.files("perfed") / "paper" / "tuned.json"
    settings: dict[str, dict[str, Any]] = json.loads(file.read_text("utf-8"))
    return settings


@dataclass(frozen=True)
class TableRun:
    """Which part of a table is run, and how."""

    table: Number = 1
    settings: Literal["paper", "tuned"] = "paper"
    fractions: tuple[float, ...] = FRACTIONS
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int = 500
    selection: Literal["uniform", "by-size"] = "uniform"
    repair: bool = True
    """Whether clients without enough samples get some, or are left out."""
    second_validation: bool = False
    """Whether half of the validation samples are kept from methods that use them themselves."""
    quick: bool = False

    @property
    def rows(self) -> Sequence[Row]:
        return TABLE_1 if self.table == 1 else TABLE_2

    @property
    def title(self) -> str:
        """What its files are called."""
        ending = "-second-validation" if self.second_validation else ""
        return f"table{self.table}-{self._how}{ending}"

    @property
    def _how(self) -> str:
        """What all its runs have in common."""
        parts = [self.settings, *([self.selection] if self.selection != "uniform" else [])]
        return "-".join([*parts, *([] if self.repair else ["without-repair"])])

    def published_fraction(self, fraction: float) -> float:
        """The paper's column beside which a fraction is shown."""
        return FRACTIONS[0] if self.quick else fraction

    @property
    def methods(self) -> dict[str, Mapping[str, Any]]:
        """By name, the most interesting first."""
        ordered = sorted(self.rows, key=lambda row: INTEREST.index(row.algorithm["name"]))
        return {method_name(row.algorithm): row.algorithm for row in ordered}

    def study(self, folder: str | Path, methods: Sequence[str] = ()) -> Study:
        """All runs, or those of some methods in the order given, seed by seed of each."""
        for name in methods:
            if name not in self.methods:
                raise ConfigError(f"'{name}' is none of {', '.join(self.methods)}", "--methods")
        return Study(
            folder,
            {
                self.name(spec, fraction, seed): self.experiment(spec, fraction, seed)
                for fraction in self.fractions
                for spec in [self.methods[name] for name in methods or self.methods]
                for seed in self.seeds
            },
        )

    def name(self, spec: Mapping[str, Any], fraction: float, seed: int) -> str:
        method = method_name(spec) + ("-second-validation" if self._holds_out_of(spec) else "")
        return f"{self._how}-C{fraction:.3g}-{method}-seed{seed}"

    def _holds_out_of(self, spec: Mapping[str, Any]) -> bool:
        """The runs of all other methods are the same with and without."""
        return self.second_validation and algorithms[spec["name"]].uses_validation

    def experiment(self, spec: Mapping[str, Any], fraction: float, seed: int) -> Experiment:
        values = read_mapping("digits-dirichlet" if self.quick else "paper-cifar10")
        for key in ("algorithms", "seeds", "about"):
            values.pop(key, None)
        clients = values["clients"]
        values |= {
            "name": f"table{self.table}",
            "seed": seed,
            "rounds": self.rounds,
            "evaluate_every": max(1, min(10, self.rounds // 10)),
            "clients_per_round": round(fraction * clients),
            "selection": self.selection,
            "averaging": "size-once",
            "algorithm": dict(spec),
        }
        if self.table == 2:
            values["models"] = {"architectures": HETEROGENEOUS["quick" if self.quick else "full"]}
        elif self.quick:
            values["models"] = ["mlp"]
        if not self.repair:
            values["partition"] = {**values["partition"], "repair": False}
        if self._holds_out_of(spec):
            values["split"] = {**values.get("split", {}), "second_validation": True}
        if spec["name"] == "perfed-ckt":
            values["algorithm"]["weight"] = 1.0 if self.quick else WEIGHT
        if spec["name"] == "feddf" and not self.quick:
            values["algorithm"]["steps"] = DISTILLATION_STEPS
        if spec["name"] == "local" and not self.repair:
            # How many clients are left is not known here: it trains those that the others train.
            values["algorithm"]["participation"] = "selected"
        elif spec["name"] == "local":
            # Every client trains, whatever C is, as in the paper: as often as it would be selected.
            values["rounds"] = max(1, round(self.rounds * fraction))
            values["evaluate_every"] = max(1, round(values["evaluate_every"] * fraction))
        if self.settings == "tuned":
            for key, value in tuned_settings().get(spec["name"], {}).items():
                apply_override(values, f"{key}={value}")
        experiment = parse(values)
        assert not isinstance(experiment, Comparison)
        return experiment


def method_name(spec: Mapping[str, Any]) -> str:
    """With those options in which the rows of a table differ: perfed-ckt-3."""
    telling = ("name", "clusters", "fallback")
    return "-".join(str(spec[key]) for key in telling if key in spec)


# From the smallest to the largest.
HETEROGENEOUS: Mapping[str, list[Any]] = {
    "full": ["cnn", "vgg11-bn", "vgg13-bn"],
    "quick": [
        {"name": "mlp", "hidden": [32]},
        {"name": "mlp", "hidden": [128]},
        {"name": "cnn", "batchnorm": True},
    ],
}


def table_run(table: Number, quick: bool) -> TableRun:
    """The whole table; quick, on handwritten digits: some minutes on a CPU."""
    if quick:
        return TableRun(table=table, fractions=(1 / 3,), rounds=20, quick=True)
    return TableRun(table=table)


@dataclass(frozen=True)
class Finding:
    """One row's runs of one fraction."""

    row: Row
    fraction: float
    records: tuple[Record, ...]

    def values(self, when: str, quantity: str = "test_accuracy") -> list[float]:
        return [r["summary"]["models"][self.row.kind][when][quantity] for r in self.records]

    def chosen(self) -> list[float] | None:
        """Nothing where the method has seen the samples that its round is chosen by."""
        if algorithms[self.row.algorithm["name"]].uses_validation and not all(
            record["config"].get("split", {}).get("second_validation") for record in self.records
        ):
            return None
        return self.values("chosen")

    def of_clients(self, repaired: bool) -> list[float] | None:
        """Of each seed, the mean accuracy in the last round of natural or of repaired clients;
        nothing where a record does not tell them apart, or a seed has none."""
        means = []
        for record in self.records:
            accuracy = record["clients"]["test_accuracy"][self.row.kind]
            kinds = record["clients"].get("repaired", ())
            if repaired not in kinds:
                return None
            pairs = zip(accuracy, kinds, strict=True)
            means.append(statistics.mean(value for value, kind in pairs if kind == repaired))
        return means

    def of_late(self) -> float:
        """What the last fifth of the rounds added to the accuracy."""
        changes = []
        for record in self.records:
            curve = record["curve"][self.row.kind]
            last_round, last = curve[-1][:2]
            before = [point[1] for point in curve if point[0] + 1 <= 0.8 * (last_round + 1)]
            changes.append(last - before[-1] if before else 0.0)
        return statistics.mean(changes)

    def cost(self) -> float:
        """As the paper's cost column: of as many rounds as that has."""
        return self.cost_of(COST_ROUNDS)

    def cost_of(self, rounds: int) -> float:
        """Parameters that cross in so many rounds like the mean of these, in the paper's counting;
        what crosses once, before the first, it does not count."""
        names = ("up_parameters", "down_parameters")
        per_round: list[float] = []
        for record in self.records:
            total, before = record["summary"]["traffic"], record["opening"]
            crossed = sum(total[name] - before.get(name, 0) for name in names)
            per_round.append(crossed / record["summary"]["rounds"])
        return rounds * statistics.mean(per_round)


def findings(chosen: TableRun, records: Mapping[str, Record]) -> list[Finding]:
    """The rows of which there are runs, by fraction."""
    found = []
    for fraction in chosen.fractions:
        for row in chosen.rows:
            names = [chosen.name(row.algorithm, fraction, seed) for seed in chosen.seeds]
            runs = tuple(records[n] for n in names if n in records and "failed" not in records[n])
            if runs:
                found.append(Finding(row, fraction, runs))
    return found


def tables(chosen: TableRun, records: Mapping[str, Record]) -> list[Table]:
    """For each fraction, the table, and who gains against local training."""
    shown = []
    for fraction in chosen.fractions:
        here = [f for f in findings(chosen, records) if f.fraction == fraction]
        if here:
            shown.append(_accuracy_table(chosen, fraction, here))
            shown.append(_gains_table(fraction, here))
    missing = [row.label for row in chosen.rows if not _has_run(chosen, row, records)]
    failed = [f"{name}: {r['failed']}" for name, r in records.items() if "failed" in r]
    if missing or failed:
        rows = [[label, "not run"] for label in missing]
        rows += [[*text.split(": ", 1)] for text in failed]
        shown.append(Table("Without a result", ("", "why"), rows, names=2))
    return shown


def _has_run(chosen: TableRun, row: Row, records: Mapping[str, Record]) -> bool:
    return any(
        chosen.name(row.algorithm, fraction, seed) in records
        for fraction in chosen.fractions
        for seed in chosen.seeds
    )


_SELECTED = {
    "uniform": "selected uniformly and averaged by size",
    "by-size": "selected by size and averaged plainly",
}
ACCURACY_NOTE = (
    "Test accuracy in %, mean over all clients, ± standard deviation over seeds. "
    "natural, repaired: last, of the clients that the partition drew at least the minimum of "
    "samples for, and of those that were brought up to it with samples of the largest clients. "
    "of late: what the last fifth of the rounds added. "
    "chosen: in the round that was best on validation data; – where the method has used these. "
    "best*: in the best test round, which is what the paper reports; it is chosen by test data, so "
    "it flatters. difference: best* − paper. "
    f"cost: 10⁷ parameters for {COST_ROUNDS} rounds like the mean of these, as the paper counts."
)


def _accuracy_table(chosen: TableRun, fraction: float, here: Sequence[Finding]) -> Table:
    header = (
        *("", "seeds", "last", "natural", "repaired", "of late", "chosen", "best*"),
        *("paper", "difference", "cost", "paper's cost"),
    )
    rows = []
    for finding in here:
        paper = finding.row.published(chosen.published_fraction(fraction))
        best = finding.values("best_test")
        cost, published_cost = (
            finding.cost() / 1e7,
            finding.row.published_cost(chosen.published_fraction(fraction)),
        )
        rows.append(
            [
                finding.row.label,
                str(len(finding.records)),
                spread(finding.values("last")),
                *(_spread_or_dash(finding.of_clients(repaired)) for repaired in (False, True)),
                f"{100 * finding.of_late():+.1f}",
                _spread_or_dash(finding.chosen()),
                spread(best),
                "–" if paper is None else f"{paper[0]:.1f} ± {paper[1]:.1f}",
                "–" if paper is None else f"{100 * statistics.mean(best) - paper[0]:+.1f}",
                f"{three_digits(cost):g}" if cost else "–",
                "–" if published_cost is None else f"{published_cost:g}",
            ]
        )
    clients = len(here[-1].records[0]["clients"]["train_size"])
    what = "handwritten digits in the place of CIFAR-10, " if chosen.quick else ""
    title = (
        f"Table {chosen.table}, C={fraction:.2g}, {chosen.settings} settings: {what}"
        f"{clients} clients {_SELECTED[chosen.selection]}, "
        f"{chosen.rounds} rounds"
    )
    return Table(title, header, rows, ACCURACY_NOTE)


def _spread_or_dash(values: list[float] | None) -> str:
    return "–" if values is None else spread(values)


GAINS_NOTE = (
    "Points of test accuracy above local training, client by client in the same seed. Groups by "
    "how a client came by its samples (natural, repaired), by training samples (n) and by how many "
    "labels are among them. harmed: share of clients more "
    f"than {HARM:g} points below their own local model."
)


def _gains_table(fraction: float, here: Sequence[Finding]) -> Table:
    local = next((f for f in here if f.row.algorithm["name"] == "local"), None)
    groups = _groups(record for finding in here for record in finding.records)
    header = ("", "all", *groups, "harmed %")
    rows = []
    for finding in here:
        if local is None or finding is local:
            continue
        gains = _client_gains(finding, local)
        if not gains:  # no seed in common: a shard
            continue
        cells = [f"{statistics.mean(client.gain for client in gains):+.1f}"]
        for inside in groups.values():
            members = [client.gain for client in gains if inside(client)]
            cells.append(f"{statistics.mean(members):+.1f}" if members else "–")
        harmed = statistics.mean(client.gain < -HARM for client in gains)
        rows.append([finding.row.label, *cells, f"{100 * harmed:.0f}"])
    return Table(f"Against local training, C={fraction:.2g}", header, rows, GAINS_NOTE)


class _Gain(NamedTuple):
    """Of one client."""

    gain: float
    """In points above its own local model."""
    size: int
    labels: int
    repaired: bool | None
    """None where the record does not say."""


def _groups(records: Iterable[Record]) -> dict[str, Callable[[_Gain], bool]]:
    sizes = [size for record in records for size in record["clients"]["train_size"]]
    by_size: dict[str, Any] = {
        f"n {size_group_name(low, high)}": lambda client, low=low, high=high: (
            low <= client.size <= (high or client.size)
        )
        for low, high in SIZE_GROUPS
        if any(low <= size <= (high or size) for size in sizes)
    }
    return {
        "natural": lambda client: client.repaired is False,
        "repaired": lambda client: client.repaired is True,
        **by_size,
        "1 label": lambda client: client.labels == 1,
        "2-3 labels": lambda client: 2 <= client.labels <= 3,
        "4+ labels": lambda client: client.labels >= 4,
    }


def _client_gains(finding: Finding, local: Finding) -> list[_Gain]:
    """Those of all seeds that both have."""
    theirs = {record["config"]["seed"]: record for record in local.records}
    return [
        _Gain(*gain, repaired)
        for record in finding.records
        if (other := theirs.get(record["config"]["seed"])) is not None
        for gain, repaired in zip(
            client_gains(record, other, finding.row.kind),
            record["clients"].get("repaired", [None] * len(record["clients"]["train_size"])),
            strict=True,
        )
    ]


def gain_of_small_clients(finding: Finding, local: Finding) -> float:
    """Mean points above local training, of clients in the smallest group."""
    most = SIZE_GROUPS[0][1] or 0
    gains = _client_gains(finding, local)
    return statistics.mean(client.gain for client in gains if client.size <= most)


def gain_of_clients(finding: Finding, local: Finding, repaired: bool) -> float:
    """Mean points above local training, of natural or of repaired clients."""
    gains = _client_gains(finding, local)
    return statistics.mean(client.gain for client in gains if client.repaired is repaired)


def plot(chosen: TableRun, records: Mapping[str, Record]) -> Figure | None:
    """Ours and the paper's accuracy, a line for each method; nothing where all have failed."""
    from matplotlib.figure import Figure  # not pyplot: a notebook's own backend stays as it is

    found = findings(chosen, records)
    if not found:
        return None
    fractions = [c for c in chosen.fractions if any(f.fraction == c for f in found)]
    labels = [row.label for row in chosen.rows if any(f.row is row for f in found)]
    figure = Figure(figsize=(2 + 4.2 * len(fractions), 1.4 + 0.3 * len(labels)))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(1, len(fractions), sharey=True, squeeze=False)[0]
    for axis, fraction in zip(axes, fractions, strict=True):
        for finding in (f for f in found if f.fraction == fraction):
            height = -labels.index(finding.row.label)
            for values, marker, colour, name in (
                (finding.values("last"), "o", "#0072B2", "ours, last round"),
                (finding.values("best_test"), "|", "#56B4E9", "ours, best test round"),
            ):
                mean = 100 * statistics.mean(values)
                deviation = 100 * statistics.stdev(values) if len(values) > 1 else 0.0
                error = {"xerr": deviation} if marker == "o" else {"markersize": 9}
                axis.errorbar(mean, height, fmt=marker, color=colour, label=name, **error)
            if (paper := finding.row.published(chosen.published_fraction(fraction))) is not None:
                axis.errorbar(
                    paper[0], height, fmt="D", color="#D55E00", mfc="white", label="paper"
                )
        axis.set(xlim=(0, 100), xlabel="test accuracy, mean over clients (%)")
        axis.set_title(f"C = {fraction:.2g}", fontsize=10)
        axis.set_yticks([-n for n in range(len(labels))], labels)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles = dict(
        zip(*reversed(axes[0].get_legend_handles_labels()), strict=True)  # one for each name
    )
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False
    )
    return figure


def with_options(
    chosen: TableRun,
    settings: str | None = None,
    rounds: int | None = None,
    selection: str | None = None,
    fractions: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    second_validation: bool = False,
    repair: bool = True,
) -> TableRun:
    """``chosen`` with what a user asked for instead."""
    if settings is not None and settings not in ("paper", "tuned"):
        raise ConfigError(f"'{settings}' is none of paper, tuned", "--settings")
    if selection is not None and selection not in _SELECTED:
        raise ConfigError(f"'{selection}' is none of {', '.join(_SELECTED)}", "--selection")
    changes: dict[str, Any] = {
        "settings": settings,
        "selection": selection,
        "rounds": rounds,
        "fractions": None if fractions is None else tuple(fractions),
        "seeds": None if seeds is None else tuple(seeds),
        "second_validation": second_validation,
        "repair": repair,
    }
    return replace(chosen, **{key: value for key, value in changes.items() if value is not None})
