"""Which requests are equal but for their tensors, so that they can be answered as one."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from perfed.core.algorithm import Parts
from perfed.core.schema import Options
from perfed.core.tree import Weights
from perfed.engines.base import Forward, Request, Sgd


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
    if isinstance(request, Forward):
        structure = _structure(request.weights)
        return (Forward, request.label, structure, request.public, request.what)
    leaves, form = _flat(request.inputs)
    inputs = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else t for t in leaves)
    population = request.client.population
    labels = request.labels()
    return (
        Sgd,
        tuple((name, labels[name], _structure(w)) for name, w in request.models.items()),
        objective_key(request.objective),
        inputs,
        form,
        request.single,
        request.room,
        request.batches,
        request.sample_clip,
        request.privacy,
        population.training,
        population.algorithm.trains_on_public_set,
    )


def _flat(inputs: tuple[Any, ...]) -> tuple[list[Any], str]:
    """What an objective is given, and the form in which."""
    if not inputs:  # mostly, and torch takes its time to say so
        return [], ""
    leaves, form = tree_flatten(inputs)
    return leaves, str(form)


def _structure(weights: Weights) -> Hashable:
    return tuple((name, t.shape) for part in weights for name, t in part.items())


def objective_key(objective: Any) -> Hashable | None:
    """Equal for objectives that compute the same; None where that cannot be known."""
    if isinstance(objective, Parts):
        return _keys(Parts, objective.private, objective.public)
    if isinstance(objective, functools.partial):
        return _keys(objective.func, *objective.args, *sorted(objective.keywords.items()))
    if isinstance(objective, types.MethodType):
        return _keys(objective.__func__, objective.__self__)
    if isinstance(objective, types.FunctionType):
        cells = [cell.cell_contents for cell in objective.__closure__ or ()]
        defaults = [
            *(objective.__defaults__ or ()),
            *sorted((objective.__kwdefaults__ or {}).items()),
        ]
        values = _keys(*cells, *defaults)
        return None if values is None else (objective.__code__, values)
    return None


def _keys(*values: Any) -> Hashable | None:
    keys = tuple(_key(value) for value in values)
    return None if None in keys else keys


def _key(value: Any) -> Hashable | None:
    """Equal for values that are and stay equal: numbers, names, functions, frozen options."""
    if value is None or isinstance(value, bool | int | float | str | bytes | type):
        return (type(value), value)
    if isinstance(value, tuple):
        return _keys(*value)
    if isinstance(value, types.BuiltinFunctionType | types.ModuleType):
        return (type(value), value)
    if isinstance(value, Options):
        fields = dataclasses.fields(value)
        return _keys(type(value), *(getattr(value, field.name) for field in fields))
    return objective_key(value)
