"""Admission: each message alone, against its declaration, before anybody uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import unquote

import torch
from torch import Tensor

from perfed.core.declaration import (
    FREE,
    LARGEST,
    REALS,
    Array,
    AsMany,
    AtMost,
    Dimension,
    Entries,
    Entry,
    Known,
    Leaf,
    Maybe,
    Numbered,
    dimension_words,
    numbered_below,
)
from perfed.core.errors import Refused, shape_text
from perfed.core.message import Message
from perfed.core.tree import escaped, extremes


def refusals(
    messages: Mapping[int, Message], declared: Entries | None, known: Callable[[int], Known]
) -> dict[int, str]:
    """Which of the clients' messages do not fit the declaration, each measured alone, and why."""
    refused: dict[int, str] = {}
    checked: list[tuple[int, str, Leaf, Tensor]] = []
    facts = {client: known(client) for client in messages}
    for client, message in messages.items():
        try:
            checked += _fitting(client, message, declared, facts[client])
        except Refused as error:
            refused[client] = str(error)
    refused |= _not_finite({c: m for c, m in messages.items() if c not in refused})
    checked = [one for one in checked if one[0] not in refused]
    for client, path, leaf, values in _out_of_range(checked, facts):
        reason = leaf.range.fault(values, facts[client])
        refused.setdefault(client, f"{unquote(path)}: {reason}")
    return refused


def check(message: Message, declared: Entries | None, known: Known) -> None:
    """Raise Refused where one message does not fit."""
    for reason in refusals({0: message}, declared, lambda client: known).values():
        raise Refused(reason)


def nearest(message: Message, declared: Entries | None) -> Message:
    """With floating arrays brought into the range that is declared for them."""
    arrays = dict(message.arrays)
    for name, entry in (declared or {}).items():
        while isinstance(entry, Numbered | Maybe):
            entry = entry.entry
        for path, values in arrays.items():
            inside = path == escaped(name) or path.startswith(f"{escaped(name)}/")
            fits = values.is_floating_point() and values.ndim and bool(values.isfinite().all())
            if inside and fits and isinstance(entry, Array):
                arrays[path] = entry.range.nearest(values)
    return Message.from_arrays(arrays)


SLACK = 2**16  # bytes, of names and shapes
LARGEST_UNDECLARED = 2**26  # bytes


def most_bytes(declared: Entries | None, known: Known | None) -> int:
    """How many bytes a message can have that fits its declaration: a quarter more than its numbers
    take, and some for names. What stands for fewer bytes must not become more."""
    if declared is None or known is None:
        return LARGEST_UNDECLARED
    numbers = sum(_most_numbers(entry, known) for entry in declared.values())
    return SLACK + numbers * torch.get_default_dtype().itemsize * 5 // 4


def _most_numbers(entry: Entry, known: Known) -> int:
    times = 1
    while isinstance(entry, Numbered | Maybe):
        if isinstance(entry, Numbered):
            times *= entry.number.number if isinstance(entry.number, AtMost) else entry.number
        entry = entry.entry
    leaves = entry.leaves("", Message(), known).values()
    return times * sum(_most_in(leaf.shape, known) for leaf in leaves)


def _most_in(shape: tuple[Dimension, ...], known: Known) -> int:
    """A size that is not known is that of a part of the public set, or of a code of it all."""
    samples, classes = (known.sizes.get(symbol, 1) for symbol in "PN")
    unknown = samples if len(shape) > 1 else samples * classes
    found = [_size(dimension, known.sizes, known) for dimension in shape]
    return math.prod(unknown if size is None else size for size in found)


