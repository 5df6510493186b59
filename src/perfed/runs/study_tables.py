"""What a study found: a table for each setting, one over all settings, and what has no result.

Made from what :class:`perfed.runs.design.Conduct` finds, so from records and nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from perfed.core.layout import Table
from perfed.core.method_numbers import method_numbers
from perfed.runs.design import Design, Found
from perfed.runs.result import headline_kind, hostile_words
from perfed.runs.significance import (
    ALPHA,
    DRAWS,
    FEW,
    against_first,
    bootstrap_interval,
    described,
    enough,
    pairs_of,
)
from perfed.runs.study import Record, client_gains, honest_accuracies
from perfed.runs.tables import HARM, quantity, spread
from perfed.runs.tune import shown_value


@dataclass(frozen=True)
class Row:
    """A method in a setting that has at least one finished run."""

    found: Found
    number: int
    """The method's place in the study: its colour, everywhere."""
    local: Mapping[int, Record]
    """Local training in this setting, by seed; empty where there is none."""
    is_local: bool

    @property
    def method(self) -> str:
        return self.found.cell.method.name

    @property
    def records(self) -> Mapping[int, Record]:
        return self.found.records

    @property
    def seeds(self) -> list[int]:
        return list(self.records)

    @property
    def complete(self) -> bool:
        """Whether it has a result for every seed. Only such methods are ranked: others were run on
        other data."""
        return self.found.complete

    @property
    def kind(self) -> str:
        """The personal model where a method has one, else the global one."""
        first = next(iter(self.records.values()))
        return headline_kind(first["summary"]["models"])

    def last(self, name: str) -> list[float]:
        """A number of each seed after the last round."""
        return [r["summary"]["models"][self.kind]["last"][name] for r in self.records.values()]

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.last("test_accuracy"))

    @cached_property
    def gains(self) -> dict[int, list[float]]:
        """By seed: points of every client above its own local model."""
        if self.is_local:
            return {}
        return {
            seed: [gain for gain, *_ in client_gains(record, self.local[seed], self.kind)]
            for seed, record in self.records.items()
            if seed in self.local
        }

    @property
    def gain(self) -> float | None:
        means = [statistics.mean(clients) for clients in self.gains.values()]
        return statistics.mean(means) if means else None

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        return bootstrap_interval([*self.gains.values()]) if self.gains else None

    @property
    def harmed_percent(self) -> float | None:
        """Of the clients, those that are worse off than alone."""
        everybody = [gain for clients in self.gains.values() for gain in clients]
        return 100 * statistics.mean(gain < -HARM for gain in everybody) if everybody else None

    @property
    def bytes_per_round(self) -> float:
        summaries = [record["summary"] for record in self.records.values()]
        sent = [s["traffic"]["up_bytes"] + s["traffic"]["down_bytes"] for s in summaries]
        rounds = [s["rounds"] for s in summaries]
        return float(np.mean(np.divide(sent, rounds)))

    @property
    def seconds_per_round(self) -> float:
        paces = [r["seconds"] / r["summary"]["rounds"] for r in self.records.values()]
        return float(np.mean(paces))

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Evaluated rounds, from 1, and seeds × rounds mean test accuracies in %."""
        curves = np.array([record["curve"][self.kind] for record in self.records.values()])
        return curves[0, :, 0] + 1, 100 * curves[:, :, 1]

    def clients(self) -> list[list[float]]:
        """Of each seed, in the study's order: the test accuracy of every honest client."""
        return [honest_accuracies(record, self.kind) for record in self.records.values()]

    def numbers(self) -> dict[str, Any]:
        """For programs: percent, points, bytes and seconds."""
        accuracies = [100 * value for value in self.last("test_accuracy")]
        low, high = self.interval or (None, None)
        deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else None
        return {
            "method": self.method,
            "model": self.kind,
            "seeds": len(accuracies),
            "accuracy": _rounded(statistics.mean(accuracies)),
            "accuracy_deviation": _rounded(deviation),
            "above_local": _rounded(self.gain),
            "above_local_low": _rounded(low),
            "above_local_high": _rounded(high),
            "harmed": _rounded(self.harmed_percent),
            "worst_tenth": _rounded(100 * statistics.mean(self.last("test_accuracy_worst_decile"))),
            "calibration_error": _rounded(
                100 * statistics.mean(self.last("test_calibration_error"))
            ),
            "bytes_per_round": round(self.bytes_per_round),
            "seconds_per_round": _rounded(self.seconds_per_round),
        }


