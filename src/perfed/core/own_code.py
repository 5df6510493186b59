"""A user's own algorithm that fails: where in their file, in one line, and what it must do."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfed.core.errors import ConfigError, PerfedError, cut

RETURNS = {
    "start": "a state",
    "first_message": "a Message",
    "broadcast": "a Message",
    "client_round": "a Message",
    "speak": "a Message",
    "merge": "a state",
    "describe": "finite numbers and lists of them, by name",
    "evaluation_message": "a Message",
    "models": "models by kind, as {'personal': client.weights}",
}
"""What each hook of an algorithm must return."""


@contextmanager
def running(algorithm: Any, hook: str) -> Iterator[None]:
    """Around a hook: what a user's own code raises there becomes one line. What perfed's own
    methods raise stays as it is, and so does a lack of memory."""
    try:
        yield
    except ConfigError as error:  # said by perfed, of what the code handed to it
        raise ConfigError(f"{_place(error, _file(algorithm))}{error}") from error
    except (PerfedError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        own = _file(algorithm)
        if not own or "can't allocate memory" in str(error):
            raise
        raise ConfigError(
            f"{_place(error, own)}{hook} of '{algorithm.registered_name}' raised "
            f"{type(error).__name__}: {cut(' '.join(str(error).split()))}; it must return "
            f"{RETURNS[hook]}"
        ) from error


@contextmanager
def objective_with(public: Any) -> Iterator[None]:
    """Around an objective: one that looks at a public mini-batch which it does not get is told
    why, wherever it runs."""
    try:
        yield
    except AttributeError as error:
        if public is not None or error.obj is not None or error.name not in ("x", "index"):
            raise
        raise ConfigError(
            "the objective asks for public samples, and gets none: the algorithm's class must say "
            "trains_on_public_set = True",
            "algorithm",
        ) from error


def wrong_return(algorithm: Any, hook: str, found: Any) -> ConfigError:
    """For what a hook has returned that is of no use."""
    return ConfigError(
        f"{_definition(algorithm, hook)}{hook} of '{algorithm.registered_name}' returned "
        f"{type(found).__name__}: must be {RETURNS[hook]}"
    )


def _file(algorithm: Any) -> str:
    """Where the class is written; empty where it is perfed's own or cannot be known."""
    if type(algorithm).__module__.partition(".")[0] == "perfed":
        return ""
    try:
        return inspect.getfile(type(algorithm))
    except (OSError, TypeError):  # typed into a session
        return "<unknown>"


def _place(error: BaseException, file: str) -> str:
    """The innermost line of the file on the way to the error."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f"{file}, line {lines[-1]}: " if lines else ""


def _definition(algorithm: Any, hook: str) -> str:
    code = getattr(getattr(type(algorithm), hook), "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}: " if code and _file(algorithm) else ""
