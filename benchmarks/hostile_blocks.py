"""What docs/hostile.md shows of benchmarks/hostile.py's results."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from committed import RESULTS, machine, result
from drawn import COLOUR_OF

from perfed.core import layout
from perfed.core.layout import Table
from perfed.report.theme import RC

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "perfed-kin": "PerFed-Kin",
    "perfed-ckt": "PerFed-CKT, c=3",
    "fedmd": "FedMD",
    "fedavg": "FedAvg",
    "ditto": "Ditto, λ=1",
}
PRESET = "history, bounded"
SILENT = "silent"
HARMED = 200  # hundredths of a point below the client's local model
Rows = dict[tuple[str, str, str, float, str], dict[str, Any]]


class Harm(NamedTuple):
    """To honest clients of all seeds."""

    change: float
    """Mean points, against the same client in the same run without hostile clients or stages."""
    harmed: float
    """Percent of them more than 2 points below their local model."""
    worst_tenth: float
    """Mean points above local training, of the tenth of them that fares worst by this."""
    ended: int
    """Runs that ended because numbers were not finite any more."""
    by_seed: tuple[float, ...]
    """The mean change in each seed."""

    @property
    def error(self) -> float:
        """The standard error of the change, over seeds."""
        return statistics.stdev(self.by_seed) / len(self.by_seed) ** 0.5


def newest() -> Any:
    """The whole grid, or as long as it has not been run the reduced one."""
    whole = (RESULTS / "hostile.json").is_file()
    return result("hostile" if whole else "hostile_reduced")


def rows_of(record: Mapping[str, Any]) -> Rows:
    keys = ("setting", "method", "attack", "share", "stages")
    return {tuple(row[key] for key in keys): row for row in record["rows"]}  # type: ignore[misc]


def harm(record: Mapping[str, Any], rows: Rows, row: Mapping[str, Any]) -> Harm:
    reference = rows[row["setting"], row["method"], "", 0.0, "none"]["clients"]
    changes: list[list[float]] = []
    gains, ended = [], 0
    for number, reached in enumerate(row["clients"]):
        local = record["local"][row["setting"]][number]
        hostile = record["hostile"][f"{row['share']:g}"][number] if row["attack"] else []
        if reached is None:  # nobody has a model then
            reached, ended = [0] * len(local), ended + 1
        honest = sorted(set(range(len(local))) - set(hostile))
        changes.append([reached[client] - reference[number][client] for client in honest])
        gains += [reached[client] - local[client] for client in honest]
    lowest = sorted(gains)[: max(1, len(gains) // 10)]
    return Harm(
        statistics.mean(itertools.chain(*changes)) / 100,
        100 * statistics.mean(gain < -HARMED for gain in gains),
        statistics.mean(lowest) / 100,
        ended,
        tuple(statistics.mean(of_seed) / 100 for of_seed in changes),
    )


def all_harm(record: Mapping[str, Any]) -> dict[tuple[str, str, str, float, str], Harm]:
    rows = rows_of(record)
    return {key: harm(record, rows, row) for key, row in rows.items()}


def attacked(record: Mapping[str, Any]) -> list[str]:
    """The settings in which somebody is hostile; in others nobody is."""
    return list(dict.fromkeys(row["setting"] for row in record["rows"] if row["attack"]))


def at_share(share: float = 0.3) -> str:
    """Methods, without stages and with the preset: over all attacks, and by the worst of them."""
    record = newest()
    found = all_harm(record)
    table = []
    for setting in attacked(record):
        table.append([f"**{setting}**", *[""] * 8])
        for method, title in NAMES.items():
            for stages in ("none", PRESET):
                by_attack = {
                    attack: found[setting, method, attack, share, stages]
                    for s, m, attack, x, y in found
                    if (s, m, x, y) == (setting, method, share, stages) and attack != SILENT
                }
                worst = min(by_attack, key=lambda attack: by_attack[attack].change)
                silent = found[setting, method, SILENT, share, "none"]
                mean = _mean(by_attack.values())
                table.append(
                    [
                        title if stages == "none" else "– with `robust`",
                        f"{mean.change:+.1f} ± {mean.error:.1f}",
                        f"{mean.harmed:.0f} %",
                        f"{mean.worst_tenth:+.1f}",
                        worst,
                        f"{by_attack[worst].change:+.1f}",
                        f"{max(one.harmed for one in by_attack.values()):.0f} %",
                        f"{silent.change:+.1f}",
                        f"{mean.change - silent.change:+.1f}",
                    ]
                )
    header = (
        *("", "mean change", "harmed", "worst tenth", "worst attack", "its change"),
        *("most harmed", "if they were silent", "mean against silent"),
    )
    note = (
        f"{100 * share:.0f} % of 20 clients are hostile. Means over attacks, seeds "
        f"{record['seeds']} and honest clients. Change: points against the same run without "
        "hostile clients and without stages, ± standard error over seeds. Harmed: more than 2 "
        "points below the client's local model. Worst tenth: points against local training. If "
        "they were silent: the change without stages where hostile clients send nothing; the last "
        "column is what their lies cost beyond that. Each client is evaluated on the test samples "
        "of all, with its own mix of labels. A run that ended counts as 0 % "
        f"{_machine(record)}."
    )
    return layout.markdown([Table("", header, table, note)])


def by_attack(method: str = "perfed-kin", share: float = 0.3) -> str:
    record = newest()
    found = all_harm(record)
    attacks = list(dict.fromkeys(key[2] for key in found if key[1] == method and key[2]))
    places = [(s, stages) for s in attacked(record) for stages in ("none", PRESET)]
    table = []
    for attack in attacks:
        cells = []
        for setting, stages in places:
            one = found.get((setting, method, attack, share, stages))
            cells.append(f"{one.change:+.1f} / {one.harmed:.0f} %" if one else "–")
        table.append([attack, *cells])
    titles = [f"{s}{', `robust`' if stages != 'none' else ''}" for s, stages in places]
    note = (
        f"{NAMES[method]}, {100 * share:.0f} % hostile: change in points / percent of honest "
        f"clients harmed, seeds {record['seeds']}."
    )
    return layout.markdown([Table("", ("attack", *titles), table, note)])


def by_stage(share: float = 0.3) -> str:
    """Every stage with every method it fits: mean change over attacks and settings."""
    record = newest()
    found = all_harm(record)
    kinds = list(dict.fromkeys(key[4] for key in found))
    table = []
    for method, title in NAMES.items():
        cells = []
        for stages in kinds:
            few = [
                one
                for (_, m, attack, x, y), one in found.items()
                if (m, x, y) == (method, share, stages) and attack != SILENT
            ]
            ended = sum(one.ended for one in few)
            text = f"{_mean(few).change:+.1f} / {_mean(few).harmed:.0f} %" if few else "–"
            cells.append(f"{text} ({ended} ended)" if ended else text)
        table.append([title, *cells])
    note = (
        f"{100 * share:.0f} % hostile: change in points / percent of honest clients harmed, mean "
        f"over attacks, settings and seeds {record['seeds']}. A dash: the stage does not fit."
    )
    return layout.markdown([Table("", ("", *kinds), table, note)])


def cost() -> str:
    """What the preset costs where nobody is hostile."""
    record = newest()
    found = all_harm(record)
    settings = list(record["local"])
    table = []
    for method, title in NAMES.items():
        cells = []
        for setting in settings:
            plain, robust = (found[setting, method, "", 0.0, s] for s in ("none", PRESET))
            cells += [f"{robust.change:+.1f}", f"{plain.harmed:.0f} → {robust.harmed:.0f} %"]
        table.append([title, *cells])
    header = [part for s in settings for part in (f"{s}: accuracy", "harmed")]
    note = (
        f"Points against the same run without stages, seeds {record['seeds']}; percent of clients "
        "more than 2 points below their local model, without and with `robust`."
    )
    return layout.markdown([Table("", ("", *header), table, note)])


def tuned() -> str:
    record = result("hostile_tune")
    scores = record["validation_accuracy"]
    kinds = list(dict.fromkeys(s for by in scores.values() for s in by))
    table = []
    for method, title in NAMES.items():
        best = record["best"][method]
        cells = ["–" if s not in scores[method] else f"{scores[method][s]:.1f}" for s in kinds]
        cells[kinds.index(best)] = f"**{cells[kinds.index(best)]}**"
        table.append([title, *cells])
    note = (
        f"Mean validation accuracy of honest clients, in %, over all attacks at "
        f"{100 * record['share']:.0f} % and both settings, tuning seeds {record['seeds']}; half of "
        f"the validation samples are kept from methods that use them {_machine(record)}."
    )
    return layout.markdown([Table("", ("", *kinds), table, note)])


def figure() -> Figure:
    """The mean change of honest clients against the share of hostile ones."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    record = newest()
    found = all_harm(record)
    settings = attacked(record)
    shares = sorted({key[3] for key in found if key[4] == PRESET})
    with mpl.rc_context(RC):
        drawing = Figure(figsize=(9, 3.1 * len(settings)), layout="constrained")
        axes = drawing.subplots(len(settings), 2, sharex=True, sharey="row", squeeze=False)
        for row, setting in zip(axes, settings, strict=True):
            for axis, stages in zip(row, ("none", PRESET), strict=True):
                for method, title in NAMES.items():
                    values = [
                        _mean(
                            one
                            for (s, m, a, x, y), one in found.items()
                            if (s, m, x, y) == (setting, method, share, stages) and a != SILENT
                        ).change
                        for share in shares
                    ]
                    percent = [100 * share for share in shares]
                    axis.plot(percent, values, "o-", color=COLOUR_OF[method], label=title)
                axis.axhline(0, color="#6a6a6a", linewidth=0.8)
                axis.set_title(f"{setting}, {'no stages' if stages == 'none' else 'robust'}")
            row[0].set_ylabel("change of test accuracy (points)")
        for axis in axes[-1]:
            axis.set_xlabel("hostile clients (%)")
        drawing.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return drawing


def _mean(harms: Iterable[Harm]) -> Harm:
    few = list(harms)
    if not few:
        return Harm(0.0, 0.0, 0.0, 0, ())
    change, harmed, worst = (statistics.mean(one[place] for one in few) for place in range(3))
    by_seed = tuple(map(statistics.mean, zip(*(one.by_seed for one in few), strict=True)))
    return Harm(change, harmed, worst, sum(one.ended for one in few), by_seed)


def _machine(record: Mapping[str, Any]) -> str:
    return machine(record["environments"][0])


BLOCKS = {
    "hostile-goal": at_share,
    "hostile-attacks": by_attack,
    "hostile-stages": by_stage,
    "hostile-cost": cost,
    "hostile-tuned": tuned,
}
FIGURES = {"hostile": figure}