@dataclass(frozen=True)
class Section:
    """One setting."""

    name: str
    rows: tuple[Row, ...]
    """The best first, of those that are complete."""
    over_seeds: bool
    """Whether methods are told apart by seeds, or by clients."""

    @property
    def ranked(self) -> list[Row]:
        return [row for row in self.rows if row.complete]

    @cached_property
    def against_best(self) -> dict[str, float]:
        """Of the other complete methods, how probable their distance from the best is by chance,
        after Holm's correction."""
        return against_first(
            {row.method: pairs_of(row.clients(), self.over_seeds) for row in self.ranked}
        )

    def is_best(self, row: Row) -> bool:
        """The best, or not told apart from it."""
        if len(self.ranked) < 2:
            return False
        return row is self.ranked[0] or self.against_best.get(row.method, 0) > ALPHA

    def hostile_words(self) -> str:
        records = [record for row in self.rows for record in row.records.values()]
        masks = [r["clients"]["hostile"] for r in records if "hostile" in r["clients"]]
        return hostile_words(masks, any(r["config"].get("evaluate_clients") for r in records))

    def row(self, method: str) -> Row | None:
        return next((row for row in self.rows if row.method == method), None)

    def numbers_of(self, method: str) -> dict[str, Any]:
        """Of a method that has no result here, nothing."""
        row = self.row(method)
        return {} if row is None else row.numbers()

    def records(self) -> list[dict[str, Any]]:
        return [
            row.numbers() | {"p_best": _rounded(self.against_best.get(row.method))}
            for row in self.rows
        ]


