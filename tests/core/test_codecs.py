"""Codecs: each against a second, tiny implementation, its error bound, and what a receiver must not
do with what a stranger has made."""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed.core import tensorfile
from perfed.core.admission import SLACK, check, most_bytes
from perfed.core.algorithm import algorithms
from perfed.core.codecs.deflate import DEFLATED, RAW
from perfed.core.declaration import (
    LOG_PROBABILITIES,
    PROBABILITIES,
    REALS,
    SAMPLES,
    Array,
    AtMost,
    Known,
)
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.tree import Tree, Weights
from perfed.core.wire import At, Link, stages

P, N = 12, 5
MODEL = Weights({"w": torch.zeros(10, 10), "b": torch.zeros(3)}, {"mean": torch.zeros(80)})
DECLARED = {
    "said": Array(("P", "N"), PROBABILITIES),
    "centroids": Array((AtMost(3), "P", "N"), PROBABILITIES),
    "table": Array(("P", "N"), REALS),
    "evidence": Array(("P", "N"), LOG_PROBABILITIES),
    "samples": SAMPLES,
}
seeds = st.integers(0, 2**32 - 1)


def known(received: Message | None = None, classes: int = N) -> Known:
    return Known(
        {"P": P, "N": classes}, 4, lambda _: MODEL, lambda _: "head", received or Message()
    )


def at(classes: int = N, **changes: Any) -> At:
    return replace(At(3, 1, 2, "up", 0, DECLARED, known(classes=classes)), **changes)


def rows(seed: int, classes: int = N, lead: tuple[int, ...] = (P,)) -> torch.Tensor:
    """Probabilities from nearly uniform to nearly certain, with ties and zeros."""
    random = np.random.default_rng(seed)
    found = random.dirichlet(np.full(classes, 10.0 ** random.uniform(-2, 1)), lead)
    found[..., 0, :] = np.eye(classes)[0]
    found[..., 1, :] = 1 / classes
    return torch.tensor(found, dtype=torch.float32)


def through(stage: str | dict[str, Any], message: Message, where: At) -> tuple[Message, Message]:
    """As sent, and as received."""
    codec = stages.build(stage)
    sent, _ = codec.send(message, where, {})
    encoded = tensorfile.decode_message(tensorfile.encode_message(sent.arrays))
    return sent, codec.receive(Message.from_arrays(encoded), where, {})[0]


CODECS: list[dict[str, Any]] = [
    {"name": "probability-bits", "bits": 8},
    {"name": "top-probabilities", "number": 4},
    {"name": "number-bits"},
    {"name": "top-changes", "share": 1.0},
]


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(CODECS, 2)])
def test_what_one_codec_has_coded_another_one_leaves(first: Any, second: Any) -> None:
    """In either order, and so also where both are for probabilities."""
    said = {"said": rows(1, classes=6), "evidence": rows(2, classes=6).clamp(min=0.01).log()}
    was = Message(said=rows(3, classes=6), evidence=rows(4, classes=6))
    link = Link((stages.build(first), stages.build(second)))
    where: Any = (1, 2, "up", {}, DECLARED, known(was, classes=6))
    crossing, _ = link.send(Message.from_arrays(said), *where)
    found, _ = link.receive(crossing, *where)
    assert found.arrays.keys() == said.keys()
    torch.testing.assert_close(found["said"], said["said"], rtol=0, atol=0.1)
    behind, evidence = found["evidence"].softmax(1), said["evidence"].softmax(1)
    torch.testing.assert_close(behind, evidence, rtol=0, atol=0.02)


# Probabilities.


@settings(max_examples=60)
@given(seeds, st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 5, 10, 40, 300]))
def test_no_probability_in_few_bits_is_off_by_more_than_its_bound(
    seed: int, bits: int, classes: int
) -> None:
    said, total = rows(seed, classes), 2**bits - 1
    message = Message(said=said, centroids=rows(seed, classes, (2, P)), table=said, samples=4)
    where = at(classes)
    sent, received = through({"name": "probability-bits", "bits": bits}, message, where)
    for name in ("said", "centroids"):
        assert (received[name].shape, received[name].dtype) == (message[name].shape, torch.float32)
        assert float((received[name] - message[name]).abs().max()) <= 1 / total + 1e-6
        assert torch.allclose(received[name].sum(-1), torch.ones(1), atol=1e-5)
        assert sent[name].numel() == message[name].numel() // classes * min(total, classes)
    for name in ("table", "samples"):  # not declared as probabilities
        assert torch.equal(received[name], message[name])


