"""FedMD, DS-FL, CFD, COMET and SCARLET, which send what networks say of public samples: rounds by
hand in NumPy, limit cases, closed forms, and what a round costs.

Faults seen in public libraries, and the test that would catch each here:

* KL divided by the number of classes, or logits where probabilities belong: every test by hand
* batches that are dropped: the same, and test_a_public_set_smaller_than_a_batch_teaches
* a server's network that is trained and never saved: test_cfd_by_hand goes on with the student
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import perfed
from perfed.algorithms.ds_fl import era
from perfed.algorithms.label_coding import LabelCode, nearest_levels, packed, unpacked
from perfed.algorithms.scarlet import sharpened
from perfed.core.admission import refusals
from perfed.core.channel import Channel
from perfed.core.declaration import Known, lines
from perfed.core.errors import ConfigError, Refused
from perfed.core.message import Message
from perfed.core.network import Network
from perfed.core.schema import option
from perfed.core.streams import stream_key, uniform_indices
from perfed.core.tensorfile import encode
from perfed.core.tree import Tree, Weights
from perfed.core.wire import At, Stage
from perfed.runs.simulation import Simulation
from tests.algorithms.test_limits import LOCAL, after, assert_equal, models
from tests.algorithms.test_numpy_reference import (
    CLIENTS,
    PUBLIC,
    SEED,
    STEPS,
    Array,
    World,
    descend,
    rate_in,
    softmax,
    stacked,
)
from tests.algorithms.test_numpy_reference import assert_equal as assert_model
from tests.conftest import STACKED, played, simulate, spec

NAMES = ["fedmd", "ds-fl", "cfd", "comet", "scarlet"]
LINEAR_STUDENT = {"name": "mlp", "hidden": []}
N = 10


class Wire(Channel):
    """Keeps what crossed in the newest round."""

    down_messages: Mapping[int, Message]
    up_messages: Mapping[int, Message]

    def down(self, messages: Any, sent: Any = None) -> None:
        self.down_messages = messages
        super().down(messages, sent)

    def up(self, messages: Any, sent: Any = None) -> None:
        self.up_messages = messages
        super().up(messages, sent)


# Rounds by hand: softmax regression.


def public_batches(world: World, client: int, round: int, steps: int = STEPS) -> Iterator[Array]:
    """Which public samples a client's steps on them see: the second stream of its round."""
    size = world.simulation.experiment.training.public_batch_size
    key = stream_key(SEED, "public-batches/1", client, round)
    yield from uniform_indices(key, (steps, size), PUBLIC, torch.device("cpu")).numpy()


def imitated(
    world: World, θ: Array, k: int, t: int, teacher: Array, some: Array, weight: float = 1.0
) -> Array:
    """Steps on KL(teacher ‖ student), the mean over those samples of a batch that are in some."""
    for drawn in public_batches(world, k, t):
        index = drawn[some[drawn]]
        if len(index):
            x = world.public_x[index]
            gradient = (softmax(x @ θ.T) - teacher[index]).T @ x / len(index)
            θ = θ - rate_in(t) * weight * gradient
    return θ


def digested(world: World, θ: Array, k: int, t: int, consensus: Array) -> Array:
    """Steps on the mean of |logit − consensus| over samples and classes."""
    for index in public_batches(world, k, t):
        x = world.public_x[index]
        θ = θ - rate_in(t) * np.sign(x @ θ.T - consensus[index]).T @ x / (len(index) * N)
    return θ


