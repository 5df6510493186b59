"""How every file of data is opened: a file, and nothing that could make a reader wait."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from perfed.core.errors import DataError


def open_file(path: Path) -> BufferedReader:
    """``path`` for reading, if it is a regular file or a link to one.

    It is looked at only when it is open, so that nobody can exchange it in between. Without
    O_NONBLOCK, opening a pipe waits until somebody writes to it.
    """
    file = os.fdopen(_descriptor(path), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DataError(f"{path} is no file that can be read, but a pipe or a device")
    return file


def _descriptor(path: Path) -> int:
    if path.is_dir():  # a folder can be opened, but not as a file
        raise DataError(f"{path} is a folder, must be a file")
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def file_content(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def reason(error: BaseException) -> str:
    """What a library says of a file, in one line of bearable length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:199]}…"
