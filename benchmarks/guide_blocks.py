"""What docs/choosing.md and docs/methods.md show of the committed results, and docs/options.md of
the definitions."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from typing import Any

from committed import machine, result
from paper_blocks import gain_over_seeds

import perfed
from perfed.config import LINKS, PRESETS, preset_names, read_mapping
from perfed.core import layout
from perfed.core.algorithm import needs
from perfed.core.layout import Table
from perfed.core.privacy import Privacy
from perfed.core.registry import Registry
from perfed.core.schema import plain
from perfed.explain import described
from perfed.runs.tables import quantity

PERSONAL = "personal"


def by_partition() -> str:
    """Points above local training with one cluster and with three, and whom they harm."""
    record = result("when_it_helps_digits")
    rows = []
    for row in record["rows"]:
        if row["weight"] != 1 or row["change"]:
            continue
        methods = row["methods"]
        rows.append(
            [
                row["partition"],
                *(gain_over_seeds(methods[m], methods["local"]) for m in ("c=1", "c=3")),
                *(f"{100 * methods[m]['harmed']:.0f}" for m in ("c=1", "c=3")),
            ]
        )
    header = ("", "c=1", "c=3", "harmed %, c=1", "c=3")
    note = (
        "Points above local training, λ = 1, mean ± standard deviation over seeds "
        f"{record['seeds']}. harmed: clients more than 2 points below their own local model "
        f"{machine(record['environment'])}."
    )
    return layout.markdown([Table("", header, rows, note)])


def by_clusters() -> str:
    """The embedded default, which has three groups, with c = 1 … 4: gain and cost."""
    record = result("all_algorithms")
    last = {
        (run["algorithm"], run["seed"]): run["models"][PERSONAL]["last"]["test_accuracy"]
        for run in record["runs"]
        if PERSONAL in run["models"]
    }
    rows = []
    for algorithm in record["config"]["algorithms"]:
        if algorithm["name"] != "perfed-ckt":
            continue
        label = perfed.algorithms.build(algorithm).label()
        runs = [run for run in record["runs"] if run["algorithm"] == label]
        gains = [100 * (last[label, r["seed"]] - last["local", r["seed"]]) for r in runs]
        cost = [r["traffic"]["up_parameters"] + r["traffic"]["down_parameters"] for r in runs]
        gain = f"{statistics.mean(gains):+.1f} ± {statistics.stdev(gains):.1f}"
        rows.append([str(algorithm["clusters"]), gain, quantity(statistics.mean(cost))])
    header = ("c", "points above local training", "parameters")
    note = f"λ = 1, seeds {record['config']['seeds']} {machine(record['environment'])}."
    return layout.markdown([Table("", header, rows, note)])


def method_costs() -> str:
    """What crosses in a round, and what each method needs."""
    record = result("method_costs")
    setting = record["setting"]
    rows = [
        [
            f"[{row['method']}](#{row['method']})",
            row["sends"],
            ", ".join(needs(perfed.algorithms[row["method"]])),
            quantity(row["up_parameters"]),
            quantity(row["down_parameters"]),
            quantity(row["up_bytes"] + row["down_bytes"], "B"),
        ]
        for row in record["rows"]
    ]
    header = ("method", "clients send", "needs", "numbers up", "numbers down", "bytes up and down")
    note = (
        f"For one selected client and one round. {record['data']}; {setting['models'][0]} with "
        f"{record['parameters']:,.0f} parameters; {setting['clients']} clients, all selected, one "
        "training step each; what decides on costs has each method's defaults; mean of the rounds "
        f"after the first {machine(record['environment'])}."
    )
    return layout.markdown([Table("", header, rows, note, names=3)])


# --------------------------------------------------------------------- options


def _default(field: dataclasses.Field[Any]) -> str:
    value = plain(field.default)
    if dataclasses.is_dataclass(field.default):
        return "*below*"
    if isinstance(value, list):
        return "`[" + ", ".join(map(str, value)) + "]`"
    return (
        f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else '`""`'
    )


def _row(cls: Any, field: dataclasses.Field[Any]) -> list[str]:
    return [f"`{field.name}`", _default(field), described(cls, field).replace("|", "∣")]


def options(cls: Any) -> str:
    """The keys of one part of a configuration."""
    rows = [_row(cls, field) for field in dataclasses.fields(cls)]
    return layout.markdown([Table("", ("key", "default", "meaning"), rows, names=3)])


def about(cls: Any) -> str:
    """The first paragraph of a component's docstring, or the first line of its module's."""
    words = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    if words.startswith(f"{cls.__name__}("):  # what dataclasses write by themselves
        words = (sys.modules[cls.__module__].__doc__ or "").splitlines()[0]
    return words.replace("|", "∣")


def components(registry: Registry[Any]) -> str:
    """Everything of one kind, each with its options."""
    rows = []
    for name in sorted(registry):
        if not registry[name].__module__.startswith("perfed."):  # a benchmark's own
            continue
        rows.append([f"**{name}**", "", about(registry[name])])
        rows += [_row(registry[name], field) for field in dataclasses.fields(registry[name])]
    return layout.markdown([Table("", ("name, key", "default", "meaning"), rows, names=3)])


def files(kind: str, folder: str) -> str:
    """The files of a folder of presets, and what each is."""
    abouts = {name: read_mapping(name, folder).get("about", "") for name in preset_names(folder)}
    rows = [[f"**{name}**", str(text)] for name, text in abouts.items()]
    return layout.markdown([Table("", (kind, "what it is"), rows, names=2)])


BLOCKS = {
    "method-costs": method_costs,
    "choosing-partition": by_partition,
    "choosing-clusters": by_clusters,
    "options-experiment": lambda: options(perfed.Experiment),
    "options-training": lambda: options(perfed.Training),
    "options-privacy": lambda: options(Privacy),
    "options-split": lambda: options(perfed.Split),
    "options-models": lambda: options(perfed.Models),
    "options-execution": lambda: options(perfed.Execution),
    "options-algorithms": lambda: components(perfed.algorithms),
    "options-optimizers": lambda: components(perfed.optimizers),
    "options-schedules": lambda: components(perfed.schedules),
    "options-networks": lambda: components(perfed.architectures),
    "options-datasets": lambda: components(perfed.datasets),
    "options-partitions": lambda: components(perfed.partitions),
    "options-shifts": lambda: components(perfed.shifts),
    "options-stages": lambda: components(perfed.stages),
    "options-attacks": lambda: components(perfed.attacks),
    "options-presets": lambda: files("preset", PRESETS),
    "options-links": lambda: files("link", LINKS),
}
