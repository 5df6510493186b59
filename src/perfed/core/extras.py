"""Libraries that only some commands need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from perfed.core.errors import ConfigError


def needed(module: str, extra: str, where: str) -> Any:
    """Import ``module``, or say in one line how it is had."""
    try:
        return import_module(module)
    except ImportError as error:
        absent = error.name or module
        raise ConfigError(
            f"{absent} is not installed: pip install 'perfed[{extra}]'", where
        ) from None