@settings(max_examples=40)
@given(seeds, st.integers(1, 8), st.sampled_from([2, 5, 10, 40]))
def test_logarithms_are_coded_as_the_probabilities_behind_them(
    seed: int, bits: int, classes: int
) -> None:
    said, total = rows(seed, classes).clamp(min=1e-6), 2**bits - 1
    evidence = said.log() - said.log().mean(1, keepdim=True)
    message = Message(evidence=evidence)
    _, received = through({"name": "probability-bits", "bits": bits}, message, at(classes))
    found = received["evidence"]
    assert torch.allclose(found.sum(1), torch.zeros(P), atol=1e-4)
    error = (found.softmax(1) - evidence.softmax(1)).abs().max()
    assert float(error) <= 1.5 / total + 1e-5


@pytest.mark.parametrize("bits", [1, 2])
def test_levels_are_the_nearest_there_are(bits: int) -> None:
    """Against all rows that few bits can say."""
    total, said = 2**bits - 1, rows(7, 4)
    every = [c for c in itertools.product(range(total + 1), repeat=4) if sum(c) == total]
    possible = np.array(every) / total
    where = at(4)
    _, received = through({"name": "probability-bits", "bits": bits}, Message(said=said), where)
    for row, found in zip(said.double().numpy(), received["said"].double().numpy(), strict=True):
        best = np.square(possible - row).sum(1).min()
        assert np.square(found - row).sum() == pytest.approx(best, abs=1e-6)


@settings(max_examples=60)
@given(seeds, st.integers(1, 6), st.sampled_from([2, 4, 8]), st.sampled_from([2, 5, 10, 300]))
def test_the_most_probable_are_sent_and_the_others_share_the_rest(
    seed: int, count: int, bits: int, classes: int
) -> None:
    said, total = rows(seed, classes), 2**bits - 1
    stage = {"name": "top-probabilities", "number": count, "bits": bits}
    sent, received = through(stage, Message(said=said), at(classes))
    found = received["said"]
    assert torch.allclose(found.sum(1), torch.ones(P), atol=1e-5)
    for row, again, which in zip(said.tolist(), found.tolist(), sent["said"].tolist(), strict=True):
        largest = sorted(range(classes), key=lambda c: -row[c])[:count]
        assert which == largest
        smallest = row[largest[-1]]
        for c in range(classes):
            bound = 1 / total if c in largest else max(1 / total, smallest)
            assert abs(again[c] - row[c]) <= bound + 1e-5
        rest = {round(again[c], 5) for c in range(classes) if c not in largest}
        assert len(rest) <= 1


# Numbers.


@settings(max_examples=40)
@given(seeds, st.sampled_from([2, 4, 8]), st.floats(-30, 30))
def test_no_number_is_off_by_more_than_half_a_step(seed: int, bits: int, power: float) -> None:
    random = torch.Generator().manual_seed(seed)
    values = 10**power * torch.randn(20, 7, generator=random) + 3
    message = Message(table=values, said=rows(seed), few=values[0, :3], same=torch.full((9,), 2.5))
    _, received = through({"name": "number-bits", "bits": bits}, message, at())
    step = (values.max() - values.min()).double() / (2**bits - 1)
    error = (received["table"].double() - values.double()).abs().max()
    assert error <= step * 0.5001 + 1e-6 * values.abs().max()
    for name in ("said", "few", "same"):
        assert torch.equal(received[name], message[name])


def test_changes_that_are_left_out_come_later() -> None:
    """Three rounds, beside plain NumPy; all that was ever left out and sent is all that changed."""
    codec = stages.build({"name": "top-changes", "share": 0.1})
    random, state = np.random.default_rng(0), {}
    left, total_sent, total = np.zeros(100), np.zeros(100), np.zeros(100)
    for _ in range(3):
        before, change = random.normal(size=100), random.normal(size=100)
        change = (before + change).astype(np.float32) - before.astype(np.float32)
        old = MODEL._replace(params={"w": torch.tensor(before).float().view(10, 10)})
        new = old._replace(
            params={"w": old.params["w"] + torch.tensor(change).view(10, 10)},
            buffers={"mean": torch.ones(80)},
        )
        where = at(known=known(Message(model=old)))
        sent, state = codec.send(Message(model=new, other=torch.ones(70)), where, state)
        received, _ = codec.receive(sent, where, {})
        left += change
        largest = np.argsort(-np.abs(left))[:10]
        expected = before.astype(np.float32).copy()
        expected[largest] += left[largest]
        total_sent[largest] += left[largest]
        total += change
        left[largest] = 0
        np.testing.assert_allclose(received["model"].params["w"].flatten(), expected, atol=1e-5)
        assert torch.equal(received["model"].buffers["mean"], torch.ones(80))
        assert torch.equal(received["other"], torch.ones(70))  # it was not sent to the client
        np.testing.assert_allclose(total_sent + left, total, atol=1e-5)
    assert sent.arrays["model/params/w"].shape == (10,)


