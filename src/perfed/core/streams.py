"""Randomness that is addressed, not consumed.

Every draw comes from a stream named by (seed, purpose, client, round). Nothing that happens
elsewhere (the order of clients, another client dropping out, a resume, the engine) can move it.

Mini-batches need many draws, on any device, the same everywhere. They come from a counter-based
generator (SplitMix64) written in integer tensor operations: draw number *i* of a stream is a pure
function of the stream's key and *i*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor


def stream_key(seed: int, purpose: str, client: int = -1, round: int = -1) -> int:
    """The 63-bit key of a stream."""
    address = f"{seed}|{purpose}|{client}|{round}".encode()
    return int.from_bytes(blake2b(address, digest_size=8).digest(), "little") >> 1


def numpy_stream(seed: int, purpose: str, client: int = -1, round: int = -1) -> np.random.Generator:
    """A NumPy generator for the stream."""
    return np.random.default_rng(stream_key(seed, purpose, client, round))


@contextmanager
def torch_stream(seed: int, purpose: str, client: int = -1, round: int = -1) -> Iterator[None]:
    """Inside, torch's global generators (dropout, initialisation) are this stream."""
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    with torch.random.fork_rng(devices=devices):
        seed_generators(stream_key(seed, purpose, client, round))
        yield


def seed_generators(key: int) -> None:
    """``torch.manual_seed``, which without a GPU notes every call for later, with its stack."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(key)


def uniform_indices(key: int, shape: tuple[int, ...], bound: int, device: torch.device) -> Tensor:
    """Independent uniform draws from ``0 … bound-1`` (with replacement), on ``device``."""
    both = torch.tensor([[key], [bound]], dtype=torch.int64).to(device)
    return uniform_indices_of(both[0], shape, both[1])[0]


def uniform_indices_of(keys: Tensor, shape: tuple[int, ...], bounds: Tensor) -> Tensor:
    """Those of several streams, one after another along the first dimension; keys and bounds are
    on the device."""
    bits = random_bits(keys, math.prod(shape))
    # The modulo's bias is below bound / 2**63.
    return (bits % bounds[:, None]).reshape(len(keys), *shape)


def random_bits(keys: Tensor, count: int) -> Tensor:
    """``count`` draws of each stream, of 63 bits, along a new last dimension."""
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=keys.device)
    return _mixed(keys[..., None] + counter.mul_(_GOLDEN)).bitwise_and_(_MASK_63)


def gaussian(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """Standard normal draws of each stream, by Box and Muller, in double precision."""
    count = math.prod(shape)
    bits = random_bits(keys, 2 * count) >> (BITS - 53)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-53
    radius = (-2 * uniform[..., :count].log()).sqrt()
    draws = radius * (2 * math.pi * uniform[..., count:]).cos()
    return draws.view(*keys.shape, *shape)


def chosen_each(key: int, steps: int, count: int, chance: float, device: torch.device) -> Tensor:
    """Whether each of ``count`` samples is in each step, (steps, count): each with this chance,
    whatever becomes of the others."""
    bits = random_bits(torch.tensor(key, device=device), steps * count).view(steps, count)
    chosen: Tensor = bits < min(int(chance * 2**BITS), 2**BITS - 1)
    return chosen


def substream(keys: Tensor, number: int) -> Tensor:
    """The keys of one of many streams inside each of these."""
    return _mixed(keys + _signed(number * _GOLDEN % (1 << 64)))


def shuffled_indices(key: int, count: int, bound: int, device: torch.device) -> Tensor:
    """``count`` draws from ``0 … bound-1`` without replacement: all of them in a random order, then
    all again in another, as often as it takes."""
    passes = -(-count // bound)
    counter = torch.arange(1, passes * bound + 1, dtype=torch.int64, device=device)
    values = _mixed(key + counter * _GOLDEN).view(passes, bound)
    order: Tensor = values.argsort(dim=1, stable=True)
    return order.flatten()[:count]


def _signed(value: int) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits; products wrap around alike."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
BITS = 63
_MASK_63 = (1 << BITS) - 1


def _folded(z: Tensor, bits: int) -> Tensor:
    """``z`` with its own bits, shifted to the right, laid over it."""
    shifted = (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)  # without copies of the sign bit
    return shifted.bitwise_xor_(z)


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's finaliser: every bit of the result depends on every bit of ``z``."""
    z = _folded(z, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    z = _folded(z, 27).mul_(_signed(0x94D049BB133111EB))
    return _folded(z, 31)
