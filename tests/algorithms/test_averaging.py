"""Size counts once: in the draw of clients, or else in the mean of their models."""

import numpy as np
import pytest
import torch

from perfed.core.algorithm import ClientInfo, Reply
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.core.selection import counted, select_clients
from tests.conftest import simulate

AVERAGING = ["fedavg", "fedavg-ft", "fedprox", "feddf", "per-fedavg", "ditto", "hypcluster"]


@pytest.mark.parametrize("name", AVERAGING)
def test_every_mean_of_models_goes_by_the_weight_of_replies(name: str) -> None:
    """And not by the samples that messages tell."""
    options = {"steps": 0} if name == "feddf" else {}
    simulation = simulate(algorithm={"name": name, **options}, models=["mlp"])
    algorithm, server = simulation.algorithm, simulation.server(0)
    (label,) = server.architectures
    start = server.initial(label, 0)
    replies = [
        Reply(
            ClientInfo(client, label, samples),
            Message(
                model=start._replace(params={n: t * 0 + value for n, t in start.params.items()}),
                samples=torch.tensor(samples),
                cluster=torch.tensor(0),
            ),
            weight,
        )
        for client, (samples, value, weight) in enumerate([(100, 2.0, 1.0), (1, 6.0, 3.0)])
    ]
    merged = algorithm.merge(server, algorithm.start(server), replies)[label]
    mean = merged["0"] if name == "hypcluster" else merged
    assert {float(value) for tensor in mean.params.values() for value in tensor.unique()} == {5.0}


@pytest.mark.parametrize(
    ("selection", "averaging", "drawn", "by_samples"),
    [
        ("uniform", "size-once", 3, True),
        ("by-size", "size-once", 3, False),
        ("by-size", "size-once", 6, True),  # everyone takes part: nothing was drawn by size
        ("by-size", "by-size", 3, True),
        ("uniform", "by-size", 3, True),
    ],
)
def test_the_size_of_a_client_counts_once(
    selection: str, averaging: str, drawn: int, by_samples: bool
) -> None:
    simulation = simulate(
        algorithm={"name": "fedavg"},
        models=["mlp"],
        selection=selection,
        averaging=averaging,
        clients_per_round=drawn,
    )
    channel = Channel()
    simulation.begin(channel)
    seen: list[Reply] = []
    merge = type(simulation.algorithm).merge
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(simulation.algorithm),
            "merge",
            lambda self, server, state, replies: (
                seen.extend(replies) or merge(self, server, state, replies)
            ),
        )
        simulation.play_round(0, channel)
    assert len(seen) == drawn
    assert len({reply.client.samples for reply in seen}) > 1
    expected = [float(reply.client.samples) if by_samples else 1.0 for reply in seen]
    assert [reply.weight for reply in seen] == expected


def test_over_many_draws_a_client_counts_as_much_as_it_has() -> None:
    """Both ways, nearly: draws without replacement take a little from the largest, and the sum that
    a weighted mean is divided by varies. With size counted twice, large clients count for more."""
    sizes = np.array([1, 2, 3, 4, 5, 6, 7, 8] * 20)
    wanted = sizes / sizes.sum()
    for by_size, twice in ((False, False), (True, False), (True, True)):
        share = np.zeros(len(sizes))
        for round in range(4000):
            drawn = select_clients(sizes, 16, by_size, 0, round)
            counts = [counted(int(sizes[k]), by_size and not twice, 16, len(sizes)) for k in drawn]
            share[drawn] += np.array(counts) / sum(counts) / 4000
        by_count = [share[sizes == size].sum() / wanted[sizes == size].sum() for size in (1, 8)]
        if twice:
            assert by_count[0] < 0.5
            assert by_count[1] > 1.3
        else:
            assert by_count == pytest.approx([1, 1], abs=0.15)