@pytest.mark.usefixtures("float64")
def test_fedmd_by_hand() -> None:
    world = World("fedmd", warmup_steps=2)
    own = dict.fromkeys(range(CLIENTS), world.initial())
    seen: set[int] = set()
    consensus: Array | None = None
    for t, drawn in world.rounds(4):
        for k in drawn:
            if k not in seen:
                warmup = world.batches(k, t, steps=2, stream=2)
                own[k] = descend(own[k], warmup, rate_in(t))
            if consensus is not None:
                own[k] = digested(world, own[k], k, t, consensus)
            own[k] = descend(own[k], world.batches(k, t), rate_in(t))
        assert not t or seen & set(drawn)  # no second warm-up
        seen |= set(drawn)
        consensus = np.mean([world.public_x @ own[k].T for k in drawn], axis=0)
        np.testing.assert_allclose(world.state["consensus"].numpy(), consensus, atol=1e-10)
        for k in range(CLIENTS):
            assert_model(world.evaluated(k, t)["personal"], own[k])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("aggregation", ["era", "simple"])
def test_ds_fl_by_hand(aggregation: str) -> None:
    world = World("ds-fl", temperature=0.2, aggregation=aggregation)
    own = dict.fromkeys(range(CLIENTS), world.initial())
    teacher: Array | None = None
    everything = np.ones(PUBLIC, dtype=bool)
    for t, drawn in world.rounds(3):
        for k in drawn:
            if teacher is not None:
                own[k] = imitated(world, own[k], k, t, teacher, everything)
            own[k] = descend(own[k], world.batches(k, t), rate_in(t))
        teacher = np.mean([softmax(world.public_x @ own[k].T) for k in drawn], axis=0)
        teacher = softmax(teacher / 0.2) if aggregation == "era" else teacher
        np.testing.assert_allclose(world.state["teacher"].numpy(), teacher, atol=1e-10)
        for k in range(CLIENTS):
            assert_model(world.evaluated(k, t)["personal"], own[k])


@pytest.mark.usefixtures("float64")
def test_comet_by_hand() -> None:
    """Centroids by trying every way to put clients into two clusters, sample by sample."""
    world = World("comet", clusters=2, weight=0.7)
    own = dict.fromkeys(range(CLIENTS), world.initial())
    centroids: Array | None = None  # (|P|, 2, N)
    everything = np.ones(PUBLIC, dtype=bool)
    chosen = set()
    for t, drawn in world.rounds(4):
        for k in drawn:
            if centroids is not None:
                said = softmax(world.public_x @ own[k].T)
                place = ((centroids - said[:, None]) ** 2).sum(2).argmin(1)
                chosen |= set(place.tolist())
                teacher = centroids[np.arange(PUBLIC), place]
                own[k] = imitated(world, own[k], k, t, teacher, everything, weight=0.7)
            own[k] = descend(own[k], world.batches(k, t), rate_in(t))
        answers = np.stack([softmax(world.public_x @ own[k].T) for k in drawn], axis=1)
        centroids = np.stack([best_pair(points) for points in answers])
        found = world.state["centroids"].numpy().swapaxes(0, 1)
        for one, other in zip(found, centroids, strict=True):
            np.testing.assert_allclose(in_order(one), in_order(other), atol=1e-10)
        for k in range(CLIENTS):
            assert_model(world.evaluated(k, t)["personal"], own[k])
    assert chosen == {0, 1}


def best_pair(points: Array) -> Array:
    """The two centroids with the lowest inertia, over all ways to divide a few points."""

    def halves(side: tuple[int, ...]) -> list[Array]:
        inside = np.isin(np.arange(len(points)), side)
        return [points[inside], points[~inside]]

    sides = [s for size in range(1, len(points)) for s in combinations(range(len(points)), size)]
    best = min(sides, key=lambda s: sum(((h - h.mean(0)) ** 2).sum() for h in halves(s)))
    return np.stack([half.mean(0) for half in halves(best)])


def in_order(rows: Array) -> Array:
    return rows[np.lexsort(rows.T)]


