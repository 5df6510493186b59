"""Means by class of what a client's network says about its training samples.

A message has a row for every class. The counts beside it say which rows are means: a class that a
client does not have has a count of zero, and its row means nothing.

One client must not end everybody's run by features of 1e30. So features have a bound by
declaration, far above those of any network that learns; and the server shortens prototypes that are
many times as long as those of most clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from perfed.core.algorithm import Client, Reply
from perfed.core.declaration import COUNTS, Array, Entries, Reals

LARGEST_FEATURE = 1e6
LONGEST = 10.0  # times the median of what clients sent in a round
FEATURES = Reals(-LARGEST_FEATURE, LARGEST_FEATURE)
PROTOTYPES: Entries = {
    "prototypes": Array(("N", "F"), FEATURES),
    "counts": Array(("N",), COUNTS),
}
"""What a client sends: the mean features of its classes, and of how many samples each is."""
KNOWN = Array(("N",), Reals(0.0, 1.0))
"""1 for a class of which the server knows something, 0 for another."""

Parameters = dict[str, Tensor]
"""Of what a server trains, by name."""


def class_means(client: Client, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of ``rows``, one for each training sample, by class; and the samples of each."""
    sums, counts = client.class_sums(rows)
    return sums / counts.clamp(min=1)[:, None], counts.to(sums)


def present(counts: Tensor) -> Tensor:
    """Which classes there are. A count may have been blurred on the way; a true one is whole."""
    return counts >= 0.5


def received(replies: Sequence[Reply], name: str) -> Tensor:
    """What all clients sent by this name, one after another along a new first dimension."""
    return torch.stack([reply.message[name] for reply in replies])


def received_prototypes(replies: Sequence[Reply]) -> Tensor:
    """All prototypes, (m, N, F); one that is too long keeps its direction only."""
    rows, there = received(replies, "prototypes"), present(received(replies, "counts"))
    if not there.any():
        return rows
    lengths = rows.norm(dim=2)
    longest = LONGEST * lengths[there].median()
    return torch.where((lengths > longest)[..., None], rows * (longest / lengths)[..., None], rows)


def labelled_prototypes(replies: Sequence[Reply]) -> tuple[Tensor, Tensor]:
    """All prototypes that clients sent, one below the other, and the class of each."""
    there = present(received(replies, "counts"))
    return received_prototypes(replies)[there], there.nonzero()[:, 1]


def shuffled_batches(
    rows: Tensor, epochs: int, batch_size: int, random: np.random.Generator
) -> Iterator[Tensor]:
    """Positions of ``rows``, in a new order in every epoch, in batches. No batch is dropped: the
    last of an epoch may be smaller."""
    for _ in range(epochs):
        order = torch.from_numpy(random.permutation(len(rows)))
        yield from torch.split(order.to(rows.device), batch_size)


def descended(
    parameters: Parameters,
    loss: Callable[[Parameters, Tensor], Tensor],
    batches: Iterable[Tensor],
    rate: float,
) -> Parameters:
    """After a step of SGD for each batch of positions."""
    for batch in batches:
        parameters = {name: t.detach().requires_grad_() for name, t in parameters.items()}
        gradients = torch.autograd.grad(loss(parameters, batch), list(parameters.values()))
        pairs = zip(parameters.items(), gradients, strict=True)
        parameters = {name: t.detach() - rate * gradient for (name, t), gradient in pairs}
    return parameters
