"""Every key of a configuration, with its meaning, from the definitions that also check it."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

from perfed.config import LINKS, PRESETS, STUDIES, Comparison, Experiment, preset_names, preset_text
from perfed.core.algorithm import Algorithm
from perfed.core.declaration import lines as message_lines
from perfed.core.errors import ConfigError
from perfed.core.privacy import IN_WORDS
from perfed.core.registry import Component, Registry
from perfed.core.schema import BOUNDS, Options
from perfed.runs.design import Tuning

LONGEST_NUMBER = 12  # characters of a default; 1/5.6 has more, and is rounded


@dataclass(frozen=True)
class Entry:
    """One option."""

    key: str
    component: str
    """Whose option it is, where that depends on a name: ``perfed-ckt``."""
    values: str
    default: str
    meaning: str

    def title(self) -> str:
        return f"{self.key} ({self.component})" if self.component else self.key

    def lines(self) -> list[str]:
        return [self.title(), f"  {self.meaning}", f"  {self.values}; default: {self.default}"]


def entries() -> list[Entry]:
    """All there are, in the order of the definitions."""
    return [*_entries(Experiment, ""), *_entries(Comparison, "", only=("algorithms", "seeds"))]


def is_file_of_ours(key: str | None) -> bool:
    """Whether it is a preset, a link or a study: its file is shown as it is."""
    return any(key in preset_names(folder) for folder in (PRESETS, LINKS, STUDIES))


def explain(key: str) -> list[str]:
    """What is known of a key, a group of keys, or a name, or what a preset holds; an error where
    that is nothing."""
    if ":" in key:
        return component_lines(_imported(key), key)
    if key.endswith(".py"):
        hint = f"{key}:Name ('perfed list --with {key}' has the names)"
        raise ConfigError(f"is a file; name what is in it: {hint}", key)
    for folder in (PRESETS, LINKS, STUDIES):
        if key in preset_names(folder):
            return preset_text(key, folder).splitlines()
    if key in STUDY_KEYS:
        return STUDY.splitlines()
    known = [*entries(), *_entries(Tuning, "tuning.")]
    key = key.replace("data.public.", "data.")  # a public set may be a dataset of its own
    exact = [entry for entry in known if entry.key == key]
    below = [entry for entry in known if entry.key.startswith(f"{key}.")]
    if exact or below:
        group = _group(key)
        lines = [line for entry in exact for line in [*entry.lines(), ""]]
        lines += PAGES.get(key, "").splitlines()
        lines += [""] if key in PAGES else []
        if group:
            lines += _names(group)
        elif below:
            lines += [line for entry in below for line in [*entry.lines(), ""]]
        return lines[:-1] if lines[-1] == "" else lines
    named = list(_named(key))
    if named:
        return [line for cls, name in named for line in component_lines(cls, name)]
    raise ConfigError(f"no such key{_hint(key, known)} ('perfed explain' lists all)", key)


STUDY_KEYS = ("study", "methods", "settings")
STUDY = """\
A study compares methods in several settings: perfed study FILE. FILE has the keys of an experiment,
which hold for all runs, and

methods
  names, or {name: …} with options, a label and a grid; all: every method
  as in: [local, {name: perfed-ckt, clusters: 3, grid: {weight: [0.5, 1.0]}}]
settings
  by name, the keys that a setting changes; a list of values makes one setting for each
  as in: {Dir: {partition: {name: dirichlet, alpha: [0.1, 1.0]}}}
seeds
  each method runs with each of them
tuning
  how values of a grid are chosen; without it, methods run as listed (perfed explain tuning)

A whole one: perfed explain six-methods"""

PAGES = {"privacy": IN_WORDS}
"""What a key means, where a line does not say it."""


def overview() -> list[str]:
    """A line for each key; where several components have an option, it is said once for each."""
    known = entries()
    width = max(len(entry.title()) for entry in known)
    return [f"{entry.title():<{width}}  {entry.meaning}" for entry in known]


def component_lines(cls: type[Component], name: str) -> list[str]:
    """A component's sentence, its options, and of an algorithm what crosses."""
    lines = [f"{name} ({cls.registry.kind})", f"  {about(cls)}"]
    for field in dataclasses.fields(cls):
        entry = _entry(cls, field, "", name)
        lines += [
            f"  {entry.key}: {entry.meaning}",
            f"    {entry.values}; default: {entry.default}",
        ]
    required = [field for field in dataclasses.fields(cls) if field.default is MISSING]
    if issubclass(cls, Algorithm) and not required:  # shapes may depend on options
        lines += [f"  {line}" for line in message_lines(cls().messages())]
    return lines


def about(cls: type) -> str:
    """The first paragraph of its documentation, or of its file's where it has none of its own."""
    text = _first_paragraph(cls.__doc__)
    if text.startswith(f"{cls.__name__}("):  # what dataclasses write by themselves
        text = _first_paragraph(sys.modules[cls.__module__].__doc__)
    return text


def _first_paragraph(documentation: str | None) -> str:
    first = (documentation or "").strip().split("\n\n")[0]
    return " ".join(first.replace("``", "'").split())


