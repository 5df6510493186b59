"""Which requests are equal but for their tensors, so that they can be answered as one."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from perfed.core.tree import Weights
from perfed.engines.base import Logits, Request, Sgd


def grouped(requests: Sequence[Request]) -> Iterator[tuple[Hashable, list[Request]]]:
    """Requests that can be answered as one, and their kind: what a recording can be kept for.

    A learning rate that changes from round to round does not make another kind.
    """
    groups: dict[tuple[Hashable, float | None], list[Request]] = {}
    for request in requests:
        rate = request.rate if isinstance(request, Sgd) else None
        groups.setdefault((_kind(request), rate), []).append(request)
    for (kind, _), group in groups.items():
        yield kind, group


def _kind(request: Request) -> Hashable:
    client = request.client
    structure = tuple((name, t.shape) for part in request.weights for name, t in part.items())
    kind: tuple[Any, ...] = (type(request), client.architecture, structure)
    if isinstance(request, Logits):
        return (*kind, request.public)
    leaves, form = tree_flatten(request.inputs)
    inputs = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else t for t in leaves)
    how = (request.steps, request.batches)
    return (*kind, objective_key(request.objective), inputs, str(form), *how)


def objective_key(objective: Any) -> Hashable | None:
    """Equal for objectives that compute the same; None where that cannot be known."""
    if isinstance(objective, functools.partial):
        inner = objective_key(objective.func)
        rest = (*objective.args, *objective.keywords.values())
        values = _value_keys(rest)
        return (inner, tuple(objective.keywords), values) if inner and values is not None else None
    if isinstance(objective, types.MethodType):
        owner = _value_keys([objective.__self__])
        return (objective.__func__, owner) if owner is not None else None
    if isinstance(objective, types.FunctionType):
        cells = [cell.cell_contents for cell in objective.__closure__ or ()]
        values = _value_keys([*cells, *(objective.__defaults__ or ())])
        return (objective.__code__, values) if values is not None else None
    return _value_keys([objective])


def _value_keys(values: Iterable[Any]) -> tuple[Hashable, ...] | None:
    keys = tuple(values)
    if any(isinstance(leaf, Tensor | Weights | dict) for leaf in keys):
        return None
    try:
        hash(keys)
    except TypeError:
        return None
    return keys
