"""Arrays as bytes, with as little as possible said of what both ends know.

An array is the number of its name in a list that both ends have, its type and its shape; then come
the numbers of all arrays. Whole numbers of more than one byte take as few bytes as they need, and
small ones as few bits as the largest needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from perfed.core.codecs.bits import bytes_for, packed
from perfed.core.errors import Refused
from perfed.core.tensorfile import MESSAGE

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
LONGEST_NUMBER = 10  # bytes, of 64 bits
AT_ONCE = 1 << 20  # a multiple of eight: pieces of bits then end with a byte


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
    heads = [_head(source, names) for _ in range(source.number(MESSAGE.entries))]
    if len({name for name, *_ in heads}) < len(heads):
        raise Refused("a name is there twice")
    if sum(math.prod(shape) * dtype.itemsize for _, dtype, _, shape in heads) > most:
        raise Refused(f"has more than {most} bytes, the most there can be")
    arrays = {n: _body(source, dtype, width, shape) for n, dtype, width, shape in heads}
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
        value = 0
        for place in range(LONGEST_NUMBER):
            byte = self.take(1)[0]
            value |= (byte & 127) << 7 * place
            if byte < 128 and value <= most:
                return value
            if byte < 128 or value > most:
                break
        raise Refused(f"a number that must be at most {most}")

    def numbers(self, count: int) -> np.ndarray:
        """So many of them at once, as uint64."""
        found = np.zeros(count, np.uint64)
        window = self._data[self._place : self._place + LONGEST_NUMBER * count]
        data = np.frombuffer(window, np.uint8)
        ends = np.flatnonzero(data < 128)[:count]
        if len(ends) < count:
            raise Refused("is cut off")
        starts = np.concatenate([[0], ends[:-1] + 1]) if count else ends
        lengths = ends - starts + 1
        if count and int(lengths.max()) > LONGEST_NUMBER:
            raise Refused("a number of too many bytes")
        for place in range(int(lengths.max(initial=0))):
            longer = lengths > place
            part = data[starts[longer] + place].astype(np.uint64) & np.uint64(127)
            found[longer] |= part << np.uint64(7 * place)
        self._place += int(ends[-1]) + 1 if count else 0
        return found

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
        return _pieced([_bits(source, width, few) for few in _few(count)], dtype).view(shape)
    if dtype in WHOLE:
        return _pieced([_whole(source, dtype, few) for few in _few(count)], dtype).view(shape)
    raw = bytearray(source.take(count * dtype.itemsize))
    values = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return values.view(shape)


def _few(count: int) -> Iterator[int]:
    """So many in all, some at a time: what stands between bytes and numbers is larger than both."""
    for start in range(0, count, AT_ONCE):
        yield min(AT_ONCE, count - start)


def _pieced(pieces: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(pieces)) if pieces else torch.empty(0, dtype=dtype)


def _bits(source: _Source, width: int, count: int) -> np.ndarray:
    """Bytes of ``width`` bits each."""
    data = np.frombuffer(source.take(bytes_for(count, width)), np.uint8)
    rows = np.zeros((count, 8), np.uint8)
    rows[:, 8 - width :] = np.unpackbits(data)[: count * width].reshape(count, width)
    found: np.ndarray = np.packbits(rows, axis=1)[:, 0]
    return found


def _whole(source: _Source, dtype: torch.dtype, count: int) -> np.ndarray:
    folded = source.numbers(count)
    if count and int(folded.max()) > 2 * torch.iinfo(dtype).max + 1:
        raise Refused(f"a number that must be at most {2 * torch.iinfo(dtype).max + 1}")
    half = (folded >> np.uint64(1)).astype(np.int64)
    found: np.ndarray = np.where(folded % np.uint64(2) == 1, -half - 1, half)
    return found.astype(str(dtype).removeprefix("torch."))


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _folded(value: int) -> int:
    """0, −1, 1, −2, … as 0, 1, 2, 3, …"""
    return 2 * value if value >= 0 else -2 * value - 1


def _text(name: str) -> bytes:
    data = name.encode()
    return _number(len(data)) + data
