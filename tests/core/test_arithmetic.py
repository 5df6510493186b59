"""Bytes that codecs make: the arithmetic coder against its own probabilities in exact fractions,
rows of levels, and the terse form of a message."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed.core.codecs import levels, terse
from perfed.core.codecs.arithmetic import MOST, START, STEP, Reader, Writer
from perfed.core.codecs.bits import levels_of, nearest_levels, units_of
from perfed.core.codecs.levels import as_code, as_levels
from perfed.core.errors import Refused

answers = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=300)
seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, rows: int, classes: int, units: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    sharp = 6 * torch.rand(1, generator=random)
    said = (sharp * torch.randn(rows, classes, generator=random)).softmax(1)
    return nearest_levels(said, units)


@settings(max_examples=200)
@given(answers, st.sampled_from([1, 40, 2000]))
def test_answers_come_back_in_as_many_bits_as_they_are_surprising(
    asked: list[tuple[int, bool]], times: int
) -> None:
    asked = asked * times if len(asked) * times < 20_000 else asked
    writer, counts, bits = Writer(), {}, 0.0
    for context, answer in asked:
        assert writer.answer(context, answer) == answer
        mine = counts.setdefault(context, [Fraction(START), Fraction(START)])
        bits -= math.log2(mine[answer] / sum(mine))
        mine[answer] += STEP
        if sum(mine) > MOST:
            mine[:] = [count // 2 + 1 for count in mine]
    data = writer.bytes()
    assert len(data) <= bits / 8 * 1.001 + 2
    reader = Reader(data)
    assert [reader.answer(context) for context, _ in asked] == [answer for _, answer in asked]
    reader.end()


@pytest.mark.parametrize("wanted", [0.01, 0.2, 0.5])
def test_many_answers_take_what_their_entropy_says(wanted: float) -> None:
    random = torch.Generator().manual_seed(0)
    said = (torch.rand(40_000, generator=random) < wanted).tolist()
    writer = Writer()
    for answer in said:
        writer.answer("", answer)
    p = sum(said) / len(said)
    entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) * len(said) / 8
    # Two parameters at most are learnt; counts are halved from time to time.
    assert entropy <= len(writer.bytes()) <= 1.01 * entropy + 10


@given(st.binary(max_size=40))
def test_any_bytes_are_some_rows_or_refused(data: bytes) -> None:
    before = drawn(len(data), 4, 5, 7)
    try:
        found = levels.read(data, before, 7)
    except Refused:  # it is too long
        return
    assert found.shape == before.shape
    assert bool((found >= 0).all())
    assert found.sum(1).tolist() == [7] * 4
    assert torch.equal(levels.read(levels.written(found, before), before, 7), found)


@settings(max_examples=60)
@given(seeds, st.sampled_from([2, 5, 10, 40]), st.sampled_from([1, 3, 7, 15, 31]), st.booleans())
def test_rows_come_back(seed: int, classes: int, units: int, first: bool) -> None:
    now, before = drawn(seed, 30, classes, units), drawn(seed + 1, 30, classes, units)
    before = torch.zeros_like(before) if first else before
    data = levels.written(now, before)
    assert torch.equal(levels.read(data, before, units), now)


def test_what_has_not_changed_takes_next_to_nothing() -> None:
    before = drawn(5, 400, 10, 7)
    assert len(levels.written(before, before)) < 40
    changed = before.clone()
    changed[::40] = drawn(6, 10, 10, 7)
    assert (
        len(levels.written(changed, before))
        < 120
        < len(levels.written(drawn(7, 400, 10, 7), 0 * before))
    )


@pytest.mark.parametrize("classes", [5, 10, 300])
@pytest.mark.parametrize("units", [1, 3, 7, 15])
def test_a_code_is_the_same_again(classes: int, units: int) -> None:
    said = drawn(1, 20, classes, units)
    columns = units if units < classes else classes
    code = as_code(said, columns)
    found = as_levels(code.view(4, 5, columns), classes)
    assert found is not None
    assert torch.equal(found, said)
    if units < classes:
        assert torch.equal(levels_of(units_of(said, units), classes), said)
        assert as_levels(code.flip(1), classes) is None or torch.equal(code.flip(1), code)
    assert as_levels(code.float(), classes) is None
    assert as_levels(code, 0) is None


ARRAYS = {
    "known": torch.tensor([[0, 3], [1, 2]], dtype=torch.uint8),
    "known|which": torch.tensor([255, 0], dtype=torch.uint8),
    "strange/näme": torch.tensor([-5, 2**31 - 1, -(2**31)], dtype=torch.int32),
    "long": torch.tensor(2**63 - 1),
    "short": torch.tensor([[-(2**15)]], dtype=torch.int16),
    "byte": torch.tensor([-128, 127], dtype=torch.int8),
    "yes": torch.tensor([True, False]),
    "none": torch.zeros(0, 3),
    "nothing": torch.zeros(0, dtype=torch.uint8),
    "half": torch.ones(2, dtype=torch.float16),
    "brain": torch.ones(2, dtype=torch.bfloat16),
    "double": torch.tensor(math.pi, dtype=torch.float64),
    "single": torch.tensor([math.inf, -0.0]),
}
NAMES = ["known", "known|which"]


@pytest.mark.parametrize("pack", [False, True])
def test_a_terse_message_is_the_same_again(pack: bool) -> None:
    data = terse.written(ARRAYS, NAMES, pack)
    found = terse.read(data, NAMES, 10_000)
    assert list(found) == list(ARRAYS)
    for name, values in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape)
        assert torch.equal(found[name], values)
    assert b"known" not in data
    for cut in range(len(data)):
        with pytest.raises((Refused, UnicodeDecodeError)):
            terse.read(data[:cut], NAMES, 10_000)
    with pytest.raises(Refused, match="after its last"):
        terse.read(data + b"\0", NAMES, 10_000)


def test_small_numbers_take_few_bits() -> None:
    levels = {"known": torch.arange(400).remainder(4).to(torch.uint8)}
    assert len(terse.written(levels, NAMES, True)) == 100 + 6
    assert len(terse.written(levels, NAMES, False)) == 400 + 6


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"\1\1\7\1\xff\xff\xff\x7f", "more than 1000 bytes"),
        (b"\1\1\0\1\xff\xff\xff\x7f", "more than 1000 bytes"),
        (b"\1\3", "must be at most 2"),
        (b"\1\1\x0a\0", "only bytes"),
        (b"\1\1\7\x7f", "must be at most 16"),
        (b"\2\1\7\0\1\7\0ab", "twice"),
        (b"\1\1\x1f\0\xff\xff\xff\xff\x7f", "must be at most 65535"),
    ],
)
def test_a_terse_message_cannot_ask_for_more(head: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        terse.read(head, NAMES, 1000)