@dataclass(frozen=True)
class Outcome:
    """All that has been found."""

    design: Design
    found: Sequence[Found]

    @cached_property
    def sections(self) -> list[Section]:
        """The settings with at least one result."""
        names = dict.fromkeys(f.cell.setting for f in self.found if f.records)
        return [Section(name, self._rows(name), self.over_seeds) for name in names]

    @property
    def over_seeds(self) -> bool:
        """Whether the seeds are enough to tell this many methods apart."""
        return enough(len(self.design.seeds), len(self.design.methods))

    def _rows(self, setting: str) -> tuple[Row, ...]:
        here = [f for f in self.found if f.cell.setting == setting and f.records]
        ways = [f for f in here if f.cell.method.algorithm.reference]
        # Of two ways to train alone, that which trains the same clients at the same times.
        local = min(ways, key=lambda f: f.cell.method.algorithm.trains_everyone(), default=None)
        records = local.records if local else {}
        numbers = method_numbers(method.name for method in self.design.methods)
        rows = [Row(f, numbers[f.cell.method.name], records, f is local) for f in here]
        return tuple(sorted(rows, key=lambda row: (not row.complete, -row.accuracy)))

    @cached_property
    def everywhere(self) -> list[str]:
        """The methods that are complete in every setting, which alone have a mean rank."""
        return [
            method.name
            for method in self.design.methods
            if self.sections
            and all(any(r.method == method.name for r in s.ranked) for s in self.sections)
        ]

    def overall(self) -> list[dict[str, Any]]:
        """Of those methods, the best mean rank first. Ranks are within a setting, so on the same
        data; what is averaged over settings is ranks and points above local training."""
        ranks: dict[str, list[float]] = {name: [] for name in self.everywhere}
        rows: dict[str, list[Row]] = {name: [] for name in self.everywhere}
        for section in self.sections:
            common = [row for row in section.ranked if row.method in ranks]
            for row in common:
                better = sum(other.accuracy > row.accuracy for other in common)
                equal = sum(other.accuracy == row.accuracy for other in common)
                ranks[row.method].append(better + (equal + 1) / 2)  # equals share their ranks
                rows[row.method].append(row)
        order = sorted(self.everywhere, key=lambda name: statistics.mean(ranks[name]))
        by_best = self._against_best(order, rows)
        return [
            {
                "method": name,
                "mean_rank": _rounded(statistics.mean(ranks[name])),
                "first_in": ranks[name].count(1),
                "mean_gain": _rounded(_mean(row.gain for row in rows[name])),
                "lowest_gain": _rounded(min(_known(r.gain for r in rows[name]), default=None)),
                "harmed": _rounded(_mean(r.harmed_percent for r in rows[name])),
                "p_best": _rounded(by_best.get(name)),
            }
            for name in order
        ]

    def accuracies(self) -> list[dict[str, Any]]:
        """A row for each method, with its mean accuracy and deviation in each setting; those with
        a mean rank first."""
        ranks = {row["method"]: row["mean_rank"] for row in self.overall()}
        rest = [m.name for m in self.design.methods if m.name not in ranks]
        found: list[dict[str, Any]] = []
        for method in [*ranks, *rest]:
            numbers = {"method": method}
            for section in self.sections:
                of_row = section.numbers_of(method)
                numbers |= {
                    section.name: of_row.get("accuracy"),
                    f"{section.name}, deviation": of_row.get("accuracy_deviation"),
                }
            found.append(numbers | {"mean_rank": ranks.get(method)})
        return found

    def _against_best(
        self, order: Sequence[str], rows: Mapping[str, Sequence[Row]]
    ) -> dict[str, float]:
        """As in a setting, but a pair is a setting: the mean accuracy over its seeds."""
        return against_first({name: [row.accuracy for row in rows[name]] for name in order})

    def records(self) -> dict[str, Record]:
        """Those of finished runs, by name."""
        return {
            f.cell.run_name(seed): record for f in self.found for seed, record in f.records.items()
        }

    def chosen(self) -> list[dict[str, Any]]:
        """What was chosen by validation data, and by how many trials."""
        rows = []
        for f in self.found:
            if f.tuned is None or f.choice is None:
                continue
            trials = f.tuned["trials"]
            best = trials[0]["validation_accuracy"]
            rows.append(
                {
                    "setting": f.cell.setting,
                    "method": f.cell.method.name,
                    "trials": len(trials),
                    "diverged": sum(bool(trial["failed"]) for trial in trials),
                    "chosen": _choice_text(f.choice),
                    "validation_accuracy": _rounded(100 * best[0]) if best else None,
                }
            )
        return rows

    def without_result(self) -> list[dict[str, Any]]:
        """What was not run, left out, or diverged."""
        rows: list[dict[str, Any]] = []
        for f in self.found:
            who = {"setting": f.cell.setting, "method": f.cell.method.name}
            if f.left_out:
                rows.append(who | {"seeds": "all", "why": f"left out: {f.left_out}"})
                continue
            rows += [
                who | {"seeds": str(seed), "why": f"diverged: {why}"}
                for seed, why in f.failed.items()
            ]
            if f.missing:
                seeds = "all" if len(f.missing) == len(self.design.seeds) else _list(f.missing)
                rows.append(who | {"seeds": seeds, "why": "not run"})
        return rows

    def tables(self) -> dict[str, Table]:
        """By the names of their files."""
        named = {
            f"setting {section.name}": _setting_table(self.design, section, self.sections[0])
            for section in self.sections
        }
        if len(self.sections) > 1:
            named["over all settings"] = _overall_table(self)
        if 1 < len(self.sections) <= MOST_COLUMNS:
            named["over all settings, accuracy"] = _accuracy_table(self)
        if rows := self.chosen():
            named["chosen settings"] = _chosen_table(self.design, rows)
        if rows := self.without_result():
            named["without a result"] = _without_result_table(rows)
        return named

    def values(self) -> dict[str, list[dict[str, Any]]]:
        """The same for programs, by the same names."""
        named = {f"setting {s.name}": s.records() for s in self.sections}
        named["over all settings"] = self.overall()
        named["over all settings, accuracy"] = self.accuracies()
        named["chosen settings"] = self.chosen()
        named["without a result"] = self.without_result()
        there = self.tables()
        named = {name: rows for name, rows in named.items() if name in there}
        return named | {"curves": curves} if (curves := self.curves()) else named

    def curves(self) -> list[dict[str, Any]]:
        """What is drawn by round: a row for every setting, method, seed and evaluation."""
        return [
            {
                "setting": section.name,
                "method": row.method,
                "model": row.kind,
                "seed": seed,
                "round": int(round),
                "accuracy": _rounded(float(accuracy)),
            }
            for section in self.sections
            for row in section.rows
            for seed, accuracies in zip(row.seeds, row.curve()[1], strict=True)
            for round, accuracy in zip(row.curve()[0], accuracies, strict=True)
        ]


