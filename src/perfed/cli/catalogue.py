"""``perfed list``."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import perfed
from perfed.config import preset_names, read_mapping
from perfed.core.errors import ConfigError
from perfed.core.registry import Registry


def list_(
    kind: Annotated[
        str | None, typer.Argument(help="algorithms, models, datasets, partitions or presets")
    ] = None,
) -> None:
    """What there is to choose from, with every option and its default."""
    registries: dict[str, Registry[Any]] = {
        "algorithms": perfed.algorithms,
        "models": perfed.architectures,
        "datasets": perfed.datasets,
        "partitions": perfed.partitions,
    }
    known = [*registries, "presets"]
    if kind is not None and kind not in known:
        raise ConfigError(f"'{kind}' is none of {', '.join(known)}", "list")
    console = Console()
    for title in [kind] if kind else known:
        if title == "presets":
            _print_presets(console)
        else:
            _print_registry(console, title, registries[title])


def _print_registry(console: Console, title: str, registry: Registry[Any]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("name", "option", "default", "meaning"):
        table.add_column(column, style="bold" if column == "name" else None)
    for name in sorted(registry):
        cls = registry[name]
        about = " ".join((cls.__doc__ or "").split("\n\n")[0].replace("``", "'").split())
        if about.startswith(f"{cls.__name__}("):  # what dataclasses write by themselves
            about = sys.modules[cls.__module__].__doc__ or ""
            about = about.splitlines()[0]
        table.add_row(name, "", "", about)
        for field in dataclasses.fields(cls):
            default = ", ".join(map(str, d)) if isinstance(d := field.default, tuple) else str(d)
            symbol = field.metadata.get("symbol", "")
            meaning = f"{symbol}: {field.metadata['help']}" if symbol else field.metadata["help"]
            table.add_row("", field.name, default, meaning)
    console.print(table)
    console.print()


def _print_presets(console: Console) -> None:
    table = Table(
        title="presets", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.add_column("name", style="bold")
    table.add_column("what it is")
    for name in preset_names():
        table.add_row(name, str(read_mapping(name).get("about", "")))
    console.print(table)
