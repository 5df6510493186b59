"""Arrays as bytes, with as little as possible said of what both ends know.

An array is the number of its name in a list that both ends have, its type and its shape; then come
the numbers of all arrays. Whole numbers of more than one byte take as few bytes as they need, and
small ones as few bits as the largest needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from perfed.core.codecs.bits import bytes_for, packed, unpacked
from perfed.core.errors import Refused

TYPES = (
    torch.uint8,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
WHOLE = (torch.int16, torch.int32, torch.int64)
MOST_DIMENSIONS = 16
LONGEST_NAME = 1000


def written(arrays: Mapping[str, Tensor], names: Sequence[str], pack: bool) -> bytes:
    """``pack``: small whole numbers in bits. What is to be deflated is better left in bytes."""
    head, body = bytearray(), bytearray()
    for name, values in arrays.items():
        known = names.index(name) + 1 if name in names else 0
        head += _number(known) + (b"" if known else _text(name))
        flat = values.detach().cpu().contiguous().reshape(-1)
        width = 8
        if pack and values.dtype == torch.uint8 and values.numel():
            width = max(1, int(flat.max()).bit_length())
        head += _number(8 * TYPES.index(values.dtype) + width - 1)
        head += _number(values.ndim) + b"".join(map(_number, values.shape))
        if width < 8:
            body += packed(flat, width).numpy().tobytes()
        elif values.dtype in WHOLE:
            body += b"".join(_number(_folded(value)) for value in flat.tolist())
        elif values.numel():
            body += flat.view(torch.uint8).numpy().tobytes()
    return _number(len(arrays)) + bytes(head + body)


def read(data: bytes, names: Sequence[str], most: int) -> dict[str, Tensor]:
    """Raises Refused where the bytes are not all of such arrays, or of more than ``most`` bytes."""
    source = _Source(data)
    heads = [_head(source, names) for _ in range(source.number(len(data)))]
    if sum(math.prod(shape) * dtype.itemsize for _, dtype, _, shape in heads) > most:
        raise Refused(f"has more than {most} bytes, the most there can be")
    arrays = {n: _body(source, dtype, width, shape) for n, dtype, width, shape in heads}
    if len(arrays) < len(heads):
        raise Refused("a name is there twice")
    source.end()
    return arrays


class _Source:
    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def take(self, count: int) -> bytes:
        found = self._data[self._place : self._place + count]
        if len(found) < count:
            raise Refused("is cut off")
        self._place += count
        return found

    def number(self, most: int) -> int:
        """Seven bits a byte, the lowest first; all but the last are above 127."""
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if value > most:
                raise Refused(f"{value}: must be at most {most}")
            if byte < 128:
                return value

    def end(self) -> None:
        if self._place < len(self._data):
            raise Refused("has bytes after its last array")


def _head(source: _Source, names: Sequence[str]) -> tuple[str, torch.dtype, int, list[int]]:
    known = source.number(len(names))
    name = names[known - 1] if known else source.take(source.number(LONGEST_NAME)).decode()
    dtype, width = divmod(source.number(8 * len(TYPES) - 1), 8)
    if dtype and width < 7:
        raise Refused("only bytes can be packed in bits")
    shape = [source.number(2**40) for _ in range(source.number(MOST_DIMENSIONS))]
    return name, TYPES[dtype], width + 1, shape


def _body(source: _Source, dtype: torch.dtype, width: int, shape: list[int]) -> Tensor:
    count = math.prod(shape)
    if width < 8:
        data = torch.tensor([*source.take(bytes_for(count, width))], dtype=torch.uint8)
        return unpacked(data, width, count).to(dtype).view(shape)
    if dtype in WHOLE:
        most = 2 * torch.iinfo(dtype).max + 1
        found = [_unfolded(source.number(most)) for _ in range(count)]
        return torch.tensor(found, dtype=dtype).view(shape)
    raw = bytearray(source.take(count * dtype.itemsize))
    values = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return values.view(shape)


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _folded(value: int) -> int:
    """0, −1, 1, −2, … as 0, 1, 2, 3, …"""
    return 2 * value if value >= 0 else -2 * value - 1


def _unfolded(value: int) -> int:
    return -(value + 1) // 2 if value % 2 else value // 2


def _text(name: str) -> bytes:
    data = name.encode()
    return _number(len(data)) + data
