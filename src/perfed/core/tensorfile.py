"""Tensors in the safetensors format: for checkpoints, final models, and as the wire encoding.

The format is a length, a JSON header and raw bytes. Writing those here, rather than requiring the
safetensors package, lets a run be saved and resumed where only torch and numpy are installed;
the tests check both directions against that package.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfed.core.errors import RunError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Piece = bytes | memoryview
_FROM_NAME = {name: dtype for dtype, name in _DTYPES.items()}
SEAL = "sha256"  # the name of a checksum in a file's metadata
ABOUT = "perfed"  # and of what the file says of itself
BYTES = "z"  # the name of a message's only array, if it is bytes
MARK = b"\x01"
"""How a message that is bytes alone begins. Any other begins with a header's length, a multiple of
eight."""
MALFORMED = (ValueError, KeyError, TypeError, RuntimeError)
"""What :func:`decode` raises where the bytes are not a whole file."""


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # the format asks for aligned data


def encoded_size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of :func:`encode_message`, without making it; no tensors are no message."""
    if not tensors:
        return 0
    if _is_bytes(tensors):
        return len(MARK) + tensors[BYTES].numel()
    return _encoded_size(tuple((name, t.dtype, t.shape) for name, t in tensors.items()))


@functools.lru_cache(maxsize=256)  # a broadcast is of one size for thousands of clients
def _encoded_size(content: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> int:
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in content
    }
    return 8 + len(_header(tensors, {})) + sum(tensor.nbytes for tensor in tensors.values())


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    return b"".join(_pieces(tensors, metadata or {}))


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[Piece]:
    header = _header(tensors, metadata)
    return [len(header).to_bytes(8, "little"), header, *map(_raw, tensors.values())]


def _is_bytes(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a message is nothing but bytes by the name that codecs give them."""
    only = tensors.get(BYTES)
    return len(tensors) == 1 and only is not None and (only.dtype, only.ndim) == (torch.uint8, 1)


def encode_message(tensors: Mapping[str, Tensor]) -> bytes:
    """As :func:`encode`; but bytes alone need no header, only a mark."""
    return b"".join([MARK, _raw(tensors[BYTES])]) if _is_bytes(tensors) else encode(tensors)


def decode_message(data: bytes) -> dict[str, Tensor]:
    """Raises one of ``MALFORMED``."""
    if data.startswith(MARK):
        raw = bytearray(data[len(MARK) :])
        empty = torch.empty(0, dtype=torch.uint8)
        return {BYTES: torch.frombuffer(raw, dtype=torch.uint8) if raw else empty}
    return decode(data, MESSAGE)[0]


def _raw(tensor: Tensor) -> Piece:
    """A tensor's bytes where they are; copied only from another device, or to put them in order."""
    if tensor.numel() == 0:
        return b""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class Limits(NamedTuple):
    """How much a header may ask for before anything is made from it."""

    header: int
    """Bytes."""
    entries: int
    dimensions: int


FILE = Limits(header=100 * 2**20, entries=2**20, dimensions=64)
"""Of a file: a server may remember many clients. The format itself allows 100 MB of header."""
MESSAGE = Limits(header=2**24, entries=2**16, dimensions=16)
"""Of what comes over a network: some models, of up to a thousand tensors each."""


def decode(data: bytes, limits: Limits = FILE) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata. Raises one of ``MALFORMED``.

    Every byte after the header belongs to one tensor: what is made is never larger than ``data``.
    """
    length = int.from_bytes(data[:8], "little")
    if length > limits.header:
        raise ValueError(f"a header of {length} bytes: must be at most {limits.header}")
    if len(data) < 8 + length:
        raise ValueError("the header is cut off")
    header = json.loads(data[8 : 8 + length], object_pairs_hook=_without_repeats)
    if not isinstance(header, dict):
        raise ValueError(f"the header is a {type(header).__name__}, not names and what they hold")
    "".join(header).encode()  # a name is text: no half of a character, which JSON lets pass
    metadata = _text(header.pop("__metadata__", {}))
    if len(header) > limits.entries:
        raise ValueError(f"{len(header)} tensors: must be at most {limits.entries}")
    payload = memoryview(data)[8 + length :]
    tensors, place = {}, 0
    for name, entry in header.items():
        dtype, shape = _FROM_NAME[entry["dtype"]], _shape(name, entry["shape"], limits)
        end = place + math.prod(shape) * dtype.itemsize
        if entry["data_offsets"] != [place, end]:
            raise ValueError(
                f"the data of {name!r} is at {entry['data_offsets']}, not at its place"
            )
        if end > len(payload):
            raise ValueError(f"the data of {name!r} is cut off")
        raw = bytearray(payload[place:end])  # a copy of its own: the tensor may be written to
        values = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        tensors[name] = values.reshape(shape)
        place = end
    if place != len(payload):
        raise ValueError(f"{len(payload) - place} bytes after the last tensor")
    return tensors, metadata


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is there twice")
    return values


def _text(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("the metadata is not text")
    return metadata


def _shape(name: str, shape: Any, limits: Limits) -> list[int]:
    if not isinstance(shape, list) or len(shape) > limits.dimensions:
        raise ValueError(f"the shape of {name!r} is not one")
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):  # True is no size
        raise ValueError(f"the shape of {name!r} is not one")
    return shape


def sealed(tensors: Mapping[str, Tensor], about: str = "") -> tuple[bytes, str]:
    """The encoding with a checksum of names, shapes, numbers and of what the file says ``about``
    itself, and that checksum. Other programs read the file as any other; :func:`load` verifies
    it."""
    checksum = _checksum(tensors, about)
    said = {ABOUT: about} if about else {}
    return encode(tensors, {SEAL: checksum, **said}), checksum


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    found = hashlib.sha256(_header(tensors, {}))
    for tensor in tensors.values():
        found.update(_raw(tensor))
    found.update(about.encode())
    return found.hexdigest()


def save(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write atomically; returns the checksum that :func:`load` can verify."""
    pieces = _pieces(tensors, {})  # not as one: a checkpoint of large models has gigabytes
    write_atomically(path, *pieces)
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def load(path: Path, checksum: int | None = None) -> dict[str, Tensor]:
    """Read a file that :func:`save` or the safetensors package wrote."""
    return load_described(path, checksum)[0]


def load_described(path: Path, checksum: int | None = None) -> tuple[dict[str, Tensor], str]:
    """The same, and what a file of :func:`sealed` says about itself."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    if checksum is not None and zlib.crc32(data) != checksum:
        raise RunError(f"{path} is corrupt: its checksum is not the recorded one")
    try:
        return unsealed(data)
    except MALFORMED as error:
        raise RunError(f"{path} is corrupt: {error}") from None


def unsealed(data: bytes) -> tuple[dict[str, Tensor], str]:
    """Undo :func:`sealed`; raises one of ``MALFORMED`` where the checksum does not fit."""
    tensors, metadata = decode(data)
    about = metadata.get(ABOUT, "")
    if SEAL in metadata and metadata[SEAL] != _checksum(tensors, about):
        raise ValueError("its checksum is not that of its content")
    return tensors, about


def write_atomically(path: Path, *pieces: Piece, mode: int = 0o666) -> None:
    """A reader, or a machine that loses power, sees the old file or the new one, never a part.
    ``mode`` says who may read it, from its first byte on."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.unlink(missing_ok=True)  # what was interrupted may be open to others
        with open(temporary, "wb", opener=functools.partial(os.open, mode=mode)) as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:  # a part of a file would fill a full disk for good
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Its names are on the disk as its files are; Windows opens no folder, and has no such call."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