# Some rows.


class Ends:
    """A client and a server with one link, and what may get lost between them."""

    def __init__(self, *before: Any, **options: Any) -> None:
        wire = [*before, {"name": "cached", **options}]
        self.link = Link(tuple(map(stages.build, wire)), seed=5)
        self.server: Tree = {}
        self.client: Tree = {}

    def play(self, round: int, down: Message, up: Message, fate: str) -> tuple[Any, Any]:
        """What the client and the server get; nothing where it is lost."""
        sent, moved = self.link.send(down, 1, round, "down", self.server, DECLARED, known())
        if fate == "dead":
            return None, None
        told, self.client = self.link.receive(
            sent, 1, round, "down", self.client, DECLARED, known()
        )
        answer, self.client = self.link.send(up, 1, round, "up", self.client, DECLARED, known())
        if fate == "lost":
            return told, None
        heard, self.server = self.link.receive(answer, 1, round, "up", moved, DECLARED, known())
        return told, heard


fates = st.lists(st.sampled_from(["fine", "fine", "lost", "dead", "silent"]), max_size=12)


@settings(max_examples=60)
@given(fates, seeds, st.sampled_from([0, 2, 3, 8]))
def test_both_ends_agree_whatever_is_lost(fates: list[str], seed: int, bits: int) -> None:
    """Every message that arrives is what was sent. 'silent': the server has nothing to say, so a
    client does not know whether its last answer was lost; then alone it may be refused."""
    ends = Ends(*[{"name": "probability-bits", "bits": bits}] * bool(bits), age=0)
    table, said, off = rows(seed), rows(seed + 1), 1 / (2**bits - 1) if bits else 0
    for round, fate in enumerate(fates):
        table, said = table.clone(), said.clone()
        table[round % P] = rows(seed + round)[2]
        said[-1 - round % P] = rows(seed + 100 + round)[3]
        down = Message() if fate == "silent" else Message(table=table)
        try:
            told, heard = ends.play(round, down, Message(said=said, samples=4), fate)
        except Refused:
            if fate != "silent" or "lost" not in fates[:round]:
                raise
            continue
        if told:
            assert torch.allclose(told["table"], table, atol=1e-6)
        if heard is not None:
            assert torch.allclose(heard["said"], said, atol=off + 1e-6)


def test_only_what_changed_is_sent_and_after_an_age_all() -> None:
    ends, said = Ends(age=4, threshold=0.05), rows(1)
    sizes = []
    for round in range(6):
        drift = said.clone()
        drift[1, :2] += torch.tensor([0.02, -0.02]) * round  # beyond 0.05 after three rounds
        sent, moved = ends.link.send(
            Message(said=drift), 1, round, "up", ends.client, DECLARED, known()
        )
        received, ends.server = ends.link.receive(
            sent, 1, round, "up", ends.server, DECLARED, known()
        )
        ends.client = moved
        assert float((received["said"] - drift).abs().max()) <= 0.05 + 1e-6
        sizes.append(len(sent["said"]))
    assert sizes == [P, 0, 0, 1, P, 0]


def test_rows_come_in_turn_and_the_last_known_stay() -> None:
    """Beside a table of the message in which each row was asked for, made by hand."""
    ends, versions = Ends(share=0.3, age=0), [rows(n) for n in range(9)]
    last = torch.zeros(P, dtype=torch.long)
    orders = set()
    for round, said in enumerate(versions):
        _, heard = ends.play(round, Message(samples=4), Message(said=said), "fine")
        found = [
            next(
                n for n in range(round, -1, -1) if torch.allclose(heard["said"][p], versions[n][p])
            )
            for p in range(2, P)  # the first two rows are the same in all
        ]
        if round:
            assert sum(n == round for n in found) <= math.ceil(0.3 * P)
        assert all(round - n <= 3 for n in found)  # four messages go round them all
        orders.add(tuple(p for p, n in enumerate(found) if n == round))
        last = torch.tensor(found)
    assert len(orders) >= 4
    assert int(last.max()) == 8


