"""Whole numbers in few bits: probabilities as levels, and numbers packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def nearest_levels(probabilities: Tensor, total: int) -> Tensor:
    """Whole numbers that sum to ``total`` in each row, nearest in ℓ2 to ``total`` times the row:
    each is rounded down, and what is missing goes to the largest remainders, one each."""
    scaled = probabilities.double()
    scaled = scaled / scaled.sum(1, keepdim=True) * total
    levels = scaled.floor()
    missing = total - levels.sum(1, keepdim=True)
    order = (scaled - levels).argsort(dim=1, descending=True, stable=True)
    return (levels + (order.argsort(dim=1) < missing)).long()


def units_of(levels: Tensor, total: int) -> Tensor:
    """The class of each unit, of (rows, N) levels that sum to ``total``: the class with most units
    first; where two have as many, the lower."""
    order = levels.argsort(dim=1, descending=True, stable=True)
    each = torch.repeat_interleave(order.flatten(), levels.gather(1, order).flatten())
    return each.view(len(levels), total)


def levels_of(units: Tensor, classes: int) -> Tensor:
    """How many units of each class there are in a row."""
    levels = torch.zeros(len(units), classes, dtype=torch.long, device=units.device)
    return levels.scatter_add_(1, units.long(), torch.ones_like(units, dtype=torch.long))


def packed(values: Tensor, width: int) -> Tensor:
    """Whole numbers in ``width`` bits each, highest bit first, one after another, as bytes."""
    shifts = torch.arange(width - 1, -1, -1, device=values.device)
    bits = (values.int()[:, None] >> shifts & 1).flatten()
    octets = pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (octets << torch.arange(7, -1, -1, device=values.device)).sum(1).to(torch.uint8)


def unpacked(data: Tensor, width: int, count: int) -> Tensor:
    """The first ``count`` numbers of what :func:`packed` has made."""
    octet = torch.arange(7, -1, -1, device=data.device)
    bits = (data.int()[:, None] >> octet & 1).flatten()[: count * width].view(count, width)
    return (bits << torch.arange(width - 1, -1, -1, device=data.device)).sum(1)


def bytes_for(count: int, width: int) -> int:
    return -(-count * width // 8)
