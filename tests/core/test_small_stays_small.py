"""Messages of a few hundred bytes that would become large, or take long, at who reads them."""

import tracemalloc

import pytest
import torch

from perfed.core.admission import most_bytes
from perfed.core.codecs import terse
from perfed.core.codecs.cached import FORM, NUMBERS, TERMS
from perfed.core.codecs.deflate import Deflate
from perfed.core.declaration import PROBABILITIES, Array, Known
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.tensorfile import encode_message
from perfed.core.wire import At, Link, stages

DECLARED = {"s": Array(("P", "N"), PROBABILITIES)}


def known(classes: int) -> Known:
    return Known({"P": 2000, "N": classes}, 100, lambda name: {})


def received(link: list, arrays: dict[str, torch.Tensor], classes: int) -> int:
    """The most memory that reading takes, in bytes; the message must be refused."""
    wire = Link(tuple(stages.build(one) for one in [*link, "deflate"]), seed=1)
    at = At(1, 1, 0, "up", len(link), DECLARED, known(classes))
    sent, _ = Deflate().send(Message.from_arrays(arrays), at, {})
    assert len(encode_message(sent.arrays)) < 3000
    tracemalloc.start()
    try:
        with pytest.raises(Refused):
            wire.receive(sent, 1, 0, "up", {}, DECLARED, known(classes))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_many_arrays_share_the_room_that_a_message_has() -> None:
    rows = most_bytes(DECLARED, known(10)) // 40
    arrays = {NUMBERS: torch.zeros(2, dtype=torch.int32)}
    for number in range(200):
        arrays[f"s/{number}{TERMS}"] = torch.zeros(0, dtype=torch.uint8)
        arrays[f"s/{number}{FORM}"] = torch.tensor([31, rows, 10], dtype=torch.int32)
    assert received([{"name": "probability-bits", "bits": 2}, "cached"], arrays, 10) < 50e6


@pytest.mark.parametrize("link", [{"name": "probability-bits", "bits": 1}, "top-probabilities"])
def test_rows_in_a_byte_are_counted_as_the_numbers_they_stand_for(link: object) -> None:
    columns = 1 if isinstance(link, dict) else 2
    rows = (most_bytes(DECLARED, known(100)) - 100) // 4
    arrays = {"s": torch.zeros(rows, columns, dtype=torch.uint8)}
    if columns == 2:
        arrays["s"][:, 1] = 1
        arrays["s|levels"] = torch.zeros(rows, 2, dtype=torch.uint8)
    received([link], arrays, 100)


MOST = 2_000_000


def number(value: int) -> bytes:
    return terse._number(value)


@pytest.mark.parametrize(
    "data",
    [
        number((MOST - 100) // 4) + b"\1\7\1\0" * ((MOST - 100) // 4),
        number(2) + b"\1\7\1\0" * 2,
        b"\x80" * (MOST - 10) + b"\1",
        number(1) + number(1) + number(8 * 3 + 7) + number(1) + number(3) + b"\x80" * 40,
    ],
    ids=["many arrays", "a name twice", "an endless number", "endless numbers"],
)
def test_what_a_head_says_is_bounded(data: bytes) -> None:
    with pytest.raises(Refused):
        terse.read(data, ["|numbers", "a"], MOST)


def test_numbers_in_bits_take_little_more_than_the_numbers() -> None:
    count = MOST - 100
    values = (torch.arange(count) % 113).to(torch.uint8)
    data = terse.written({"a": values}, ["a"], pack=True)
    tracemalloc.start()
    try:
        found = terse.read(data, ["a"], MOST)["a"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch.equal(found, values)
    assert peak < 30e6
