"""Tensors in the safetensors format: for checkpoints, final models, and as the wire encoding.

The format is a length, a JSON header and raw bytes. Writing those here, rather than requiring the
safetensors package, lets a run be saved and resumed where only torch and numpy are installed;
the tests check both directions against that package.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

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
_FROM_NAME = {name: dtype for dtype, name in _DTYPES.items()}
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
    """Bytes of the encoding, without making it; no tensors are no message."""
    if not tensors:
        return 0
    payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return 8 + len(_header(tensors, {})) + payload


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    header = _header(tensors, metadata or {})
    return b"".join([len(header).to_bytes(8, "little"), header, *map(_raw, tensors.values())])


def _raw(tensor: Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def decode(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata. Raises one of ``MALFORMED``."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length:
        raise ValueError("the header is cut off")
    header = json.loads(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError(f"the header is a {type(header).__name__}, not names and what they hold")
    "".join(header).encode()  # a name is text: no half of a character, which JSON lets pass
    metadata = header.pop("__metadata__", {})
    payload = memoryview(data)[8 + length :]
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        if end > len(payload):
            raise ValueError(f"the data of {name!r} is cut off")
        dtype = _FROM_NAME[entry["dtype"]]
        raw = bytearray(payload[start:end])  # a copy of its own: the tensor may be written to
        values = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        tensors[name] = values.reshape(entry["shape"])
    return tensors, metadata


def save(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write atomically; returns the checksum that :func:`load` can verify."""
    data = encode(tensors)
    write_atomically(path, data)
    return zlib.crc32(data)


def load(path: Path, checksum: int | None = None) -> dict[str, Tensor]:
    """Read a file that :func:`save` or the safetensors package wrote."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    if checksum is not None and zlib.crc32(data) != checksum:
        raise RunError(f"{path} is corrupt: its checksum is not the recorded one")
    try:
        return decode(data)[0]
    except MALFORMED as error:
        raise RunError(f"{path} is corrupt: {error}") from None


def write_atomically(path: Path, data: bytes) -> None:
    """A reader, or a machine that loses power, sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:  # a part of a file would fill a full disk for good
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Its names are on the disk as its files are."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