HEADER = (
    *("method", "model", "accuracy", "p", "above local", "harmed %", "worst tenth", "ECE %"),
    *("bytes/round", "s/round"),
)
ACCURACY = HEADER.index("accuracy")
NOTE = (
    "Test accuracy in %, mean over all clients, after the last round{deviation}. "
    "model: the client's personal model where the method has one, else the global one. "
    f"Bold: the best, and what the test cannot tell from it (p > {ALPHA:.2g}). "
    "p: how probable a distance from the best this large would be by chance ({test}). "
    "above local: points above the client's own local model; in brackets a 95 % interval, by "
    f"{DRAWS:,} paired bootstrap draws of {{levels}}. "
    f"harmed: clients more than {HARM:g} points below their local model. "
    "worst tenth: mean over the tenth of the clients with the lowest accuracy. "
    "ECE: expected calibration error. bytes/round: as sent, both ways."
)
MANY_SEEDS = 10
ONE_SEED = " One seed: another one divides the data anew, and how much that changes is not known."
FEW_SEEDS = " With so few seeds, intervals are probably too narrow."
UNRANKED = " Not ranked, since runs of other seeds are on other data: {}."


def _setting_table(design: Design, section: Section, first: Section) -> Table:
    """The first one says what its columns are."""
    seeds = len(design.seeds)
    is_first = section is first
    note = _columns_note(seeds, section.over_seeds) if is_first else f"Columns: as in {first.name}."
    note += f" {hostile}" if (hostile := section.hostile_words()) else ""
    unranked = [
        f"{row.method} ({_seeds_text(row.seeds)})" for row in section.rows if not row.complete
    ]
    note += UNRANKED.format(", ".join(unranked)) if unranked else ""
    rows = [_cells(section, row) for row in section.rows]
    best = {(n, ACCURACY) for n, row in enumerate(section.rows) if section.is_best(row)}
    title = f"{section.name}: {_seeds_text(design.seeds)}"
    return Table(title, HEADER, rows, note, names=2, bold=best)


def _columns_note(seeds: int, over_seeds: bool) -> str:
    note = NOTE.format(
        test=described(seeds, over_seeds),
        deviation="" if seeds == 1 else ", ± standard deviation over seeds",
        levels="clients" if seeds == 1 else "seeds, and of clients in each",
    )
    note += "" if over_seeds else f" {FEW}"
    return note + (ONE_SEED if seeds == 1 else FEW_SEEDS * (seeds < MANY_SEEDS))


def _cells(section: Section, row: Row) -> list[str]:
    numbers = row.numbers()
    gain = "–"
    if row.gain is not None and row.interval is not None:
        low, high = row.interval
        gain = f"{_points(row.gain)} [{_points(low)}, {_points(high)}]"
    p = section.against_best.get(row.method)
    best = len(section.ranked) > 1 and row is section.ranked[0]
    return [
        row.method,
        row.kind,
        spread(row.last("test_accuracy")),
        "best" if best else _p(p),
        gain,
        "–" if row.harmed_percent is None else f"{row.harmed_percent:.0f}",
        f"{numbers['worst_tenth']:.1f}",
        f"{numbers['calibration_error']:.1f}",
        quantity(row.bytes_per_round, "B"),
        _seconds(row.seconds_per_round),
    ]


OVERALL = ("method", "mean rank", "first in", "mean gain", "lowest gain", "harmed %", "p")


