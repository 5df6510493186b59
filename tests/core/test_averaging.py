"""Means of trees, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perfed.core import averaging
from perfed.core.averaging import weighted_average
from perfed.core.tree import Weights, flatten

SHARES = [1.0, 3.0, 4.0]


def tree(seed: int) -> dict[str, Any]:
    """Tensors of several types, sizes and layouts."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    params = {"large": normal(40, 50), "small": normal(7), "turned": normal(3, 5).mT}
    buffers = {"mean": normal(7), "count": torch.tensor(seed * 5), "half": normal(6).bfloat16()}
    return {"model": Weights(params, buffers), "beside": {"wide": normal(2, 2).double()}}


def expected(tensors: list[Tensor]) -> np.ndarray:
    """In the same order, so to the bit."""
    total = np.zeros(tuple(tensors[0].shape))
    for share, tensor in zip(SHARES, tensors, strict=True):
        total = total + tensor.double().numpy() * (share / sum(SHARES))
    return total


@pytest.mark.parametrize("at_once", [1, 30, 1 << 18])
def test_mean_of_every_tensor(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are joined."""
    monkeypatch.setattr(averaging, "AT_ONCE", at_once)
    trees = [tree(seed) for seed in range(3)]
    each = [flatten(one) for one in trees]
    found = weighted_average(trees, SHARES)
    assert isinstance(found["model"], Weights)
    flat = flatten(found)
    assert [*flat] == [*each[0]]
    for name, mean in flat.items():
        like = each[0][name]
        exact = torch.as_tensor(expected([one[name] for one in each]))
        whole = not like.is_floating_point()
        assert (mean.dtype, mean.shape) == (like.dtype, like.shape)
        assert torch.equal(mean, (exact.round() if whole else exact).to(like.dtype)), name
    memory = {mean.untyped_storage().data_ptr() for mean in flat.values()}
    assert len(memory) == len(flat)  # each is its own: to keep one does not keep others
    assert all(torch.equal(now, before) for now, before in with_before(trees))


def with_before(trees: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor]]:
    now = [tensor for one in trees for tensor in flatten(one).values()]
    before = [tensor for seed in range(3) for tensor in flatten(tree(seed)).values()]
    return list(zip(now, before, strict=True))


def test_mean_of_tensors_alone() -> None:
    means = weighted_average([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])], [1, 1])
    assert means.tolist() == [2.0, 4.0]
