"""Envelopes survive Flower's own encoding, and what is no envelope is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st

from perfed.core.message import Message
from perfed.core.tensorfile import encoded_size
from perfed.flower import codec
from perfed.flower.protocol import EVALUATE, FIRST, JOIN, ROUND, Envelope, Header, Refused

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
names = st.text(st.characters(exclude_characters="/", codec="utf-8"), min_size=1, max_size=8)
tensors = st.builds(
    lambda dtype, shape, seed: torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(
        dtype
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 2**32),
)
arrays = st.dictionaries(st.lists(names, min_size=1, max_size=3).map("/".join), tensors, max_size=4)
facts = st.dictionaries(
    names,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
headers = st.builds(
    Header,
    st.sampled_from([JOIN, FIRST, ROUND, EVALUATE]),
    names,
    st.integers(-1, 10**6),
    st.text(),
    st.integers(0, 99),
)
envelopes = st.builds(Envelope, headers, arrays.map(Message.from_arrays), facts, st.text())


def through_flower(records: RecordDict) -> RecordDict:
    """The bytes that Flower would send, and back."""
    proto = recorddict_to_proto(records)
    return recorddict_from_proto(type(proto).FromString(proto.SerializeToString()))


@given(envelopes)
def test_an_envelope_arrives_as_it_was_sent(envelope: Envelope) -> None:
    arrived = codec.decode(through_flower(codec.encode(envelope)))
    assert arrived.header == envelope.header
    assert (arrived.facts, arrived.refusal) == (envelope.facts, envelope.refusal)
    sent, got = envelope.message.arrays, arrived.message.arrays
    assert sent.keys() == got.keys()
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


@given(arrays)
def test_the_array_that_crosses_has_the_bytes_that_the_channel_counts(
    content: dict[str, torch.Tensor],
) -> None:
    message = Message.from_arrays(content)
    records = codec.encode(Envelope(Header("round", "r", 0, ""), message))
    crossing = sum(
        len(a.data) for record in records.array_records.values() for a in record.values()
    )
    assert crossing == encoded_size(content)


@given(st.binary(max_size=50))
def test_bytes_alone_cross_with_one_byte_more(data: bytes) -> None:
    message = Message(z=torch.tensor([*data], dtype=torch.uint8))
    sent = codec.encode(Envelope(Header("round", "r", 0, ""), message))
    assert len(sent.array_records["message"][""].data) == len(data) + 1
    assert encoded_size(message.arrays) == len(data) + 1
    assert torch.equal(codec.decode(through_flower(sent)).message["z"], message["z"])


def records(**changes: Any) -> RecordDict:
    good = codec.encode(Envelope(Header("round", "r", 0, ""), Message(x=torch.ones(2))))
    return RecordDict({**good, **changes})


def with_bytes(data: bytes) -> ArrayRecord:
    return ArrayRecord({"": Array("uint8", (len(data),), codec.ENCODING, data)})


@pytest.mark.attack(2)
@given(st.binary(max_size=99), st.binary(max_size=99))
def test_any_bytes_are_an_envelope_or_refused(header: bytes, payload: bytes) -> None:
    for data in (header, len(header).to_bytes(8, "little") + header + payload):
        with contextlib.suppress(Refused):
            codec.decode(records(message=with_bytes(data)))


@pytest.mark.attack(2)
@pytest.mark.parametrize(
    "wrong",
    [
        RecordDict(),
        records(about=ConfigRecord({"kind": "round", "facts": "{}", "refusal": ""})),
        records(about=ConfigRecord({"facts": "not json", "refusal": ""})),
        records(message=ArrayRecord({"": Array(np.ones(3))})),
        records(message=with_bytes(b"abc")),
        records(message=with_bytes(b"\x08" + b"\0" * 7 + b"5       ")),
    ],
)
def test_what_is_no_envelope_is_refused(wrong: RecordDict) -> None:
    with pytest.raises(Refused, match="not an envelope"):
        codec.decode(wrong)
