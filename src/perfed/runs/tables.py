"""Tables, made from what run directories hold and from nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perfed.core.algorithm import Algorithm
from perfed.core.layout import Table
from perfed.runs.result import Result, headline_kind
from perfed.runs.significance import ALPHA, FEW, against_first, described, enough, pairs_of
from perfed.runs.study import Gains, Record, client_gains, honest_accuracies, record_of

HEADER = (
    "algorithm",
    "model",
    "accuracy",
    "chosen",
    "best test*",
    "worst 10 %",
    "parameters",
    "bytes",
)
FOOTNOTE = """\
Test accuracy in %, mean over all clients, after the last round. chosen: in the
round with the best validation accuracy. worst 10 %: mean over the tenth of the
clients with the lowest accuracy. *In the round with the best test accuracy, as the
paper reports it: test data chose this round, so the number is too high. Parameters
are counted as in the paper (a broadcast once), bytes as sent."""
NOT_CHOSEN = """
A dash for chosen: the method uses validation samples itself, so they cannot choose
its round. With --set split.second_validation=true, half of them are kept for that."""


PRIVATE = """
ε: the most that a client has spent on its messages, by which single samples are
hidden in all that it sends; what stays at home is not noised ('perfed explain
privacy')."""


@dataclass(frozen=True)
class Row:
    """One algorithm and model kind, over its seeds."""

    algorithm: str
    kind: str
    summaries: tuple[dict[str, Any], ...]

    def values(self, get: Callable[[dict[str, Any]], float]) -> list[float]:
        return [get(summary["models"][self.kind]) for summary in self.summaries]

    @property
    def validation_is_used(self) -> bool:
        return any(summary.get("validation_is_used") for summary in self.summaries)

    def chosen(self) -> str:
        """A dash where the algorithm has seen the samples that the round is chosen by."""
        if self.validation_is_used:
            return "–"
        return spread(self.values(lambda models: models["chosen"]["test_accuracy"]))

    def epsilon(self) -> str:
        """The most that a client has spent; a dash where messages hide nothing."""
        spent = [one["privacy"]["epsilon"] for one in self.summaries if "privacy" in one]
        return f"{max(spent):.2f}" if spent else "–"

    def traffic(self, *names: str) -> float:
        totals = [float(sum(s["traffic"][name] for name in names)) for s in self.summaries]
        return statistics.mean(totals)


def rows(summaries: Sequence[dict[str, Any]]) -> list[Row]:
    """Grouped by algorithm (in the order given), then by model kind."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for summary in summaries:
        for kind in summary["models"]:
            grouped.setdefault((summary["algorithm"], kind), []).append(summary)
    return [Row(name, kind, tuple(group)) for (name, kind), group in grouped.items()]


def footnote(shown: Sequence[Row]) -> str:
    return FOOTNOTE + NOT_CHOSEN * any(row.validation_is_used for row in shown)


def cells(row: Row) -> list[str]:
    return [
        row.algorithm,
        row.kind,
        spread(row.values(lambda m: m["last"]["test_accuracy"])),
        row.chosen(),
        spread(row.values(lambda m: m["best_test"]["test_accuracy"])),
        spread(row.values(lambda m: m["last"]["test_accuracy_worst_decile"])),
        quantity(row.traffic("up_parameters", "down_parameters")),
        quantity(row.traffic("up_bytes", "down_bytes"), "B"),
    ]


def spread(values: Sequence[float]) -> str:
    """Percent: the mean, and with several values ± their sample standard deviation."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def quantity(value: float, unit: str = "") -> str:
    """``1.23 M``: three digits and a prefix; a dash for nothing."""
    if value == 0:
        return "–"
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def summary(summaries: Sequence[dict[str, Any]], standing: Standing | None = None) -> Table:
    shown = rows(summaries)
    note = footnote(shown) + (f"\n{standing.note()}" if standing else "")
    bold = standing.bold(shown) if standing else set()
    header: tuple[str, ...] = HEADER
    lines = [cells(row) for row in shown]
    if any("privacy" in one for one in summaries):
        header, note = (*HEADER, "ε"), note + PRIVATE
        lines = [[*line, row.epsilon()] for line, row in zip(lines, shown, strict=True)]
    return Table("", header, lines, note, names=2, bold=bold)


class Standing(NamedTuple):
    """Which method is the best, and which are not told apart from it."""

    best: str
    alike: tuple[str, ...]
    tested: bool
    """Whether there are pairs enough for any test."""
    seeds: int
    over_seeds: bool

    def bold(self, shown: Sequence[Row]) -> set[tuple[int, int]]:
        """The cells of a table that stand out."""
        column = HEADER.index("accuracy")
        return {
            (place, column)
            for place, row in enumerate(shown)
            if row.algorithm in (self.best, *self.alike)
            and row.kind == headline_kind(row.summaries[0]["models"])
        }

    def note(self) -> str:
        note = f"Bold: the best, {self.best}"
        if not self.tested:
            note += ". There are too few pairs for a test."
        else:
            if self.alike:
                note += f", and what the test cannot tell from it (p > {ALPHA:.2g}): "
                note += f"{', '.join(self.alike)}."
            else:
                note += f". All others differ from it (p ≤ {ALPHA:.2g})."
            note += f" Test: {described(self.seeds, self.over_seeds)}."
            note += "" if self.over_seeds else f" {FEW}"
        if self.seeds == 1:
            note += " One seed: another one divides the data anew, and the order may change."
        return note


def standing(runs: Sequence[Result]) -> Standing | None:
    """Of runs that differ in nothing but algorithm and seed. Only methods with a result for every
    seed are ranked: others were run on other data. Nothing where there is none to compare."""
    seeds = sorted({run.experiment.seed for run in runs})
    by_method: dict[str, dict[int, Record]] = {}
    for run in runs:
        label = run.experiment.algorithm.label()
        by_method.setdefault(label, {})[run.experiment.seed] = record_of(run.path)
    clients = {
        label: [_last_accuracies(records[seed]) for seed in seeds]
        for label, records in by_method.items()
        if len(records) == len(seeds)
    }
    if len(clients) < 2:
        return None
    over_seeds = enough(len(seeds), len(clients))
    mean = {label: statistics.mean(map(statistics.mean, those)) for label, those in clients.items()}
    order = sorted(clients, key=lambda label: -mean[label])
    found = against_first({label: pairs_of(clients[label], over_seeds) for label in order})
    alike = tuple(label for label, p in found.items() if p > ALPHA)
    return Standing(order[0], alike, bool(found), len(seeds), over_seeds)


def _last_accuracies(record: Record) -> list[float]:
    """Of every honest client, of the model that it would use."""
    return honest_accuracies(record, headline_kind(record["summary"]["models"]))


HARM = 2.0  # points
SMALL = 10  # training samples
AGAINST_LOCAL = ("algorithm", "above local", f"n < {SMALL}", "gain %", "lose %")
AGAINST_LOCAL_NOTE = f"""\
By how many points of test accuracy a client is above its own local model after the
last round. above local: mean over all clients{{deviation}}.
n < {SMALL}: mean over clients with fewer than {SMALL} training samples. gain: share of
clients more than {HARM:g} points above their local model. lose: more than {HARM:g} below."""
EVERYBODY = """
Here local trains all clients in every round. local,participation=selected trains
only the selected clients, as the other methods do."""


def against_local(runs: Sequence[Result]) -> Table | None:
    """Who gains by working together, where local training was run with the same seeds."""
    reference, by_method = gains_over_local(runs)
    if reference is None or not by_method:
        return None
    lines = [[method, *_gain_cells([*seeds.values()])] for method, seeds in by_method.items()]
    several = any(len(seeds) > 1 for seeds in by_method.values())
    deviation = ", ± standard deviation over seeds" if several else ""
    note = AGAINST_LOCAL_NOTE.format(deviation=deviation)
    bold = {(place, 1) for place in _largest_gains([*by_method.values()])}
    note += " Bold: the highest." * bool(bold)
    note += EVERYBODY * reference.trains_everyone()
    return Table(f"Against {reference.label()}", AGAINST_LOCAL, lines, note, bold=bold)


def _largest_gains(methods: Sequence[dict[int, Gains]]) -> list[int]:
    """Which of the methods gains most, of those with the same seeds as all others."""
    if len(methods) < 2 or len({frozenset(seeds) for seeds in methods}) > 1:
        return []
    gains = [
        statistics.mean(GainOverLocal.of(clients).above_local for clients in seeds.values())
        for seeds in methods
    ]
    return [place for place, gain in enumerate(gains) if gain == max(gains)]


def against_local_record(runs: Sequence[Result]) -> dict[str, Any] | None:
    """The same for programs, by method and seed: points, and shares of the clients."""
    reference, by_method = gains_over_local(runs)
    if reference is None or not by_method:
        return None
    methods = {
        method: {str(seed): GainOverLocal.of(gains)._asdict() for seed, gains in seeds.items()}
        for method, seeds in by_method.items()
    }
    return {"local": reference.label(), "methods": methods}


def gains_over_local(
    runs: Sequence[Result],
) -> tuple[Algorithm | None, dict[str, dict[int, Gains]]]:
    """Local training, and by method and seed each client's gain over it; of two ways to train
    alone that which trains the same clients at the same times."""
    methods = [run.experiment.algorithm for run in runs]
    ways = [method for method in methods if method.reference]
    if not ways:
        return None, {}
    reference = min(ways, key=lambda way: way.trains_everyone())
    alone = {
        run.experiment.seed: record_of(run.path)
        for run in runs
        if run.experiment.algorithm == reference
    }
    by_method: dict[str, dict[int, Gains]] = {}
    for run in runs:
        seed, method = run.experiment.seed, run.experiment.algorithm
        if seed not in alone or method == reference:
            continue
        record = record_of(run.path)
        gains = client_gains(record, alone[seed], headline_kind(record["summary"]["models"]))
        by_method.setdefault(method.label(), {})[seed] = gains
    return reference, by_method


class GainOverLocal(NamedTuple):
    """Of some clients: mean points above their local models, and the shares that gain and lose."""

    above_local: float
    above_local_small: float | None
    gaining: float
    losing: float

    @classmethod
    def of(cls, gains: Gains) -> GainOverLocal:
        points = [gain for gain, *_ in gains]
        small = [gain for gain, size, _ in gains if size < SMALL]
        return cls(
            statistics.mean(points),
            statistics.mean(small) if small else None,
            statistics.mean(gain > HARM for gain in points),
            statistics.mean(gain < -HARM for gain in points),
        )


def _gain_cells(seeds: Sequence[Gains]) -> list[str]:
    means = [GainOverLocal.of(clients).above_local for clients in seeds]
    mean = f"{statistics.mean(means):+.1f}"
    everybody = GainOverLocal.of([client for clients in seeds for client in clients])
    small = everybody.above_local_small
    return [
        mean if len(means) == 1 else f"{mean} ± {statistics.stdev(means):.1f}",
        "–" if small is None else f"{small:+.1f}",
        f"{100 * everybody.gaining:.0f}",
        f"{100 * everybody.losing:.0f}",
    ]