@pytest.mark.usefixtures("float64")
def test_scarlet_by_hand() -> None:
    """Caches as dictionaries; and what crosses is what nobody has yet."""
    β, D = 1.7, 3
    world = World("scarlet", exponent=β, duration=D, share=0.5)
    own = dict.fromkeys(range(CLIENTS), world.initial())
    labels: dict[int, Array] = {}
    made: dict[int, int] = {}
    caches: dict[int, dict[int, Array]] = {k: {} for k in range(CLIENTS)}
    held: dict[tuple[int, int], int] = {}
    taught: list[int] = []
    found = {"cached": 0, "expired": 0, "caught up": 0}
    channel = Wire()
    for t, drawn in world.rounds(7, channel):
        draws = np.random.default_rng(stream_key(SEED, "server/public-samples", round=t - 1))
        samples = sorted(draws.choice(PUBLIC, 15, replace=False).tolist())
        wanted = [i for i in samples if i not in made or t - made[i] >= D]
        found["cached"] += len(samples) - len(wanted)
        found["expired"] += sum(i in made for i in wanted)
        sent = []
        for k in drawn:
            new = [i for i in taught if held.get((k, i)) != made[i]]
            found["caught up"] += sum(made[i] < t - 1 for i in new)
            for i in new:
                caches[k][i], held[k, i] = labels[i], made[i]
            down = channel.down_messages[k]
            assert down["wanted"].tolist() == wanted
            assert ("taught" in down) == bool(t)
            if t:
                assert down["taught"].tolist() == taught
                assert down["new"].tolist() == new
                some = np.isin(np.arange(PUBLIC), taught)
                teacher = np.stack([caches[k].get(i, np.zeros(N)) for i in range(PUBLIC)])
                own[k] = imitated(world, own[k], k, t, teacher, some)
            own[k] = descend(own[k], world.batches(k, t), rate_in(t))
            sent.append(softmax(world.public_x[wanted] @ own[k].T))
            up = channel.up_messages[k]["soft_labels"].numpy()
            np.testing.assert_allclose(up, sent[-1], atol=1e-10)
        powers = np.mean(sent, axis=0) ** β
        for i, row in zip(wanted, powers / powers.sum(axis=1, keepdims=True), strict=True):
            labels[i], made[i] = row, t
        taught = samples
        for i, row in labels.items():
            np.testing.assert_allclose(world.state["labels"][i].numpy(), row, atol=1e-10)
        for k in range(CLIENTS):
            assert_model(world.evaluated(k, t)["personal"], own[k])
    assert all(found.values()), found


def every_row(total: int, classes: int) -> Array:
    """All rows of whole numbers that sum to ``total``: stars and bars."""
    rows = []
    for bars in combinations(range(total + classes - 1), classes - 1):
        edges = [-1, *bars, total + classes - 1]
        rows.append([b - a - 1 for a, b in pairwise(edges)])
    return np.array(rows)


def nearest_by_trying(probabilities: Array, bits: int) -> Array:
    total = 2**bits - 1
    rows = every_row(total, probabilities.shape[1])
    distances = ((total * probabilities[:, None] - rows) ** 2).sum(axis=2)
    return rows[distances.argmin(axis=1)]


