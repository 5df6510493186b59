"""What a user should know and no error is."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("perfed")


@functools.cache
def say_once(line: str) -> None:
    """Once in a process: a comparison loads its data, and asks its clients, for every run."""
    log.warning("%s", line)