def _fitting(
    client: int, message: Message, declared: Entries | None, known: Known
) -> list[tuple[int, str, Leaf, Tensor]]:
    """What remains to be checked by its numbers; names, shapes and types are as they must be."""
    if not isinstance(message, Message):
        raise Refused(f"is a {type(message).__name__}, must be a message")
    if declared is None:
        return []
    leaves: dict[str, Leaf] = {}
    for name, entry in declared.items():
        leaves |= entry.leaves(escaped(name), message, known)
    _check_missing_together(message, declared)
    for path in message.arrays.keys() - leaves.keys():
        raise Refused(f"an unknown array {path[:60]!a}, must be {_listed(declared)}")
    sizes = dict(known.sizes)
    for path, leaf in leaves.items():
        if path not in message.arrays:
            raise Refused(f"{unquote(path)}: is missing")
        _check_array(path, message.arrays[path], leaf, sizes, known)
    return [
        (client, path, leaf, message.arrays[path])
        for path, leaf in leaves.items()
        if leaf.range is not REALS and leaf.range is not FREE  # of which all is known then
    ]


def _check_missing_together(message: Message, declared: Entries) -> None:
    """Of what may be missing, all is there or nothing is."""
    maybe = [name for name, entry in declared.items() if isinstance(entry, Maybe)]
    missing = [name for name in maybe if name not in message]
    if missing and len(missing) < len(maybe):
        raise Refused(f"{missing[0]}: is missing")


def _check_array(
    path: str, values: Tensor, leaf: Leaf, sizes: dict[str, int], known: Known
) -> None:
    if tuple(values.shape) != leaf.shape:
        shape = [_size(dimension, sizes, known) for dimension in leaf.shape]
        same = len(shape) == values.ndim
        for place, (size, dimension) in enumerate(zip(values.shape, leaf.shape, strict=False)):
            if isinstance(dimension, str) and dimension not in sizes:
                sizes[dimension] = shape[place] = size
            if isinstance(dimension, AtMost):
                same = same and 1 <= size <= dimension.number
            else:
                same = same and size == shape[place]
        if not same:
            found = shape_text(values.shape) or "a single number"
            must = "×".join(map(dimension_words, leaf.shape)) or "a single number"
            resolved = shape_text([size for size in shape if size is not None])
            hint = f" ({resolved})" if resolved and resolved != must else ""
            raise Refused(f"{unquote(path)}: is {found}, must be {must}{hint}")
    if leaf.dtype is not None and values.dtype != leaf.dtype:
        found, must = (str(dtype).removeprefix("torch.") for dtype in (values.dtype, leaf.dtype))
        raise Refused(f"{unquote(path)}: is {found}, must be {must}")


def _size(dimension: Dimension, sizes: Mapping[str, int], known: Known) -> int | None:
    if isinstance(dimension, int):
        return dimension
    if isinstance(dimension, AsMany):
        return numbered_below(escaped(dimension.name), known.received)
    if isinstance(dimension, AtMost):
        return dimension.number
    return sizes.get(dimension)


def _not_finite(messages: Mapping[int, Message]) -> dict[int, str]:
    if _all_finite([t for message in messages.values() for t in message.arrays.values()]):
        return {}
    found: dict[int, str] = {}
    for client, message in messages.items():
        for path, values in message.arrays.items():
            if client not in found and not _all_finite([values]):
                fault = "is not finite"
                if bool(values.isfinite().all()):
                    fault = f"has {float(values.abs().max()):.3g}, more than can be summed"
                found[client] = f"{path[:60]!a}: {fault}".replace("'", "")
    return found


def _all_finite(tensors: list[Tensor]) -> bool:
    """Whether none is infinite, not a number, or too large; a device is waited for once."""
    # Not a number is not smaller than any.
    return all(bool((found.abs() <= LARGEST).all()) for found in extremes(tensors))


def _out_of_range(
    checked: list[tuple[int, str, Leaf, Tensor]], known: Mapping[int, Known]
) -> Iterator[tuple[int, str, Leaf, Tensor]]:
    """Those whose numbers are not in their range; a device is waited for once."""
    by_device: dict[torch.device, list[tuple[int, str, Leaf, Tensor]]] = {}
    for one in checked:
        by_device.setdefault(one[3].device, []).append(one)
    for group in by_device.values():
        verdicts = torch.stack([leaf.range.holds(t, known[client]) for client, _, leaf, t in group])
        if not bool(verdicts.all()):
            yield from (
                one for one, holds in zip(group, verdicts.tolist(), strict=True) if not holds
            )


def _listed(declared: Entries) -> str:
    return ", ".join(declared) or "nothing"