def adam(world: World, θ: Array, teacher: Array, round: int, steps: int, batch: int) -> Array:
    """The student's steps, of one size."""
    key = stream_key(SEED, "server/distillation/student", round=round)
    m, v = np.zeros_like(θ), np.zeros_like(θ)
    drawn = uniform_indices(key, (steps, batch), PUBLIC, torch.device("cpu")).numpy()
    for n, index in enumerate(drawn, 1):
        x = world.public_x[index]
        g = (softmax(x @ θ.T) - teacher[index]).T @ x / batch
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        θ = θ - 0.01 * (m / (1 - 0.9**n)) / (np.sqrt(v / (1 - 0.999**n)) + 1e-8)
    return θ


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("up", "down", "begin"), [(1, 1, "own"), (2, 1, "own"), (1, 2, "initial"), (32, 32, "own")]
)
def test_cfd_by_hand(up: int, down: int, begin: str) -> None:
    options = {"student_steps": 5, "rate": 0.01, "batch_size": 7, "begin": begin}
    world = World("cfd", bits_up=up, bits_down=down, student=LINEAR_STUDENT, **options)

    def quantised(probabilities: Array, bits: int) -> Array:
        if bits == 32:
            return probabilities
        return nearest_by_trying(probabilities, bits) / (2**bits - 1)

    student = stacked(world.simulation.server(-1).initial("student", 0).params)
    own = dict.fromkeys(range(CLIENTS), world.initial())
    labels: Array | None = None
    everything = np.ones(PUBLIC, dtype=bool)
    for t, drawn in world.rounds(3):
        said = []
        for k in drawn:
            θ = own[k] if begin == "own" else world.initial()
            if labels is not None:
                θ = imitated(world, θ, k, t, labels, everything)
            own[k] = descend(θ, world.batches(k, t), rate_in(t))
            said.append(quantised(softmax(world.public_x @ own[k].T), up))
        before = student
        student = adam(world, student, np.mean(said, axis=0), t, 5, 7)
        assert np.abs(student - before).max() > 1e-3
        labels = quantised(softmax(world.public_x @ student.T), down)
        code = LabelCode(down)
        found = code.probabilities(world.state["labels"], N).numpy()
        np.testing.assert_allclose(found, labels, atol=1e-10)
        assert_model(world.state["student"], student)
        for k in range(CLIENTS):
            evaluated = world.evaluated(k, t)
            assert_model(evaluated["personal"], own[k])
            assert_model(evaluated["global"].weights, student)


# Limit cases.


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "fedmd", "distil_steps": 0, "warmup_steps": 0},
        {"name": "ds-fl", "distil_steps": 0},
        {"name": "cfd", "distil_steps": 0, "student_steps": 2},
        {"name": "comet", "distil_steps": 0},
        {"name": "scarlet", "distil_steps": 0},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_without_steps_on_public_samples_they_are_local_training_to_the_bit(
    algorithm: dict[str, Any],
) -> None:
    assert_equal(models(after(3, algorithm), "personal"), models(after(3, LOCAL), "personal"))


@pytest.mark.parametrize("name", NAMES)
def test_no_default_turns_them_into_local_training(name: str) -> None:
    mlp = {"models": {"architectures": ["mlp"]}}
    taught, alone = after(3, spec(name), **mlp), after(3, LOCAL, **mlp)
    moved = [
        float((one["1.weight"] - other["1.weight"]).abs().max())
        for one, other in zip(models(taught, "personal"), models(alone, "personal"), strict=True)
    ]
    assert max(moved) > 1e-4


def test_cfd_with_all_bits_and_no_student_is_ds_fl_unsharpened_to_the_bit() -> None:
    plain = {"name": "cfd", "bits_up": 32, "bits_down": 32, "student_steps": 0}
    simple = {"name": "ds-fl", "aggregation": "simple"}
    assert_equal(models(after(3, plain), "personal"), models(after(3, simple), "personal"))


@pytest.mark.usefixtures("float64")
def test_comet_with_one_cluster_is_ds_fl_unsharpened() -> None:
    simple = models(after(3, {"name": "ds-fl", "aggregation": "simple"}), "personal")
    one_cluster = models(after(3, {"name": "comet", "clusters": 1, "weight": 1}), "personal")
    for one, other in zip(one_cluster, simple, strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-10) for name in other)


@pytest.mark.usefixtures("float64")
def test_scarlet_without_cache_sharpening_or_choice_is_ds_fl_unsharpened() -> None:
    bare = {"name": "scarlet", "exponent": 1, "duration": 0, "share": 1}
    simple = {"name": "ds-fl", "aggregation": "simple"}
    pairs = zip(
        models(after(4, bare), "personal"), models(after(4, simple), "personal"), strict=True
    )
    for one, other in pairs:
        assert all(torch.allclose(one[name], other[name], atol=1e-10) for name in other)


