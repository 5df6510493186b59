"""The whole message as one array of bytes, in the deflate format (zlib, in Python's own library).

What zlib finds repeated it sends once, and what is frequent in few bits. Names that both ends know
are not sent (:mod:`.terse`). What would not become smaller stays as it is. It is the last stage of
a link.

Deflated bytes can stand for a thousand times as many. So the receiver stops where the message would
be larger than one that is not coded (:func:`perfed.core.admission.most_bytes`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch

from perfed.core.admission import most_bytes
from perfed.core.codecs import terse
from perfed.core.codecs.cached import FORM, NUMBERS, TERMS, WHICH
from perfed.core.codecs.number_bits import RANGE
from perfed.core.codecs.probabilities import LEVELS
from perfed.core.codecs.top_changes import GAPS
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.tensorfile import BYTES
from perfed.core.tree import Tree, escaped
from perfed.core.wire import At, Stage, stages

RAW = -zlib.MAX_WBITS  # no header and no checksum: what carries the message has its own
STRATEGIES = (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)
AS_IT_IS, DEFLATED = b"\0", b"\1"
CODES = ("", RANGE, TERMS, FORM, WHICH, LEVELS, GAPS)
"""What codecs add to a name that a method has declared."""


@stages.register("deflate")
@dataclass(frozen=True)
class Deflate(Stage):
    """Compresses the message with zlib, without loss. The last stage, after the other codecs."""

    directions = ("up", "down")
    codes = True

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays, names = message.arrays, _names(at)
        whole = terse.written(arrays, names, pack=False)
        found = [AS_IT_IS + terse.written(arrays, names, pack=True)]
        found += [DEFLATED + _deflated(whole, way) for way in STRATEGIES]
        device = next(iter(message.arrays.values())).device
        smallest = np.frombuffer(min(found, key=len), np.uint8).copy()
        return Message.from_arrays({BYTES: torch.from_numpy(smallest).to(device)}), state

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        packed = message.arrays.get(BYTES)
        if packed is None or len(message.arrays) != 1:
            raise Refused(f"must be one array, {BYTES}")
        if packed.dtype != torch.uint8 or packed.ndim != 1:
            raise Refused(f"{tuple(packed.shape)} {packed.dtype}: must be bytes")
        data, most = packed.cpu().numpy().tobytes(), most_bytes(at.declared, at.known)
        if data[:1] not in (AS_IT_IS, DEFLATED):
            raise Refused("must say whether it is deflated")
        whole = data[1:] if data[:1] == AS_IT_IS else _inflated(data[1:], most)
        arrays = terse.read(whole, _names(at), most)
        return Message.from_arrays({n: t.to(packed.device) for n, t in arrays.items()}), state


def _deflated(data: bytes, strategy: int) -> bytes:
    made = zlib.compressobj(9, zlib.DEFLATED, RAW, zlib.DEF_MEM_LEVEL, strategy)
    return made.compress(data) + made.flush()


def _inflated(data: bytes, most: int) -> bytes:
    inflate = zlib.decompressobj(RAW)
    try:
        whole = inflate.decompress(data, most)
    except zlib.error as error:
        raise Refused(f"cannot be inflated: {error}") from None
    if not inflate.eof or inflate.unused_data:
        raise Refused(f"is cut off, or has more than {most} bytes, the most there can be")
    return whole


def _names(at: At) -> list[str]:
    """Those that both ends know."""
    return [NUMBERS, *(escaped(name) + code for code in CODES for name in at.declared or ())]
