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
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

from perfed.core.errors import ConfigError, did_you_mean
from perfed.core.schema import Options, from_mapping, plain


class Component(Options):
    """Options that go by a name."""

    registered_name: ClassVar[str] = ""
    import_path: ClassVar[str] = ""
    """Where it was found, if by import path; a saved configuration then names it so."""

    def label(self) -> str:
        """The name, the options that have a symbol, and those that are not the default."""
        symbols, others = [], []
        for field in dataclasses.fields(self):
            value = plain(getattr(self, field.name))
            if "symbol" in field.metadata:
                symbols.append(f"{field.metadata['symbol']}={value:g}")
            elif value != plain(field.default):
                text = "-".join(map(str, value)) if isinstance(value, list) else value
                others.append(f"{field.name}={text}")
        if symbols:
            return f"{self.registered_name} ({', '.join(symbols + others)})"
        return self.registered_name + (f"({','.join(others)})" if others else "")


C = TypeVar("C", bound=Component)


class Registry(Generic[C]):
    """The components of one kind, by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[C]] = {}

    def register(self, name: str) -> Callable[[type[C]], type[C]]:
        def add(cls: type[C]) -> type[C]:
            if name in self._classes:
                raise ValueError(f"{self.kind} '{name}' is registered already")
            cls.registered_name = name
            self._classes[name] = cls
            return cls

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __getitem__(self, name: str) -> type[C]:
        if name in self._classes:
            return self._classes[name]
        if ":" in name:
            return self._adopt(name, import_object(name))
        raise ConfigError(f"unknown {self.kind} '{name}'{did_you_mean(name, self)}", "name")

    def build(self, value: Any) -> C:
        """A component from its name, or from a mapping with ``name`` and its options."""
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise ConfigError(
                f"expected a name ({', '.join(sorted(self))}) or a mapping with 'name'"
            )
        options = {key: item for key, item in value.items() if key != "name"}
        return from_mapping(self[value["name"]], options)

    def _adopt(self, path: str, found: Any) -> type[C]:
        """A class found by import path, which it keeps, so that a run can resume."""
        if not (isinstance(found, type) and issubclass(found, Component)):
            raise ConfigError(f"'{path}' is not a {self.kind} class", "name")
        found.import_path = path
        found.registered_name = found.registered_name or found.__name__
        return found  # type: ignore[return-value]


def import_object(path: str) -> Any:
    """The object at ``module:attribute`` or ``file.py:attribute``."""
    module_name, _, attribute = path.rpartition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        from_file = module_name.endswith(".py")
        module = import_file(module_name) if from_file else importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError, SyntaxError, OSError) as error:
        raise ConfigError(f"cannot import '{module_name}': {error}", "name") from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        known = [name for name in vars(module) if not name.startswith("_")]
        hint = did_you_mean(attribute, known)
        raise ConfigError(f"'{module_name}' has no '{attribute}'{hint}", "name") from None


def import_file(path: str) -> ModuleType:
    """The module in a file, loaded once, under a name that cannot be another module's."""
    name = f"file:{os.path.abspath(path)}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None  # the name ends in .py
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