def test_scarlet_asks_once_while_a_label_lasts() -> None:
    """All samples in each round, and D = 3: every third round is about new labels."""
    channel, asked = Wire(), []
    simulation = played(0, algorithm={"name": "scarlet", "share": 1, "duration": 3})
    for round in range(7):
        simulation.play_round(round, channel)
        asked.append({len(message["wanted"]) for message in channel.down_messages.values()})
    assert asked == [{30}, {0}, {0}, {30}, {0}, {0}, {30}]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_set_smaller_than_a_batch_teaches(name: str) -> None:
    few = {"data": {"name": "digits", "public": 3}, "training": {"public_batch_size": 64}}
    taught = after(3, spec(name), **few)
    alone = after(3, LOCAL, **few)
    pairs = zip(models(taught, "personal"), models(alone, "personal"), strict=True)
    assert any(not torch.equal(one[name], other[name]) for one, other in pairs for name in one)


@pytest.mark.parametrize("name", NAMES)
def test_batchnorm_follows_private_steps_on_public_samples(name: str) -> None:
    """What a network says of public samples uses their statistics, also right after steps on
    private samples: without a lesson, they would be those of the first network for ever."""
    options = spec(name) | {"distil_steps": 0}
    simulation = after(1, options, models={"architectures": [{"name": "cnn", "batchnorm": True}]})
    for record in simulation.population.records.values():
        assert int(record.weights.public_buffers["1.num_batches_tracked"]) >= 2


