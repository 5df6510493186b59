"""The cross-entropy of a stack is that of each client."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from perfed.engines.stacked import losses
from perfed.engines.stacked.losses import MappedLosses

CLIENTS, SAMPLES, CLASSES = 3, 5, 4


def logits(batch_last: bool) -> Tensor:
    random = torch.Generator().manual_seed(0)
    z = torch.randn(CLIENTS, CLASSES, SAMPLES, generator=random, dtype=torch.float64).mT
    return (z if batch_last else z.contiguous()).requires_grad_()


LABELS = torch.tensor([[0, 1, 2, 3, 0], [3, 3, -100, 1, 0], [2, 2, 2, 2, 1]])


@pytest.mark.parametrize("batch_last", [False, True])
def test_losses_and_gradients_are_those_of_each_client(batch_last: bool) -> None:
    z = logits(batch_last)
    with MappedLosses():
        mapped = vmap(F.cross_entropy)(z, LABELS)
    alone = torch.stack([F.cross_entropy(*one) for one in zip(z, LABELS, strict=True)])
    torch.testing.assert_close(mapped, alone)
    slopes = [torch.autograd.grad(loss.square().sum(), z)[0] for loss in (mapped, alone)]
    torch.testing.assert_close(*slopes)


def test_it_is_computed_for_all_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    plain = losses._losses

    def watched(rows: Tensor, classes: Tensor, ignore_index: int) -> Tensor:
        shapes.append(tuple(rows.shape))
        return plain(rows, classes, ignore_index)

    monkeypatch.setattr(losses, "_losses", watched)
    with MappedLosses():
        vmap(F.cross_entropy)(logits(False), LABELS)
    assert shapes == [(CLIENTS, SAMPLES, CLASSES)]


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"weight": torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"ignore_index": 2},
    ],
)
def test_what_else_is_asked_for_is_as_torch_has_it(options: dict[str, Any]) -> None:
    z, labels = logits(False), LABELS.clamp(min=0)
    with MappedLosses():
        mapped = vmap(lambda z, y: F.cross_entropy(z, y, **options))(z, labels)
    alone = [F.cross_entropy(*one, **options) for one in zip(z, labels, strict=True)]
    torch.testing.assert_close(mapped, torch.stack(alone))


def test_targets_that_are_probabilities_are_as_torch_has_them() -> None:
    z = logits(False)
    with MappedLosses():
        mapped = vmap(F.cross_entropy)(z, z.detach().softmax(2))
    alone = [F.cross_entropy(one, one.detach().softmax(1)) for one in z]
    torch.testing.assert_close(mapped, torch.stack(alone))
