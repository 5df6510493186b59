import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfed.core.streams import numpy_stream, stream_key, uniform_indices

CPU = torch.device("cpu")


def splitmix64_reference(key: int, count: int) -> list[int]:
    """Steele, Lea and Flood's generator in Python's unbounded integers."""
    mask, draws = (1 << 64) - 1, []
    for i in range(1, count + 1):
        z = (key + i * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        draws.append(z ^ (z >> 31))
    return draws


@given(key=st.integers(0, 2**63 - 1), bound=st.integers(1, 10**6))
def test_draws_are_splitmix64(key: int, bound: int) -> None:
    expected = [(z & (2**63 - 1)) % bound for z in splitmix64_reference(key, 6)]
    assert uniform_indices(key, (2, 3), bound, CPU).flatten().tolist() == expected


def test_draws_are_uniform_and_without_memory() -> None:
    draws = uniform_indices(stream_key(0, "test"), (200_000,), 10, CPU).numpy()
    counts = np.bincount(draws, minlength=10)
    chi_squared = ((counts - 20_000) ** 2 / 20_000).sum()
    assert chi_squared < 27.9  # 99.9 % quantile with 9 degrees of freedom
    pairs = np.bincount(draws[:-1] * 10 + draws[1:], minlength=100)
    assert ((pairs - 2000) ** 2 / 2000).sum() < 149  # 99.9 % with 99


def test_every_part_of_the_address_matters() -> None:
    addresses = [
        (seed, purpose, client, round)
        for seed in (0, 1)
        for purpose in ("a", "b")
        for client in (-1, 0, 11)
        for round in (-1, 1, 111)
    ]
    assert len({stream_key(*address) for address in addresses}) == len(addresses)


def test_a_stream_starts_anew_each_time() -> None:
    first, second = (numpy_stream(3, "x", 1, 2).random(4) for _ in range(2))
    assert (first == second).all()