def test_an_end_that_has_lost_its_memory_is_refused_until_all_is_sent_again() -> None:
    ends = Ends(age=3)
    ends.play(0, Message(table=rows(0)), Message(said=rows(0)), "fine")
    ends.client = {}  # a site whose disk was lost
    for round in (1, 2):
        with pytest.raises(Refused, match="builds on message 1 of this client, which is not"):
            ends.play(round, Message(table=rows(1)), Message(said=rows(round)), "fine")
    for round in (3, 4):
        _, heard = ends.play(round, Message(table=rows(1)), Message(said=rows(round)), "fine")
        assert torch.allclose(heard["said"], rows(round), atol=1e-6)


def test_what_crosses_of_unchanged_rows_is_next_to_nothing() -> None:
    """And half of the rows is half of that; what arrives is what was in few bits before."""
    ends = Ends({"name": "probability-bits", "bits": 3}, age=0)
    said, sizes = rows(3, lead=(P,)), []
    for round in range(3):
        sent, ends.client = ends.link.send(
            Message(said=said), 1, round, "up", ends.client, DECLARED, known()
        )
        heard, ends.server = ends.link.receive(sent, 1, round, "up", ends.server, DECLARED, known())
        sizes.append(sent.arrays["said|terms"].numel())
        assert ("said|form" in sent.arrays) == (round == 0)
        assert float((heard["said"] - said).abs().max()) <= 1 / 7 + 1e-6
    assert sizes[0] > 2 * sizes[1] == 2 * sizes[2]


# The whole message in fewer bytes.


@settings(max_examples=30)
@given(seeds)
def test_deflated_is_the_same_to_the_bit(seed: int) -> None:
    message = Message(said=rows(seed), model=MODEL, samples=4, odd=torch.zeros(0, 3))
    sent, received = through("deflate", message, at())
    assert list(sent.arrays) == ["z"]
    assert list(received.arrays) == list(message.arrays)
    for name, values in message.arrays.items():
        again = received.arrays[name]
        assert (again.dtype, again.shape) == (values.dtype, values.shape)
        assert torch.equal(again, values)


def test_names_cost_little() -> None:
    """What both ends know is not sent: 20 numbers of one bit, and six bytes about them."""
    message = Message(soft_decisions=torch.arange(20).remainder(2).to(torch.uint8))
    where = at(declared={"soft_decisions": Array(("P",), REALS)})
    sent, _ = stages.build("deflate").send(message, where, {})
    assert sent["z"].numel() <= 3 + 6
    assert tensorfile.encoded_size(sent.arrays) == sent["z"].numel() + 1


@pytest.mark.attack("small-message-that-becomes-large")
def test_a_small_message_does_not_become_a_large_one() -> None:
    bomb = torch.zeros(50 * 2**20, dtype=torch.uint8).numpy().tobytes()
    packed = zlib.compressobj(9, zlib.DEFLATED, RAW)
    data = DEFLATED + packed.compress(bomb) + packed.flush()
    small = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    most = most_bytes(DECLARED, known())
    assert most == SLACK + (P * N + 3 * P * N + P * N + P * N + 1) * 5
    with pytest.raises(Refused, match=f"more than {most} bytes"):
        stages.build("deflate").receive(Message(z=small), at(), {})


def test_the_most_a_message_can_have_is_more_than_any_has() -> None:
    for name in algorithms:
        messages = algorithms.build(name).messages()
        for declared in (messages.up, messages.down):
            assert most_bytes(declared, known()) >= SLACK
    models = algorithms.build("hypcluster").messages().down
    numbers = sum(t.numel() for part in MODEL for t in part.values())
    assert most_bytes(models, known()) >= 3 * 4 * numbers


