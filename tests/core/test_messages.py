"""Messages, their encoding, and the channel that counts them."""

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfed.core import tensorfile
from perfed.core.channel import Channel
from perfed.core.errors import ConfigError, RunError
from perfed.core.message import Message
from perfed.core.tree import Weights, flatten, unflatten
from perfed.models import parameter_count

names = st.text("abcxyz.0_é/%", min_size=1, max_size=6)
dtypes = st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randint(0, 2, draw(shapes), generator=generator)
    return values.to(draw(dtypes))


trees = st.recursive(
    st.dictionaries(names, tensors(), min_size=1, max_size=3),
    lambda inner: st.dictionaries(names, inner | tensors(), min_size=1, max_size=3),
    max_leaves=6,
)


def same(left: dict, right: dict) -> bool:
    return list(left) == list(right) and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


@given(trees)
def test_flatten_and_unflatten_are_inverse(tree: dict) -> None:
    flat, message = flatten(tree), Message(**tree)
    assert same(flatten(unflatten(flat)), flat)
    assert list(unflatten(flat)) == list(tree) == list(message)
    assert all(same(flatten({"": message[name]}), flatten({"": tree[name]})) for name in tree)


@pytest.mark.parametrize("name", Weights._fields)
def test_a_level_cannot_be_called_as_a_part_of_a_models_weights(name: str) -> None:
    """It would come back as a model, without what is beside it."""
    tensor = torch.ones(2)
    for content in ({"a": tensor}, Weights({"a": tensor}, {})):
        with pytest.raises(ConfigError, match=f"^{name}: .*choose another"):
            Message(**{name: content})
        with pytest.raises(ConfigError, match=f"^state/{name}: "):
            flatten({"state": {name: content, "step": tensor}})
    # A tensor can: of a network's parameters, one may be called so.
    control = {"control": {name: tensor}}
    assert same(unflatten(flatten(control))["control"], control["control"])
    weights = Weights({name: tensor}, {})
    assert unflatten(flatten({"model": weights})) == {"model": weights}


@given(st.dictionaries(names, tensors(), max_size=5))
def test_the_encoding_is_safetensors(content: dict) -> None:
    data = tensorfile.encode(content)
    assert same(tensorfile.decode(data)[0], content)
    theirs = safetensors.torch.load(data)
    assert all(torch.equal(theirs[n], t) and theirs[n].dtype == t.dtype for n, t in content.items())
    ours, _ = tensorfile.decode(safetensors.torch.save(content))
    assert all(torch.equal(ours[n], t) and ours[n].dtype == t.dtype for n, t in content.items())
    sent = tensorfile.encode_message(content) if content else b""
    assert tensorfile.encoded_size(content) == len(sent)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BOOL", "I64", "F33"]) | json_values,
        "shape": st.lists(st.integers() | json_values, max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-9, 9) | st.integers(), max_size=3) | json_values,
    },
)


@pytest.mark.attack(2, 48)
@given(json_values | st.dictionaries(st.text(max_size=3), entries | json_values), st.binary())
def test_what_is_no_header_is_refused(header: object, payload: bytes) -> None:
    """Whatever comes over a network: tensors, or one of the errors that are expected."""
    text = json.dumps(header).encode()
    with contextlib.suppress(*tensorfile.MALFORMED):
        tensorfile.decode(len(text).to_bytes(8, "little") + text + payload)


@pytest.mark.parametrize("header", ["5", "[]", "null", '"a"', '{"\\ud800": {}}'])
def test_a_header_that_names_no_tensors_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match=r"header is a|surrogates"):
        tensorfile.decode(len(header).to_bytes(8, "little") + header.encode())


@pytest.mark.attack(47)
@given(cut=st.integers(0, 200))
def test_a_file_cut_short_is_refused(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    checksum = tensorfile.save(path, {"a": torch.arange(9.0)})
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    with pytest.raises(RunError, match="corrupt"):
        tensorfile.load(path)
    with pytest.raises(RunError, match="checksum"):
        tensorfile.load(path, checksum)


@pytest.mark.attack(47)
def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    checksum = tensorfile.save(path, {"a": torch.arange(9.0)})
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match="checksum"):
        tensorfile.load(path, checksum)


def test_a_message_gives_back_what_was_put_in() -> None:
    weights = Weights({"0.weight": torch.ones(2, 3)}, {"1.mean": torch.zeros(2)})
    message = Message(model=weights, samples=7, soft=torch.rand(4, 2))
    assert set(message) == {"model", "samples", "soft"}
    assert set(message.arrays) == {
        "model/params/0.weight",
        "model/buffers/1.mean",
        "samples",
        "soft",
    }
    assert message["model"].params["0.weight"].shape == (2, 3)
    assert int(message["samples"]) == 7
    again = Message.from_arrays(tensorfile.decode(tensorfile.encode(message.arrays))[0])
    assert torch.equal(again["model"].buffers["1.mean"], weights.buffers["1.mean"])
    with pytest.raises(KeyError):
        message["absent"]


def test_the_channel_counts_a_broadcast_once_and_every_uplink() -> None:
    """m=3 clients, c=2 centroids: (m + c)·|P|·N a round, the paper's count."""
    channel = Channel()
    centroids = torch.rand(2, 5, 10)
    channel.down({k: Message(centroids=centroids) for k in range(3)})
    channel.up({k: Message(soft_decisions=torch.rand(5, 10), samples=4) for k in range(3)})
    assert channel.total.parameters == (3 + 2) * 5 * 10
    payload = 4 * (3 * 100 + 3 * 50) + 3 * 8
    assert payload < channel.total.bytes < payload + 6 * 250
    assert channel.total.down_bytes == 3 * tensorfile.encoded_size({"centroids": centroids})