def meaning(field: dataclasses.Field[Any]) -> str:
    symbol, text = field.metadata.get("symbol", ""), field.metadata.get("help", "")
    return f"{symbol}: {text}" if symbol else text


def described(cls: type, field: dataclasses.Field[Any]) -> str:
    """Its meaning, and the words it can be, unless the meaning has them."""
    hint = typing.get_type_hints(cls)[field.name]
    if get_origin(hint) is not Literal or all(str(w) in meaning(field) for w in get_args(hint)):
        return meaning(field)
    *words, last = map(str, get_args(hint))
    return f"{meaning(field)} ({', '.join(words)} or {last})"


def shown_default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Options):
        return "as below"
    if value in ("", None) or value is MISSING:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and len(str(value)) > LONGEST_NUMBER:
        return str(float(f"{value:.4g}"))
    return str(value)


def _entries(cls: type[Options], prefix: str, only: tuple[str, ...] = ()) -> Iterator[Entry]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if only and field.name not in only:
            continue
        yield _entry(cls, field, prefix, "")
        kind = _options_class(hints[field.name])
        if kind is None:
            continue
        key = f"{prefix}{field.name}."
        if issubclass(kind, Component):
            if key != "algorithms.":  # as 'algorithm', each
                yield from _component_entries(kind.registry, key)
        else:
            yield from _entries(kind, key)


def _component_entries(registry: Registry[Any], prefix: str) -> Iterator[Entry]:
    for name in registry:
        for field in dataclasses.fields(registry[name]):
            yield _entry(registry[name], field, prefix, name)


def _entry(cls: type[Options], field: dataclasses.Field[Any], prefix: str, component: str) -> Entry:
    hint = typing.get_type_hints(cls)[field.name]
    limits = [
        f", {BOUNDS[name][1]} {field.metadata[name]}" for name in BOUNDS if name in field.metadata
    ]
    values = _values(hint, "".join(limits))
    return Entry(prefix + field.name, component, values, shown_default(field), meaning(field))


def _options_class(hint: Any) -> type[Options] | None:
    """The options a field holds, alone, or several of them, or perhaps none."""
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType) and get_args(hint)[1:] == (type(None),):
        hint = get_args(hint)[0]
    return hint if isinstance(hint, type) and issubclass(hint, Options) else None


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _values(hint: Any, limits: str = "") -> str:
    """What may be written there, in words; limits are those of numbers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        return f"a list, each {_values(arguments[0], limits)}"
    if origin in (Union, types.UnionType):
        kinds = [_values(kind, limits) for kind in arguments if kind not in (type(None), Any)]
        return ", or ".join(kinds) if limits else " or ".join(kinds)
    if isinstance(hint, type) and issubclass(hint, Component):
        registry = hint.registry
        article = "an" if registry.kind[0] in "aeiou" else "a"
        names = ", ".join(registry)
        if not names:
            return f"{article} {registry.kind}, by import path"
        return f"{article} {registry.kind}, by name: {names}; or by import path"
    if isinstance(hint, type) and issubclass(hint, Options):
        return "keys and values"
    return WORDS.get(hint, "anything") + (limits if hint in (int, float) else "")


def _group(key: str) -> Registry[Any] | None:
    """The registry a key chooses from."""
    kind = _options_class(_hints_of(key))
    return kind.registry if kind is not None and issubclass(kind, Component) else None


def _hints_of(key: str) -> Any:
    hint: Any = Comparison if key in ("algorithms", "seeds") else Experiment
    for part in key.split("."):
        holder = _options_class(hint)
        if holder is None or issubclass(holder, Component):
            return None
        hint = typing.get_type_hints(holder).get(part)
    return hint


def _names(registry: Registry[Any]) -> list[str]:
    width = max(map(len, registry), default=0)
    return [f"  {name:<{width}}  {about(registry[name])}" for name in sorted(registry)]


NAMED = (
    "algorithm",
    "data",
    "partition",
    "shift",
    "models.architectures",
    "training.optimizer",
    "training.schedule",
    "wire",
    "hostile",
)
"""Keys whose values go by a name."""


def _named(key: str) -> Iterator[tuple[type[Component], str]]:
    """Components that go by a name, or by ``algorithm.NAME``."""
    for prefix in NAMED:
        registry = _group(prefix)
        assert registry is not None
        name = key.removeprefix(f"{prefix}.")
        if name in registry:
            yield registry[name], name


def _imported(path: str) -> type[Component]:
    from perfed.core.objects import import_object

    found = import_object(path)
    if not (isinstance(found, type) and issubclass(found, Component)):
        raise ConfigError(f"'{path}' has no options: it is no algorithm, dataset or partition")
    return found


def _hint(key: str, known: list[Entry]) -> str:
    keys = list(dict.fromkeys(entry.key for entry in known))
    last = key.rpartition(".")[2]
    close = [name for name in keys if name.rpartition(".")[2] == last]
    if not close:
        names = {name.rpartition(".")[2]: name for name in reversed(keys)}
        names |= {name: name for name in keys}
        found = [*get_close_matches(key, names, n=1), *get_close_matches(last, names, n=1)]
        close = [names[name] for name in found[:1]]
    return f"; did you mean {' or '.join(repr(name) for name in close[:3])}?" if close else ""