def test_what_is_only_observed_has_no_way_back() -> None:
    """A gradient of nothing takes twice as long as what it is of."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    found: list[bool] = []
    module[1].register_forward_hook(lambda _, given, out: found.append(out.requires_grad))
    params = dict(module.named_parameters())
    own, public = ({n: b.clone() for n, b in module.named_buffers()} for _ in range(2))
    x = torch.arange(12.0).view(4, 3)
    Network(module, Weights(params, own, public), "separate").observe(x)
    assert found == [False]
    torch.testing.assert_close(public["0.running_mean"], 0.1 * x.mean(0))
    assert not own["0.running_mean"].any()


@pytest.mark.parametrize("name", NAMES)
def test_they_are_stacked(name: str, caplog: pytest.LogCaptureFixture) -> None:
    played(2, how=STACKED, algorithm=spec(name), models=["mlp", {"name": "cnn", "batchnorm": True}])
    assert not caplog.records


# Closed forms.

ROWS = st.integers(0, 10**6).map(
    lambda seed: torch.from_numpy(np.random.default_rng(seed).dirichlet([0.3] * 4, size=5))
)


@given(ROWS, st.integers(1, 4))
@settings(max_examples=30)
def test_the_quantiser_finds_the_nearest_row(rows: torch.Tensor, bits: int) -> None:
    total = 2**bits - 1
    levels = nearest_levels(rows, total)
    assert (levels >= 0).all()
    assert (levels.sum(1) == total).all()
    assert np.array_equal(levels.numpy(), nearest_by_trying(rows.numpy(), bits))
    assert torch.equal(nearest_levels(levels / total, total), levels)  # there already


def test_the_quantiser_takes_rows_that_are_rounded_equal_or_certain() -> None:
    rows = torch.tensor([[1.0, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0], [0.994, 0, 0]])
    for bits in (1, 2, 3, 8):
        total = 2**bits - 1
        levels = nearest_levels(rows.bfloat16(), total)
        assert (levels.sum(1) == total).all()
        assert levels[0].tolist() == levels[3].tolist() == [total, 0, 0]
        assert levels[1].max() - levels[1].min() <= 1
    assert LabelCode(1).symbols(rows).tolist() == [[0], [0], [0], [0]]
    assert LabelCode(2).symbols(rows).tolist()[1:3] == [[1, 1, 1], [2, 1, 0]]
    assert torch.equal(
        LabelCode(1).probabilities(torch.tensor([[2], [0]]), 3), torch.eye(3)[[2, 0]]
    )


@given(
    st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 300), st.sampled_from([1, 2, 5, 8])
)
@settings(max_examples=40)
def test_what_is_coded_comes_back_in_as_many_bytes_as_it_should(
    seed: int, samples: int, classes: int, bits: int
) -> None:
    random, code = np.random.default_rng(seed), LabelCode(bits)
    symbols = code.symbols(torch.from_numpy(random.dirichlet([0.1] * classes, size=samples)))
    before = code.symbols(torch.from_numpy(random.dirichlet([0.1] * classes, size=samples)))
    which = torch.from_numpy(random.random(samples) < 0.4)
    data = code.encode(symbols, which, classes)
    a_row = np.ceil(np.log2(classes)) if bits == 1 else bits * classes
    assert data.dtype == torch.uint8
    assert len(data) == np.ceil(samples / 8) + np.ceil(int(which.sum()) * a_row / 8)
    assert code.can_decode(data, samples, classes)
    expected = torch.where(which[:, None], symbols, before)
    assert torch.equal(code.decode(data, before, classes), expected)
    for wrong in (data[:-1], torch.cat([data, data[:1]]), data[:0]):
        assert not code.can_decode(wrong, samples, classes)


def test_numbers_are_packed_highest_bit_first() -> None:
    data = packed(torch.tensor([5, 2, 7]), 3)
    assert data.tolist() == [0b10101011, 0b10000000]
    assert unpacked(data, 3, 3).tolist() == [5, 2, 7]
    assert np.array_equal(
        packed(torch.tensor([1, 0, 1] * 5), 1).numpy(), np.packbits([1, 0, 1] * 5)
    )


def test_bytes_that_say_what_cannot_be_are_refused() -> None:
    """A class that does not exist, levels that sum to something else, and a row too many."""
    facts = Known({"P": 3, "N": 5}, 1, lambda network: None)  # type: ignore[arg-type, return-value]

    def fault(bits: int, data: torch.Tensor) -> str:
        declared = {"labels": LabelCode(bits).array()}
        return refusals({0: Message(labels=data)}, declared, lambda client: facts).get(0, "")

    every = packed(torch.ones(3), 1)
    assert fault(1, torch.cat([every, packed(torch.tensor([4, 0, 2]), 3)])) == ""
    assert "coded labels" in fault(1, torch.cat([every, packed(torch.tensor([5, 0, 2]), 3)]))
    assert "coded labels" in fault(1, torch.cat([every, packed(torch.tensor([4, 0, 2, 2]), 3)]))
    right = [[3, 0, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 2, 1, 0]]
    wrong = [*right[:2], [0, 0, 2, 2, 0]]
    assert fault(2, torch.cat([every, packed(torch.tensor(right).flatten(), 2)])) == ""
    assert "coded labels" in fault(2, torch.cat([every, packed(torch.tensor(wrong).flatten(), 2)]))
    assert "must be uint8" in fault(1, torch.zeros(3))


@given(ROWS, st.floats(0.1, 6), st.floats(0.1, 6))
@settings(max_examples=30)
def test_sharpening_by_a_power(rows: torch.Tensor, a: float, b: float) -> None:
    assert torch.allclose(sharpened(rows, 1), rows)
    assert torch.allclose(sharpened(rows, 0), torch.full_like(rows, 1 / 4))
    assert torch.allclose(sharpened(sharpened(rows, a), b), sharpened(rows, a * b), atol=1e-9)
    powers = rows**a
    assert torch.allclose(sharpened(rows, a), powers / powers.sum(1, keepdim=True))


def test_sharpening_to_the_limit_is_the_most_probable_class() -> None:
    mean = torch.tensor([[0.4, 0.35, 0.25], [0.1, 0.2, 0.7]])
    assert torch.allclose(sharpened(mean, 500), torch.eye(3)[[0, 2]])
    assert torch.allclose(era(mean, 1e-3), torch.eye(3)[[0, 2]])
    even = torch.full((1, 200), 1 / 200)
    assert torch.allclose(sharpened(even, 60), even)  # powers that are too small for float32


def test_era_is_a_softmax_of_probabilities() -> None:
    """Two classes: the logistic function of their difference over T. It is not Enhanced ERA."""
    mean = torch.tensor([[0.6, 0.4]])
    assert era(mean, 0.1)[0, 0].item() == pytest.approx(1 / (1 + np.exp(-2)))
    assert sharpened(mean, 2)[0, 0].item() == pytest.approx(0.36 / 0.52)


# What a round costs.


def size(**arrays: torch.Tensor) -> int:
    return len(encode(arrays))


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [("fedmd", "logits", "consensus"), ("ds-fl", "soft_decisions", "teacher")],
)
def test_a_round_costs_a_number_for_each_sample_and_class(name: str, up: str, down: str) -> None:
    """Three of six clients; nothing goes down in the first round."""
    channel, table = Channel(), torch.zeros(30, N)
    played(3, channel, algorithm=spec(name))
    assert channel.total.up_parameters == 3 * 3 * 30 * N
    assert channel.total.down_parameters == 2 * 30 * N
    assert channel.total.up_bytes == 3 * 3 * size(**{up: table})
    assert channel.total.down_bytes == 2 * 3 * size(**{down: table})


@pytest.mark.parametrize("bits", [1, 3])
def test_a_round_of_cfd_costs_a_bit_a_sample_and_the_labels_that_changed(bits: int) -> None:
    a_row = 4 if bits == 1 else bits * N
    options = {"bits_up": bits, "bits_down": bits, "student_steps": 5}
    simulation = played(0, algorithm={"name": "cfd", **options})
    number = torch.tensor(0)
    before: dict[int, torch.Tensor] = {}  # what clients had said when they last answered
    answered: dict[int, int] = {}
    taught: list[torch.Tensor | None] = []  # in each round
    saved = 0

    def bytes_of(rows: int) -> torch.Tensor:
        return torch.zeros(-(-30 // 8) + -(-rows * a_row // 8), dtype=torch.uint8)

    for round in range(5):
        channel, up, down = Channel(), 0, 0
        taught.append(simulation.progress.state.get("labels"))
        drawn, _ = simulation.play_round(round, channel)
        for k in drawn:
            said = simulation.population.records[k].state["said"]
            rows = 30 if k not in before else changed_in([before[k], said])
            up += size(labels=bytes_of(rows))
            if taught[-1] is None:
                down += size(round=number, since=number)
            else:
                since = answered.get(k, -1)
                history = [one for one in taught[since + 1 :] if one is not None]
                known = [taught[since]] if since >= 0 else []
                rows = 30 if not known or known[0] is None else changed_in([*known, *history])  # type: ignore[list-item]
                down += size(labels=bytes_of(rows), round=number, since=number)
                saved += 30 - rows
            before[k], answered[k] = said, round
        assert (channel.total.up_bytes, channel.total.down_bytes) == (up, down)
    assert saved > 0
    plain = 30 * N * 4
    assert bytes_of(30).nbytes * (60 if bits == 1 else 10) < plain


def changed_in(tables: list[torch.Tensor]) -> int:
    """How many rows became another from one table to the next, anywhere."""
    moves = [(a != b).any(1) for a, b in pairwise(tables)]
    return int(torch.stack(moves).any(0).sum())


def test_a_round_of_scarlet_costs_the_labels_that_are_wanted_or_lacking() -> None:
    channel, total = Wire(), 0
    simulation = played(0, algorithm={"name": "scarlet", "share": 0.5, "duration": 3})
    for round in range(6):
        simulation.play_round(round, channel)
        for down, up in zip(
            channel.down_messages.values(), channel.up_messages.values(), strict=True
        ):
            wanted, new = len(down["wanted"]), len(down["new"]) if round else 0
            payload = 4 * N * wanted + 4 * wanted + (4 * 15 + 4 * new + 4 * N * new) * (round > 0)
            crossed = [*down.arrays.values(), *up.arrays.values()]
            assert sum(t.nbytes for t in crossed) == payload
            total += len(encode(down.arrays)) + len(encode(up.arrays))
    assert channel.total.bytes == total


# Lost answers, and options that cannot be.


@dataclass(frozen=True)
class Lossy(Stage):
    """Some answers of some clients never arrive."""

    lost: tuple[int, ...] = option((1, 2, 4), "the rounds")

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        if at.round in self.lost and at.client % 2:
            raise Refused("lost")
        return message, state


def lossy(algorithm: dict[str, Any]) -> Iterator[tuple[Simulation, Tree, list[int]]]:
    """Round by round, with the server's state before it and who was selected."""
    simulation = played(0, algorithm=algorithm, wire=[f"{__name__}:Lossy"], clients_per_round=5)
    for round in range(7):
        before = simulation.progress.state
        drawn, _ = simulation.play_round(round, Channel())
        yield simulation, before, drawn


