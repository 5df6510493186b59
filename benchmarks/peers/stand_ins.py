"""What takes the place of packages that are not installed and that a work does not use."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

SAID: list[str] = []  # a sentence for each, for the record


class Unused:
    """A name of an absent package: it can be imported and annotated with, not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Unused:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unused(f"{self._name}.{name}")

    def __call__(self, *said: object, **more: object) -> NoReturn:
        raise RuntimeError(f"{self._name} is used, and its package is not installed")


class Absent(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(Unused(self.__name__), name)


class AbsentPackages(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        known = name.partition(".")[0] in self.names
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for(*names: str) -> None:
    """Let these packages be imported where they are absent. Whoever uses one is told."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        sys.meta_path.append(AbsentPackages(absent))
        SAID.append(f"{', '.join(absent)}, imported but not used")