def test_different_messages_count_each_and_shared_arrays_once() -> None:
    """Two clients get three models, one of them in common: as FedFomo's candidates."""
    channel = Channel()
    a, b, c = torch.rand(7), torch.rand(7), torch.rand(7)
    channel.down({0: Message(x=a, y=b), 1: Message(x=b, y=c)})
    assert channel.total.down_parameters == 3 * 7
    bank = torch.rand(2, 7)
    channel.down({0: Message(one=bank[0]), 1: Message(all=bank)})  # same address, another thing
    assert channel.total.down_parameters == 3 * 7 + 7 + 14


class Scaled(torch.nn.Sequential):
    """Learns a single number too, and has a count that is none of its parameters."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        self.scale = torch.nn.Parameter(torch.tensor(1.0))


def test_a_number_that_a_model_learns_is_one_of_its_parameters() -> None:
    module, channel = Scaled(), Channel()
    weights = Weights(dict(module.named_parameters()), dict(module.named_buffers()))
    channel.up({0: Message(model=weights, samples=7)})
    channel.down({0: Message(models={"a": weights}, cluster=1)})
    assert channel.total.up_parameters == parameter_count(module)
    assert channel.total.down_parameters == parameter_count(module)


def test_no_message_costs_nothing() -> None:
    channel = Channel()
    channel.up({0: Message(), 1: Message()})
    assert (channel.total.bytes, channel.total.parameters) == (0, 0)


@pytest.mark.attack(49)
def test_a_file_that_cannot_be_written_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "kept").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tensorfile.write_atomically(tmp_path / "kept", b"new")
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("kept", b"old")]


def built(header: object, payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return len(text).to_bytes(8, "little") + text + payload


def one(shape: object, offsets: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.attack(16, 48)
@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ({"a": one([2], [0, 8]), "b": one([2], [0, 8])}, 8),  # the same bytes twice
        ({"a": one([2], [0, 8]), "b": one([2], [4, 12])}, 12),  # overlapping
        ({"b": one([1], [4, 8]), "a": one([1], [0, 4])}, 8),  # not in order
        ({"a": one([1], [4, 8])}, 8),  # a gap before
        ({"a": one([1], [0, 4])}, 8),  # bytes that are nobody's
        ({"a": one([2], [0, 4])}, 4),  # fewer bytes than the shape has
        ({"a": one([-1], [0, 4])}, 4),
        ({"a": one([-1, -1], [0, 4])}, 4),
        ({"a": one([True], [0, 4])}, 4),
        ({"a": one([1.0], [0, 4])}, 4),
        ({"a": one([2**63, 2], [0, 4])}, 4),
        ({"a": one([1] * 99, [0, 4])}, 4),
        ({"a": one([1], [-4, 0])}, 4),
        ({"a": one([1], [0, 4], "F31")}, 4),
        ({"a": one([1], None)}, 4),
        ({"__metadata__": {"a": 1}}, 0),
        ({"__metadata__": ["a"]}, 0),
        (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 1}', 0),
        (b"[" * 100_000, 0),
        (b'{"a":' * 100_000, 0),
        (b'{"a": ' + b"9" * 5000 + b"}", 0),
    ],
)
def test_a_header_that_does_not_describe_its_payload_is_refused(
    header: object, payload: int
) -> None:
    with pytest.raises(tensorfile.MALFORMED):
        tensorfile.decode(built(header, bytes(payload)))


@pytest.mark.attack(16)
def test_a_header_has_limits() -> None:
    many = {str(n): one([0], [0, 0]) for n in range(tensorfile.MESSAGE.entries + 1)}
    tensorfile.decode(built(many))
    with pytest.raises(ValueError, match="tensors: must be at most"):
        tensorfile.decode(built(many), tensorfile.MESSAGE)
    with pytest.raises(ValueError, match="bytes: must be at most"):
        tensorfile.decode(built(b" " * (tensorfile.MESSAGE.header + 1)), tensorfile.MESSAGE)
    with pytest.raises(ValueError, match="bytes: must be at most"):  # before there is memory for it
        tensorfile.decode((2**62).to_bytes(8, "little"))


small = st.integers(-1, 3)
nearly = st.dictionaries(
    st.text("ab", min_size=1, max_size=2),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "U8", "BOOL", "I64"]),
            "shape": st.lists(small, max_size=3),
            "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2).map(sorted),
        }
    ),
    max_size=3,
)


@pytest.mark.attack(16, 48)
@given(nearly, st.binary(max_size=24))
def test_what_is_decoded_is_exactly_what_was_sent(header: dict, payload: bytes) -> None:
    """Never more than arrived; encoded again, the same bytes."""
    try:
        decoded, _ = tensorfile.decode(built(header, payload))
    except tensorfile.MALFORMED:
        return
    assert sum(t.nbytes for t in decoded.values()) == len(payload)
    assert tensorfile.encode(decoded)[-len(payload) :] == payload or not payload


@pytest.mark.attack(48)
@given(st.dictionaries(names, tensors(), max_size=3), st.data())
def test_flipped_bytes_give_tensors_or_a_known_error(content: dict, data: st.DataObject) -> None:
    encoded = bytearray(tensorfile.encode(content))
    for place in data.draw(st.lists(st.integers(0, len(encoded) - 1), max_size=4)):
        encoded[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(*tensorfile.MALFORMED):
        tensorfile.decode(bytes(encoded))
