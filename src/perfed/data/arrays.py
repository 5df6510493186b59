"""Arrays from .npy and .npz files that nobody vouches for.

What a file announces is held against what it has before memory is taken for it.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from numpy.lib import format as npy

from perfed.core.errors import DataError, shape_text, shown
from perfed.data.opening import open_file, reason

MOST_UNPACKED = 1 << 30
"""Bytes that any .npz file may unpack to, however small it is: CIFAR-10 as float32 is 0.7 GiB."""
MOST_RATIO = 20
"""A larger one may unpack to this many times its size. Images and measurements shrink by less than
10; a bomb grows by 200 and more."""
MOST_HEADER = 1 << 14
"""Bytes. numpy takes headers of 10,000; but it makes room for the 4 GiB that one may announce."""
PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes
ZIP_MAGIC = b"PK"
ENCRYPTED = 1  # a bit of a zip member's flags


def load_arrays(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    """The array of an .npy file, or those of an .npz file by name; the name says nothing."""
    try:
        with open_file(path) as file:
            start = file.read(len(npy.MAGIC_PREFIX))
            size = file.seek(0, 2)
            file.seek(0)
            if start == npy.MAGIC_PREFIX:
                return _array(file, size)
            if start.startswith(ZIP_MAGIC):
                return _members(file, size)
    except FileNotFoundError:
        raise DataError(f"no such file: {str(path)!r}") from None
    except DataError as error:
        text = str(error)
        raise DataError(text if str(path) in text else f"{path}: {text}") from None
    except Exception as error:  # a broken zip or header can fail in any way
        raise DataError(f"{path}: cannot be read: {reason(error)}") from None
    raise DataError(f"{path}: cannot be read: it is neither .npy nor .npz (numpy.savez)")


def _members(file: BinaryIO, size: int) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        _check_members(members, size)
        arrays = {}
        for member in members:
            with archive.open(member) as stream:
                if _is_array(stream, member.filename):
                    name = member.filename.removesuffix(".npy")
                    arrays[name] = _named_array(name, stream, member.file_size)
    return arrays


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    for member in members:
        if member.flag_bits & ENCRYPTED:
            raise DataError(f"{shown(member.filename)} is encrypted: save it without a password")
        if member.compress_type not in PACKINGS:
            raise DataError(
                f"{shown(member.filename)} is packed in a way that numpy does not write "
                f"(number {member.compress_type}): save it with numpy.savez"
            )
    unpacked = sum(member.file_size for member in members)  # no more than this is ever read
    most = max(MOST_UNPACKED, MOST_RATIO * size)
    if unpacked > most:
        raise DataError(
            f"{size:,} bytes that unpack to {unpacked:,}, at most {most:,} are allowed: "
            "if they are meant, save them unpacked (numpy.savez)"
        )


def _is_array(stream: IO[bytes], name: str) -> bool:
    start = stream.read(len(npy.MAGIC_PREFIX))
    stream.seek(0)
    if start != npy.MAGIC_PREFIX and name.endswith(".npy"):
        raise DataError(f"{shown(name)} in it is no array")
    return start == npy.MAGIC_PREFIX


def _named_array(name: str, stream: IO[bytes], size: int) -> np.ndarray:
    try:
        return _array(stream, size)
    except DataError as error:
        raise DataError(f"array {shown(name)}: {error}") from None
    except Exception as error:  # as above
        raise DataError(f"array {shown(name)} cannot be read: {reason(error)}") from None


def _array(stream: IO[bytes], size: int) -> np.ndarray:
    """The array of a stream of ``size`` bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a header of Python 2 is read as well as any
        _check_header(stream, size)
        stream.seek(0)
        return np.asarray(npy.read_array(stream, allow_pickle=False))


def _check_header(stream: IO[bytes], size: int) -> None:
    start = io.BytesIO(stream.read(MOST_HEADER))
    version = npy.read_magic(start)
    if version == (1, 0):
        shape, _, kind = npy.read_array_header_1_0(start)
    elif version == (2, 0):
        shape, _, kind = npy.read_array_header_2_0(start)
    else:  # numpy writes 3.0 for columns with names alone
        raise DataError(f"format {version[0]}.{version[1]}, must be 1.0 or 2.0: plain numbers")
    if kind.hasobject:
        raise DataError("holds Python objects, which are never loaded: save numbers")
    announced = math.prod(shape) * max(1, kind.itemsize)
    there = size - start.tell()
    if min(shape, default=0) < 0 or announced > there:
        raise DataError(
            f"announces {shape_text(shape) or 'one'} values of {kind} ({announced:,} bytes), "
            f"but {there:,} bytes follow"
        )