GARBLED: list[tuple[Any, dict[str, torch.Tensor]]] = [
    ("probability-bits", {"said": torch.full((P, N), 200, dtype=torch.uint8)}),
    ("probability-bits", {"said": torch.zeros(P, N)}),
    ("probability-bits", {"said": torch.tensor(3, dtype=torch.uint8)}),
    ({"name": "probability-bits", "bits": 2}, {"said": torch.full((P, 3), 5, dtype=torch.uint8)}),
    ({"name": "probability-bits", "bits": 2}, {"said": torch.zeros(P, 4, dtype=torch.uint8)}),
    ("top-probabilities", {"said": torch.zeros(P, 2, dtype=torch.uint8)}),
    (
        "top-probabilities",
        {
            "said": torch.zeros(P, 2, dtype=torch.uint8),
            "said|levels": torch.zeros(P, 2, dtype=torch.uint8),
        },
    ),
    (
        "top-probabilities",
        {
            "said": torch.tensor([[0, 1]], dtype=torch.uint8),
            "said|levels": torch.full((1, 2), 200, dtype=torch.uint8),
        },
    ),
    ("number-bits", {"table": torch.zeros(P, N), "table|range": torch.zeros(2)}),
    ("number-bits", {"table": torch.zeros(2, dtype=torch.uint8), "table|range": torch.zeros(9)}),
    (
        {"name": "number-bits", "bits": 2},
        {"table": torch.full((9,), 4, dtype=torch.uint8), "table|range": torch.zeros(2)},
    ),
    ("number-bits", {"table|range": torch.zeros(2)}),
    ("cached", {"said": torch.zeros(P, N)}),
    ("cached", {"|numbers": torch.tensor([-1, 0], dtype=torch.int32)}),
    ("cached", {"|numbers": torch.tensor([2**31 - 1, 0], dtype=torch.int32)}),
    (
        "cached",
        {
            "said": torch.zeros(1, N),
            "said|which": torch.full((2,), 255, dtype=torch.uint8),
            "|numbers": torch.tensor([1, 0], dtype=torch.int32),
        },
    ),
    (
        "top-changes",
        {"model/params/w": torch.zeros(1), "model/params/w|gaps": torch.tensor([100]).int()},
    ),
    (
        "top-changes",
        {"model/params/w": torch.zeros(2), "model/params/w|gaps": torch.tensor([5, 0]).int()},
    ),
    (
        "top-changes",
        {"model/params/w": torch.zeros(1), "model/params/w|gaps": torch.tensor([-1]).int()},
    ),
    ("top-changes", {"table": torch.zeros(1), "table|gaps": torch.tensor([0]).int()}),
    ("cached", {"said|terms": torch.zeros(2, 2).byte(), "|numbers": torch.tensor([1, 0]).int()}),
    ("cached", {"said|terms": torch.zeros(2).byte(), "|numbers": torch.tensor([1, 0]).int()}),
    *(
        (
            "cached",
            {
                "said|terms": torch.zeros(2, dtype=torch.uint8),
                "said|form": torch.tensor(form, dtype=torch.int32),
                "|numbers": torch.tensor([0, 0], dtype=torch.int32),
            },
        )
        for form in ([3, 2**30, 3], [3, P, 9], [3, P, 2], [99, P, N], [3, 0, 3], [3, -1, 3], [3])
    ),
    ("cached", {"table|terms": torch.zeros(2).byte(), "|numbers": torch.tensor([0, 0]).int()}),
    ("deflate", {"z": torch.full((9,), 2, dtype=torch.uint8)}),
    ("deflate", {"z": torch.tensor([1, 0, 0], dtype=torch.uint8)}),
    ("deflate", {"z": torch.tensor([0, 9], dtype=torch.uint8)}),
    ("deflate", {"z": torch.zeros(0, dtype=torch.uint8)}),
    ("deflate", {"z": torch.zeros(2, 2, dtype=torch.uint8)}),
    ("deflate", {"said": torch.zeros(P, N)}),
]


@pytest.mark.attack("garbled-code")
@pytest.mark.parametrize(("stage", "arrays"), GARBLED)
def test_what_is_no_code_is_refused(stage: Any, arrays: dict[str, torch.Tensor]) -> None:
    """By the codec, or by admission where it could be what another codec has made."""
    link = Link((stages.build(stage),), seed=0)
    state = {
        "up": {
            "0": {"number": torch.tensor(1), "whole": torch.tensor(0), "rows": {"said": rows(0)}}
        }
    }
    about = known(Message(model=MODEL))

    def arrive() -> None:
        message = Message.from_arrays(arrays)
        found, _ = link.receive(message, 0, 1, "up", state, DECLARED, about)
        check(found, {name: DECLARED[name] for name in found.arrays}, about)

    with pytest.raises(Refused) as error:
        arrive()
    assert "\n" not in str(error.value)
