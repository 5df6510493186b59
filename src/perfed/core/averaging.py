"""Means of models, and of whatever else is a tree of tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from perfed.core.errors import ConfigError
from perfed.core.tree import Weights

Averaged = TypeVar("Averaged", Weights, dict[str, Any], Tensor)
AT_ONCE = 1 << 18
"""Numbers in small tensors that are joined: a call for all of them costs little more than a call
for one."""


def weighted_average(trees: Sequence[Averaged], amounts: Sequence[float]) -> Averaged:
    """The mean of models, parameters and buffers alike, or of parts of models, or of any trees of
    tensors that have the same names, in proportion to ``amounts``."""
    if not all(0 <= amount < math.inf for amount in amounts) or not sum(amounts):
        found = ", ".join(f"{float(amount):g}" for amount in amounts[:5])
        raise ConfigError(
            f"weighted_average by amounts {found}: each must be at least 0, and one of them more"
        )
    average: Averaged = _average(trees, [amount / sum(amounts) for amount in amounts])
    return average


def _average(trees: Sequence[Any], shares: Sequence[float]) -> Any:
    columns = zip(*(_leaves(tree, trees[0]) for tree in trees), strict=True)
    means = [mean for few in _in_parts(columns) for mean in _means(few, shares)]
    return _with_leaves(trees[0], iter(means))


def _in_parts(columns: Iterable[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Neighbours of one type that together are small, or one alone."""
    part: list[tuple[Tensor, ...]] = []
    numbers = 0
    for column in columns:
        first = column[0]
        numbers += first.numel()
        if part and (numbers > AT_ONCE or _kind(part[-1][0]) != _kind(first)):
            yield part
            part, numbers = [], first.numel()
        part.append(column)
    if part:
        yield part


def _kind(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.device


def _means(columns: Sequence[tuple[Tensor, ...]], shares: Sequence[float]) -> list[Tensor]:
    """A mean for each column, all of them as one vector."""
    like = [column[0] for column in columns]
    total = torch.zeros(sum(t.numel() for t in like), dtype=torch.float64, device=like[0].device)
    scaled = torch.empty_like(total)  # in place: new memory for every client costs more than sums
    for number, share in enumerate(shares):
        total += scaled.copy_(_vector([column[number] for column in columns])).mul_(share)
    if not like[0].is_floating_point():  # BatchNorm's count of batches
        total = total.round()
    mean = total.to(like[0].dtype)
    if len(like) == 1:
        return [mean.view_as(like[0])]
    each = torch.split(mean, [t.numel() for t in like])
    return [own.clone().view_as(t) for own, t in zip(each, like, strict=True)]


def _vector(tensors: list[Tensor]) -> Tensor:
    vector: Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return vector


def _leaves(tree: Any, form: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in the order of another of the same names."""
    if isinstance(form, Tensor):
        yield tree
    elif isinstance(form, Weights):
        for part, names in zip(tree, form, strict=True):
            yield from (part[name] for name in names)
    else:
        for name, inside in form.items():
            yield from _leaves(tree[name], inside)


def _with_leaves(form: Any, leaves: Iterator[Tensor]) -> Any:
    if isinstance(form, Tensor):
        return next(leaves)
    if isinstance(form, Weights):
        return Weights(*({name: next(leaves) for name in part} for part in form))
    return {name: _with_leaves(inside, leaves) for name, inside in form.items()}