def _overall_table(outcome: Outcome) -> Table:
    rows = outcome.overall()
    cells = [
        [
            row["method"],
            f"{row['mean_rank']:.1f}",
            str(row["first_in"]),
            "–" if row["mean_gain"] is None else _points(row["mean_gain"]),
            "–" if row["lowest_gain"] is None else _points(row["lowest_gain"]),
            "–" if row["harmed"] is None else f"{row['harmed']:.0f}",
            "best" if number == 0 and len(rows) > 1 else _p(row["p_best"]),
        ]
        for number, row in enumerate(rows)
    ]
    settings = len(outcome.sections)
    note = (
        "mean rank: methods are ranked by accuracy in each setting, 1 is the best. "
        "first in: number of settings in which a method has rank 1. "
        "mean gain, lowest gain: points above local training, over settings. "
        "p: how probable a distance from the best this large would be by chance, over the "
        f"{settings} settings, each the mean over its seeds (Wilcoxon, Holm); – if there are too "
        "few for a test."
    )
    without = [m.name for m in outcome.design.methods if m.name not in outcome.everywhere]
    if without:
        note += f" Not here, since some setting lacks runs of theirs: {', '.join(without)}."
    bold = {
        (number, 1)
        for number, row in enumerate(rows)
        if len(rows) > 1 and (number == 0 or (row["p_best"] or 0) > ALPHA)
    }
    title = f"Over all {settings} settings: {_seeds_text(outcome.design.seeds)}"
    return Table(title, OVERALL, cells, note, bold=bold)


MOST_COLUMNS = 8  # settings beside each other: more do not fit a page


def _accuracy_table(outcome: Outcome) -> Table:
    """The table of a paper: methods by settings."""
    cells, bold = [], set()
    for number, record in enumerate(outcome.accuracies()):
        line = [record["method"]]
        for column, section in enumerate(outcome.sections, start=1):
            row = section.row(record["method"])
            line.append("–" if row is None else spread(row.last("test_accuracy")))
            if row is not None and row.complete and section.is_best(row):
                bold.add((number, column))
        rank = record["mean_rank"]
        cells.append([*line, "–" if rank is None else f"{rank:.1f}"])
    seeds = len(outcome.design.seeds)
    note = "Mean test accuracy over all clients in %" + (
        f", ± standard deviation over {seeds} seeds. " if seeds > 1 else ", one seed. "
    )
    note += f"Bold: the best, and what the test cannot tell from it (p > {ALPHA:.2g}; "
    note += f"{described(seeds, outcome.over_seeds)}). mean rank: over the settings."
    header = ("method", *(section.name for section in outcome.sections), "mean rank")
    title = f"Accuracy in every setting: {_seeds_text(outcome.design.seeds)}"
    return Table(title, header, cells, note, bold=bold)


def _chosen_table(design: Design, rows: Sequence[Mapping[str, Any]]) -> Table:
    assert design.tuning is not None
    cells = [
        [
            row["setting"],
            row["method"],
            row["chosen"],
            str(row["trials"]),
            "–" if row["validation_accuracy"] is None else f"{row['validation_accuracy']:.1f}",
        ]
        for row in rows
    ]
    note = (
        f"By validation accuracy (in %) of seed {design.tuning.seed}, which has no part in the "
        f"results; {design.tuning.trials} trials for every method, the first of them with what the "
        "study file says. A method that uses validation samples itself sees half of them, and the "
        "choice is by the other half. tuning.json has every trial."
    )
    header = ("setting", "method", "chosen", "trials", "validation")
    return Table("Settings, chosen by validation", header, cells, note, names=3)


def _without_result_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What several methods have in common is said once."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        key = (row["setting"], row["why"], row["seeds"])
        grouped.setdefault(key, []).append(row["method"])
    cells = [[*key, ", ".join(methods)] for key, methods in grouped.items()]
    return Table("Without a result", ("setting", "why", "seeds", "methods"), cells, names=4)


def _choice_text(choice: Mapping[str, Any]) -> str:
    words = [f"{key.rpartition('.')[2]}={shown_value(value)}" for key, value in choice.items()]
    return " ".join(words) or "as listed"


def _seeds_text(seeds: Sequence[int]) -> str:
    return f"one seed ({seeds[0]})" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _points(value: float) -> str:
    return f"{value:+.1f}"


def _seconds(value: float) -> str:
    """Two digits, also where the second is 0; of hundreds all."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.2g}".rstrip(".")


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def _list(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _known(values: Any) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Any) -> float | None:
    known = _known(values)
    return statistics.mean(known) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
