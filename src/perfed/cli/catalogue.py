"""``perfed list``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import perfed
from perfed.config import LINKS, PRESETS, STUDIES, preset_names, read_mapping
from perfed.core.algorithm import Algorithm, Sends, needs
from perfed.core.errors import ConfigError
from perfed.core.metrics import metrics
from perfed.core.objects import import_module, import_object
from perfed.core.registry import Component, Registry
from perfed.explain import about, described, shown_default

OPTION_WIDTH = 28


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="algorithms, models, datasets, partitions, shifts, optimizers, schedules, stages, "
            "attacks, metrics, presets, links or studies"
        ),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="PATH",
            help="Also list your own: file.py, package.module or file.py:Name.",
        ),
    ] = None,
) -> None:
    """Show what there is to choose from, with every option and its default."""
    registries: dict[str, Registry[Any]] = {
        "algorithms": perfed.algorithms,
        "models": perfed.architectures,
        "datasets": perfed.datasets,
        "partitions": perfed.partitions,
        "shifts": perfed.shifts,
        "optimizers": perfed.optimizers,
        "schedules": perfed.schedules,
        "stages": perfed.stages,
        "attacks": perfed.attacks,
    }
    folders = {"presets": PRESETS, "links": LINKS, "studies": STUDIES}
    known = [*registries, "metrics", *folders]
    if kind is not None and kind not in known:
        raise ConfigError(f"'{kind}' is none of {', '.join(known)}", "list")
    shown = {title: {name: all_[name] for name in all_} for title, all_ in registries.items()}
    for name, cls in _own(with_ or ()):
        title = next(title for title, all_ in registries.items() if all_ is cls.registry)
        shown[title] = {n: c for n, c in shown[title].items() if c is not cls} | {name: cls}
    console = Console()
    for title in [kind] if kind else known:
        if title in folders:
            _print_files(console, title, folders[title])
        elif title == "metrics":
            _print_metrics(console)
        elif shown[title] or kind:
            _print_components(console, title, shown[title])


def _own(paths: Iterable[str]) -> Iterable[tuple[str, type[Component]]]:
    """What a user's files define, under the name a configuration would use."""
    for path in paths:
        try:
            found = _found(path)
        except ConfigError as error:
            raise ConfigError(error.message, "--with") from None
        components = {name: cls for name, cls in found.items() if _is_component(cls)}
        if not components:
            what = (
                "algorithm, dataset, partition, shift, network, optimizer, schedule, stage or "
                "attack"
            )
            raise ConfigError(f"'{path}' defines no {what}", "--with")
        yield from components.items()


def _found(path: str) -> dict[str, Any]:
    if ":" in path:
        return {path: import_object(path)}
    module = import_module(path)
    return {f"{path}:{n}": value for n, value in vars(module).items() if _is_own(value, module)}


def _is_own(value: Any, module: Any) -> bool:
    return bool(getattr(value, "__module__", "") == module.__name__)


def _is_component(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Component) and hasattr(value, "registry")


def _print_components(console: Console, title: str, components: dict[str, type[Component]]) -> None:
    """Two columns, so that the meaning has most of a terminal."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    most = max(OPTION_WIDTH, console.width // 2 - OPTION_WIDTH)
    table.add_column("name, and options = default", max_width=most, overflow="fold")
    table.add_column("meaning")
    for heading, names in _sections(components).items():
        if heading:
            table.add_row("", f"[bold italic]{heading}[/]")
        for name in names:
            table.add_row(f"[bold]{escape(name)}[/]", escape(_meaning(components[name])))
            for field in dataclasses.fields(components[name]):
                option = f"  {field.name} = {_to_copy(field)}"
                table.add_row(escape(option), escape(described(components[name], field)))
    console.print(table)
    console.print()


def _to_copy(field: dataclasses.Field[Any]) -> str:
    """As --set takes it, and as the option's meaning calls it."""
    return "null" if field.default is None else shown_default(field)


def _sections(components: dict[str, type[Component]]) -> dict[str, list[str]]:
    """Algorithms by what clients send, the least first; all else by name alone."""
    sections: dict[str, list[str]] = {}
    if not any(issubclass(cls, Algorithm) for cls in components.values()):
        return {"": sorted(components)}
    for sent in (*get_args(Sends), None):
        names = [n for n in sorted(components) if getattr(components[n], "sends", None) == sent]
        if names:
            sections[f"Clients send {sent}:" if sent else "What clients send is not said:"] = names
    return sections


def _meaning(component: type[Component]) -> str:
    words = about(component)
    if issubclass(component, Algorithm) and (asked := needs(component)):
        words += f" Needs: {', '.join(asked)}."
    return words


def _print_metrics(console: Console) -> None:
    table = Table(
        title="metrics", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for column in ("name", "better", "meaning"):
        table.add_column(column, style="bold" if column == "name" else None)
    for one in metrics.values():
        table.add_row(one.name, one.better, one.about)
    console.print(table)
    console.print()


def _print_files(console: Console, title: str, folder: str) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("name", style="bold")
    table.add_column("what it is")
    for name in preset_names(folder):
        table.add_row(name, str(read_mapping(name, folder).get("about", "")))
    console.print(table)
    console.print()
