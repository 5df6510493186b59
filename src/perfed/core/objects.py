"""Where an object of a user's own is found again: by import path, by file, or by a given name.

A configuration is plain text, so that a run directory can say what was run. A class or function
that can be imported goes by ``package.module:Name`` or ``file.py:Name``. Anything else given in
Python (a built module, a dataset, a class typed into a notebook) gets a name with a hash of what it
is. Such a name holds in this process; after the same object has been given again, in any.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import operator
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import ModuleType
from typing import Any

from perfed.core.errors import ConfigError, did_you_mean, shown
from perfed.core.notices import say_once

PATIENCE = 10.0  # seconds that an import takes until a line says so
GIVEN, FILE = "object:", "file:"
_given: dict[str, Any] = {}
_places: dict[str, str] = {}


def import_object(path: str) -> Any:
    """The object at ``module:attribute`` or ``file.py:attribute``, or given under this name."""
    if path.startswith(GIVEN):
        return _find_given(path)
    module_name, _, attribute = path.rpartition(":")
    module = import_module(module_name)
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        known = [name for name in vars(module) if not name.startswith("_")]
        hint = did_you_mean(attribute, known)
        raise ConfigError(f"'{module_name}' has no '{attribute}'{hint}", "name") from None


def import_module(name: str) -> ModuleType:
    """``package.module``, found also in the working directory, or ``file.py``."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with _saying_if_long(name):
            return import_file(name) if name.endswith(".py") else importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever a user's own file raises
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            reason = f"it ends Python (sys.exit({shown(error.code)})): a file to import must not"
        elif isinstance(error, ImportError):
            reason = str(error)
            if isinstance(error, ModuleNotFoundError) and error.name == name.split(".")[0]:
                reason += "; start where that file is, or add its folder to PYTHONPATH"
        elif name.endswith(".py") and not os.path.exists(_places.get(name, name)):
            reason = "there is no such file"
        raise ConfigError(f"cannot import '{name}': {reason}", "name") from None


@contextmanager
def _saying_if_long(name: str) -> Iterator[None]:
    """A file that waits for something, or computes, would look as if perfed hung."""
    line = f"still importing '{name}', after {PATIENCE:g} seconds: it must not wait or compute"
    timer = threading.Timer(PATIENCE, say_once, [line])
    timer.daemon = True  # Ctrl-C need not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def import_file(path: str) -> ModuleType:
    """The module in a file, loaded once, under a name that cannot be another module's."""
    path = os.path.abspath(_places.get(path, path))
    name = FILE + path
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


def import_path(value: Any) -> str:
    """How a class or function can be imported; empty where it cannot."""
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if not module or module in ("__main__", "builtins") or not name or "<" in name:
        return ""
    try:
        found = operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return ""
    return f"{module.removeprefix(FILE)}:{name}" if found is value else ""


def path_or_name(value: Any) -> str:
    """The import path of a class or function, or else a name for it as it is written."""
    return import_path(value) or give(value, _kind(value), *map(str.encode, _written(value)))


def give(value: Any, kind: str, *content: bytes) -> str:
    """A name for an object, by its kind and content, under which it is then found."""
    digest = blake2b(digest_size=6)
    for piece in content:
        digest.update(piece)
    name = f"{GIVEN}{kind}-{digest.hexdigest()}"
    _given[name] = value
    return name


def give_again(name: str, value: Any) -> None:
    """Have an object under the name it was given elsewhere."""
    _given[name] = value


def whereabouts(path: str) -> tuple[str, str]:
    """For another process, with a working directory of its own: a file, and where it is."""
    module = path.rpartition(":")[0]
    return (module, os.path.abspath(module)) if module.endswith(".py") else ("", "")


def tell_whereabouts(file: str, place: str) -> None:
    """Where a file is that goes by the name it has in another process."""
    if file:
        _places[file] = place


def _find_given(name: str) -> Any:
    try:
        return _given[name]
    except KeyError:
        raise ConfigError(
            f"'{name.removeprefix(GIVEN)}' was given as an object, in another Python process: give "
            "it again there (perfed.Experiment), or name it by import path (file.py:Name)"
        ) from None


def _kind(value: Any) -> str:
    name = str(getattr(value, "__name__", type(value).__name__))
    return "".join(c for c in name if c.isalnum() or c == "_")


def _written(value: Any) -> list[str]:
    """What tells a function or class from others: its source, and what it has been bound to."""
    if isinstance(value, functools.partial):
        return [*_written(value.func), repr(value.args), repr(value.keywords)]
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError):
        source = repr(value)
    cells = getattr(value, "__closure__", None) or ()
    bound = [repr(cell.cell_contents) for cell in cells]
    return [source, repr(getattr(value, "__defaults__", None)), *bound]
