"""Names for things a user can choose or add: algorithms, datasets, partitions, architectures.

A component is an :class:`~perfed.core.schema.Options` class, registered by decorator::

    @algorithms.register("my-method")
    @dataclass(frozen=True)
    class MyMethod(Algorithm): ...

or named by import path (``my_package.my_module:MyMethod``), found also in the working directory, or
by file (``folder/my_file.py:MyMethod``).
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from perfed.core.errors import ConfigError, cut, did_you_mean
from perfed.core.objects import import_object, import_path, tell_whereabouts, whereabouts
from perfed.core.schema import Options, coerce, from_mapping, plain


class Component(Options):
    """Options that go by a name."""

    registry: ClassVar[Registry[Any]]
    registered_name: ClassVar[str] = ""
    import_path: ClassVar[str] = ""
    """Where it is found, if it is not perfed's own; a saved configuration then names it so."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by where it is found: a file is no module that another process could import."""
        path = vars(type(self)).get("import_path")
        if not path:
            return super().__reduce_ex__(protocol)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _made_again, (path, whereabouts(path), values)

    def label(self) -> str:
        """The name, the options that have a symbol, and those that are not the default."""
        symbols, others = [], []
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = plain(getattr(self, field.name))
            if "symbol" in field.metadata:
                symbols.append(f"{field.metadata['symbol']}={number_text(value)}")
            elif value != plain(coerce(hints[field.name], field.default)):
                text = "-".join(map(str, value)) if isinstance(value, list) else value
                others.append(f"{field.name}={text}")
        if symbols:
            return f"{self.registered_name} ({', '.join(symbols + others)})"
        return self.registered_name + (f"({','.join(others)})" if others else "")


def number_text(value: float | None) -> str:
    """Short where that is exact: 0.1, 1e-06; 0.10000001 in full; null, as in a configuration."""
    if value is None:
        return "null"
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _made_again(path: str, file: tuple[str, str], values: dict[str, Any]) -> Any:
    tell_whereabouts(*file)
    cls = import_object(path)
    return cls.registry.know(cls, path)(**values)


C = TypeVar("C", bound=Component)


class Registry(Generic[C]):
    """The components of one kind, by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[C]] = {}

    def register(self, name: str) -> Callable[[type[C]], type[C]]:
        def add(cls: type[C]) -> type[C]:
            if name in self._classes and not _same(cls, self._classes[name]):
                raise ValueError(f"{self.kind} '{name}' is registered already")
            cls.registered_name = name
            cls.import_path = vars(cls).get("import_path", "")  # never that of a class it extends
            self._classes[name] = cls
            return cls

        return add

    def forget(self, name: str) -> None:
        """Undo a registration, if there is one."""
        self._classes.pop(name, None)

    def built_in(self) -> list[str]:
        """The names of perfed's own, sorted, without what this process has added."""
        own = [n for n, cls in self._classes.items() if cls.__module__.startswith("perfed.")]
        return sorted(own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __getitem__(self, name: str) -> type[C]:
        if name in self._classes:
            return self._classes[name]
        if ":" in name:
            return self._adopt(name, import_object(name))
        hint = f"{did_you_mean(name, self)}; your own goes by file.py:Name"
        raise ConfigError(f"unknown {self.kind} '{cut(name)}'{hint}", "name")

    def build(self, value: Any) -> C:
        """A component from its name or class, or from a mapping with ``name`` and its options."""
        if isinstance(value, type):
            return self.know(value)()
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise ConfigError(
                f"expected a name ({', '.join(sorted(self))}) or a mapping with 'name'"
            )
        options = {key: item for key, item in value.items() if key != "name"}
        return from_mapping(self[value["name"]], options)

    def know(self, cls: Any, path: str = "") -> type[C]:
        """A class given in Python; one that is not perfed's own goes by where it is found."""
        own = cls.__module__.partition(".")[0] != "perfed"
        if own and not vars(cls).get("import_path"):
            path = path or import_path(cls)
            if path:
                return self._adopt(path, cls)
            if not vars(cls).get("registered_name"):  # typed into a notebook, or a script
                return self.register(cls.__name__)(self._checked(cls.__name__, cls))
        return self._checked(cls.__name__, cls)

    def _adopt(self, path: str, found: Any) -> type[C]:
        """A class found by import path, which it keeps, so that a run can resume."""
        cls = self._checked(path, found)
        cls.import_path = path
        cls.registered_name = vars(cls).get("registered_name") or cls.__name__
        return cls

    def _checked(self, name: str, found: Any) -> type[C]:
        if not (isinstance(found, type) and issubclass(found, Component)):
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise ConfigError(f"'{name}' is not {article} {self.kind} class", "name")
        if found.registry is not self:
            raise ConfigError(f"'{name}' is for {found.registry.kind}, not {self.kind}", "name")
        if any(isinstance(value, dataclasses.Field) for value in vars(found).values()):
            line = "@dataclass(frozen=True)"
            raise ConfigError(
                f"'{name}' has options but is no dataclass: write {line} above", "name"
            )
        return found  # type: ignore[return-value]


def _same(new: type, old: type) -> bool:
    """Whether a class is another once more: a cell run again, a file imported in two ways."""
    if new.__qualname__ != old.__qualname__:
        return False
    files = [getattr(sys.modules.get(c.__module__), "__file__", None) for c in (new, old)]
    return new.__module__ == old.__module__ or (files[0] is not None and files[0] == files[1])