@pytest.mark.parametrize("bits", [1, 2])
def test_cfd_both_ends_agree_after_lost_answers(bits: int) -> None:
    lost = 0
    for simulation, before, drawn in lossy(
        {"name": "cfd", "bits_up": bits, "bits_down": bits, "student_steps": 5}
    ):
        lost += len(simulation.refused)
        for k in drawn:
            state = simulation.population.records[k].state
            if "labels" in before:
                assert torch.equal(state["taught"], before["labels"])
            if k not in simulation.refused:
                assert torch.equal(simulation.progress.state["heard"][str(k)], state["said"])
    assert lost > 3


def test_scarlet_both_ends_agree_after_lost_answers() -> None:
    lost = 0
    for simulation, before, drawn in lossy({"name": "scarlet", "share": 0.6, "duration": 2}):
        lost += len(simulation.refused)
        for k in drawn if "taught" in before else []:
            cache, rows = simulation.population.records[k].state["cache"], before["taught"].long()
            assert torch.equal(cache[rows], before["labels"][rows])
    assert lost > 3


def test_scarlet_refuses_another_number_of_rows_than_was_wanted() -> None:
    simulation = simulate(algorithm="scarlet")
    simulation.begin(Channel())
    declared = simulation.algorithm.messages().up
    received = Message(wanted=torch.tensor([3, 5], dtype=torch.int32))
    facts = Known({"P": 30, "N": 2}, 1, lambda network: None, received=received)  # type: ignore[arg-type, return-value]
    for rows, reason in ((2, ""), (3, "has 3 rows, must be 2, as wanted"), (0, "has 0 rows")):
        message = Message(soft_labels=torch.full((rows, 2), 0.5))
        assert reason in refusals({0: message}, declared, lambda client: facts).get(0, "")
    wrong = Message(soft_labels=torch.full((2, 2), 0.7))
    assert "sums to 1.4" in refusals({0: wrong}, declared, lambda client: facts)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"name": "cfd", "bits_up": 9},
        {"name": "cfd", "bits_down": 33},
        {"name": "cfd", "bits_up": 0},
        {"name": "cfd", "begin": "anywhere"},
        {"name": "ds-fl", "temperature": 0},
        {"name": "comet", "clusters": 0},
        {"name": "comet", "weight": -1},
        {"name": "scarlet", "share": 0},
        {"name": "scarlet", "exponent": -1},
        {"name": "fedmd", "warmup_steps": -1},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=list(options)[1]):
        perfed.algorithms.build(options)


def test_what_crosses_is_said_in_words() -> None:
    assert lines(perfed.algorithms.build("cfd").messages())[:2] == [
        "client → server: labels, B bytes of coded labels, 1 bit each",
        "server → client: labels, B bytes of coded labels, 1 bit each, or nothing",
    ]
