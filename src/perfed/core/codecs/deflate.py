"""The whole message as one array of bytes, in the deflate format (zlib, in Python's own library).

What zlib finds repeated it sends once, and what is frequent in few bits. The names in a message are
given to both ends as a dictionary, so they cost next to nothing. It is the last stage of a link.

Deflated bytes can stand for a thousand times as many. So the receiver stops where the message would
be larger than one that is not coded (:func:`perfed.core.admission.most_bytes`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from perfed.core import tensorfile
from perfed.core.admission import most_bytes
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage, stages

NAME = "z"
RAW = -zlib.MAX_WBITS  # no header and no checksum: what carries the message has its own
STRATEGIES = (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)
WORDS = '{"dtype":"F32","I32","I16","I64","U8","shape":[10],"data_offsets":[0,1]},|range|which'


@stages.register("deflate")
@dataclass(frozen=True)
class Deflate(Stage):
    """The message as zlib makes it smaller, to the bit. The last stage, after the other codecs."""

    directions = ("up", "down")
    codes = True

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        whole, words = tensorfile.encode(message.arrays), _words(at)
        smallest = min((_deflated(whole, words, way) for way in STRATEGIES), key=len)
        device = next(iter(message.arrays.values())).device
        packed = torch.from_numpy(np.frombuffer(smallest, np.uint8).copy()).to(device)
        return Message.from_arrays({NAME: packed}), state

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        packed = message.arrays.get(NAME)
        if packed is None or len(message.arrays) != 1:
            raise Refused(f"must be one array, {NAME}")
        if packed.dtype != torch.uint8 or packed.ndim != 1:
            raise Refused(f"{tuple(packed.shape)} {packed.dtype}: must be bytes")
        most = most_bytes(at.declared, at.known)
        inflate = zlib.decompressobj(RAW, zdict=_words(at))
        try:
            whole = inflate.decompress(packed.cpu().numpy().tobytes(), most)
        except zlib.error as error:
            raise Refused(f"cannot be inflated: {error}") from None
        if not inflate.eof or inflate.unused_data:
            raise Refused(f"is cut off, or has more than {most} bytes, the most there can be")
        arrays, _ = tensorfile.decode(whole, tensorfile.MESSAGE)
        return Message.from_arrays({n: t.to(packed.device) for n, t in arrays.items()}), state


def _deflated(data: bytes, words: bytes, strategy: int) -> bytes:
    made = zlib.compressobj(9, zlib.DEFLATED, RAW, zlib.DEF_MEM_LEVEL, strategy, words)
    return made.compress(data) + made.flush()


def _words(at: At) -> bytes:
    """What both ends know to be in the message."""
    names: Any = at.declared or ()
    return f"{WORDS}{','.join(names)}".encode()
