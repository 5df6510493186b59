"""Paths that a user writes."""

from __future__ import annotations

from pathlib import Path

from perfed.core.errors import ConfigError, shown


def expanded(path: str | Path, where: str) -> Path:
    """``~`` and ``~user`` as folders."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = str(path).partition("/")[0]
        raise ConfigError(
            f"{shown(str(path))}: {user} is no user's home folder here", where
        ) from None
