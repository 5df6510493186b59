"""What takes the place of something that a peer asks for and that is not here."""

from __future__ import annotations
import __future__

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn, cast

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


class DeferredAnnotations(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        flag = __future__.annotations.compiler_flag
        return cast(CodeType, compile(data, path, "exec", flag, dont_inherit=True))


class DeferredPackage(MetaPathFinder):
    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.partition(".")[0] == self.name else None
        if spec is not None and spec.origin is not None:
            spec.loader = DeferredAnnotations(name, spec.origin)
        return spec


def defer_annotations(package: str) -> None:
    """Read annotations of this package only when they are asked for, as Python 3.14 does."""
    sys.meta_path.insert(0, DeferredPackage(package))
    SAID.append("Python 3.14, by deferring annotations in an older one")
