"""Named tensors, nested and flat.

What crosses the network, what a server remembers and what a checkpoint holds are all *trees*:
nested dictionaries whose leaves are tensors, and in which a model's tensors are a
:class:`Weights`. Flat, a leaf's name is its path: ``model/params/0.weight``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import torch
from torch import Tensor, nn

from perfed.core.errors import ConfigError

SMALL = 1 << 14
"""Numbers in a tensor up to which a CPU takes longer to begin an operation than to do it."""
LARGE = 1 << 27
"""Numbers of which a GPU has room for a copy at any time."""
OWN = "own"
"""The name of a client's own network, where an algorithm gives it a second one."""


class Weights(NamedTuple):
    """All tensors of one model.

    ``public_buffers`` is empty unless public batches keep BatchNorm statistics of their own
    (``training.public_batchnorm: separate``).
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    public_buffers: dict[str, Tensor] = {}  # noqa: RUF012  (never mutated)

    def clone(self) -> Weights:
        return Weights(*({name: t.detach().clone() for name, t in part.items()} for part in self))

    def detached(self) -> Weights:
        """The same tensors, without what made them."""
        return Weights(*({name: t.detach() for name, t in part.items()} for part in self))

    def logits(self, outputs: Callable[[Weights], Tensor]) -> Tensor:
        """As a model to be evaluated (:mod:`perfed.core.predictor`): the network itself."""
        return outputs(self)

    def tensors(self) -> dict[str, Tensor]:
        """As a model's file holds it."""
        return self.params | self.buffers

    def networks(self) -> list[tuple[Weights, str]]:
        return [(self, OWN)]


def moved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that are a part of a client's model. One with some infinite numbers is none: it
    is a constant of the network, such as an attention mask, and stays in it. One with no others
    begins so, such as a running maximum."""
    return {name: b for name, b in module.named_buffers() if not _is_mask(torch.isinf(b))}


def _is_mask(infinite: Tensor) -> bool:
    return bool(infinite.any() and not infinite.all())


def identity(tensor: Tensor) -> Hashable:
    """Equal for the same view of the same memory: one thing, however many hold it."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def squared_distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """‖left − right‖² over all tensors."""
    return torch.stack([(left[name] - right[name]).square().sum() for name in left]).sum()


def inner_product(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """⟨left, right⟩ over all tensors."""
    return torch.stack([(left[name] * right[name]).sum() for name in left]).sum()


def extremes(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The smallest and the largest of all floating numbers, of each device and type; where one is
    not a number, that. It takes little memory to find them, unlike to ask each number."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, _), group in groups.items():
        # Few operations are worth a copy: on a CPU, of small tensors.
        if device.type == "cpu":
            small = [tensor for tensor in group if tensor.numel() <= SMALL]
            group = [tensor for tensor in group if tensor.numel() > SMALL]
            joined = iter([*group, *([torch._C._nn.flatten_dense_tensors(small)] if small else [])])
        else:  # one after another: of all models of a round there may be no room for a copy
            parts = _in_parts(map(_in_memory_order, group))
            joined = (torch.cat(part) if len(part) > 1 else part[0] for part in parts)
        yield torch.stack([one for tensor in joined for one in tensor.aminmax()])


def _in_parts(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that together are not too large, or one alone."""
    part: list[Tensor] = []
    numbers = 0
    for tensor in tensors:
        numbers += tensor.numel()
        if part and numbers > LARGE:
            yield part
            part, numbers = [], tensor.numel()
        part.append(tensor)
    if part:
        yield part


def _in_memory_order(tensor: Tensor) -> Tensor:
    """All numbers, as they lie: where there are no gaps between them, without a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    dimensions = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(dimensions).reshape(-1)


Owner = TypeVar("Owner")


def find_not_finite(
    tensors: Mapping[Owner, Sequence[tuple[str, Tensor]]],
) -> tuple[Owner, str] | None:
    """The first tensor that is not finite, of those named by owner; a device is waited for once."""
    every = (tensor for owned in tensors.values() for _, tensor in owned)
    if all(bool(found.isfinite().all()) for found in extremes(every)):
        return None
    for owner, owned in tensors.items():
        for name, tensor in owned:
            if not torch.isfinite(tensor).all():
                return owner, name
    return None


Tree = dict[str, Any]  # str → Tensor | Weights | Tree


@functools.lru_cache(maxsize=4096)  # names of parameters, mostly
def escaped(name: str) -> str:
    """A name as one level of a path (a network's may be a file's); ``unquote`` is the inverse."""
    return name.replace("%", "%25").replace("/", "%2F")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """All leaves by their path."""
    flat: dict[str, Tensor] = {}
    for name, value in tree.items():
        path = prefix + escaped(name)
        if isinstance(value, Tensor):
            flat[path] = value
        elif name in Weights._fields:  # it would come back as a model, without what is beside it
            raise ConfigError("is the name of a part of a model's weights: choose another", path)
        elif isinstance(value, Weights):
            for part, tensors in value._asdict().items():
                flat |= flatten(tensors, f"{path}/{part}/")
        elif isinstance(value, Mapping):
            flat |= flatten(value, path + "/")
        else:
            raise ConfigError(f"a tree holds tensors, not {type(value).__name__}", path)
    return flat


@functools.lru_cache(maxsize=1 << 14)
def _levels(path: str) -> tuple[str, ...]:
    """The names that a path is made of. The same paths come again in every message."""
    return tuple(map(unquote, path.split("/")))


def unflatten(flat: Mapping[str, Tensor]) -> Tree:
    """The inverse of :func:`flatten`; a level with parts of a model becomes a :class:`Weights`."""
    nested: Tree = {}
    for path, tensor in flat.items():
        *levels, leaf = _levels(path)
        node = nested
        for level in levels:
            node = node.setdefault(level, {})
        node[leaf] = tensor
    result = _restore(nested)
    assert isinstance(result, dict)
    return result


def _restore(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    parts = [node.get(part, {}) for part in Weights._fields]
    if all(isinstance(part, dict) for part in parts) and any(parts):
        return Weights(*parts)  # where part of a model is kept, it may have no parameters
    return {name: _restore(value) for name, value in node.items()}
