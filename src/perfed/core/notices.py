"""Notices: messages for the user that are not errors."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("perfed")


@functools.cache
def say_once(line: str) -> None:
    """Log a line, once in a process: the runs of a comparison would all say it."""
    log.warning("%s", line)
