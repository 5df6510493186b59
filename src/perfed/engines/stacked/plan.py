"""A network as a list of steps, each a rule for a stack of models (:mod:`.layers`).

``torch.fx`` writes down which layers and operations a module's ``forward`` consists of. Where each
of them has a rule, the network runs on rules alone, for all clients at once, and neighbours can
share a kernel. Where one has none there is no plan, and ``torch.func.vmap`` maps the module.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from perfed.core.tree import moved_buffers
from perfed.engines.stacked import layers
from perfed.engines.stacked.hopper import Deferred
from perfed.engines.stacked.lanes import physical
from perfed.engines.stacked.layers import Rule, Tensors

INPUT = -1


@dataclass(frozen=True)
class Step:
    rule: Rule
    layer: Any
    """The module, or what the rule must know; None where it needs nothing."""
    at: str
    """Where its parameters are: a prefix of their names."""
    sources: tuple[int, ...]
    """Whose results go in, by number; INPUT: what the network is given."""


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]

    @cached_property
    def uses(self) -> Counter[int]:
        """How often each result is used."""
        return Counter(source for step in self.steps for source in step.sources)

    def run(self, tensors: Tensors, x: Tensor) -> Tensor:
        results: dict[int, Any] = {INPUT: x}
        left = self.uses.copy()
        for number, step in enumerate(self.steps):
            for source in step.sources:
                found = results[source]
                if isinstance(found, Deferred):
                    alone = self.uses[source] == 1 or found.shared
                    if step.rule not in layers.FUSING or not alone:
                        results[source] = found.value()
            given = [results[source] for source in step.sources]
            results[number] = step.rule(step.layer, tensors, step.at, *given)
            left.subtract(step.sources)
            for source in step.sources:  # what nobody needs any more need not be in memory
                if not left[source]:
                    results.pop(source, None)
            del given
        if tensors.counters and x.is_cuda:  # one kernel for all of them
            torch._foreach_add_(tensors.counters, 1)
        else:
            for counter in tensors.counters:
                counter.add_(1)
        last: Tensor | Deferred = results[len(self.steps) - 1]
        return last.value() if isinstance(last, Deferred) else last

    def before_last(self) -> Plan | None:
        """What the last step is given; None where that is the input itself."""
        (source,) = self.steps[-1].sources
        return Plan(self.steps[: source + 1]) if source != INPUT else None

    def last(self) -> Plan:
        """The last step alone."""
        step = self.steps[-1]
        return Plan((Step(step.rule, step.layer, step.at, (INPUT,)),))

    def matrices(self) -> list[str]:
        """The parameters that are used in products only."""
        kinds = nn.Conv2d | nn.Linear
        return [f"{step.at}weight" for step in self.steps if isinstance(step.layer, kinds)]

    def cut(self) -> int:
        """How many steps see private and public samples apart on a CPU, which has no use for large
        batches: up to the last BatchNorm, and what makes its output smaller."""
        normed = [i for i, step in enumerate(self.steps) if step.rule is layers.batch_norm]
        if not normed:
            return 0
        at = normed[-1] + 1
        shrinking = (layers.relu, layers.max_pool2d)
        while at < len(self.steps) and (self.steps[at].rule in shrinking or not self._narrow(at)):
            at += 1
        return at

    def _narrow(self, at: int) -> bool:
        """Whether what follows sees one result of what comes before."""
        later = {source for step in self.steps[at:] for source in step.sources if source < at}
        return later == {at - 1}

    def split(self, at: int) -> tuple[Plan, Plan]:
        """Two plans, one after the other; :meth:`cut` says where."""
        moved = [
            Step(s.rule, s.layer, s.at, tuple(max(source - at, INPUT) for source in s.sources))
            for s in self.steps[at:]
        ]
        return Plan(self.steps[:at]), Plan(tuple(moved))


def plan_of(module: nn.Module) -> Plan | None:
    """None where something in the module has no rule, or parameters are there twice."""
    named = len([name for name, _ in module.named_parameters(remove_duplicate=False)])
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    if hooked or named > len(list(module.parameters())):
        return None
    try:
        steps = _steps(_traced(module), module)
    except Exception:  # whatever a user's code does with what is not a tensor
        return None
    return Plan(_without_bias_gradients(steps)) if steps else None


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        own = type(module).__module__.startswith("torch.nn")
        return layers.rule_for(module) is not None or (own and type(module) is not nn.Sequential)


def _traced(module: nn.Module) -> fx.Graph:
    if layers.rule_for(module) is None:
        return _Tracer().trace(module)
    graph = fx.Graph()  # one layer is a network, too
    graph.output(graph.call_module("", (graph.placeholder("x"),)))
    return graph


class _NoRule(Exception):
    pass


def _steps(graph: fx.Graph, module: nn.Module) -> list[Step]:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    (result,) = output.args
    if len(inputs) != 1 or not isinstance(result, fx.Node):
        raise _NoRule
    numbers: dict[fx.Node, int] = {inputs[0]: INPUT}
    steps: list[Step] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or _is_batch_size(node):
            continue
        if _is_identity(node, module):
            numbers[node] = numbers[node.args[0]]
            continue
        rule, layer, at, sources = _step(node, module)
        steps.append(Step(rule, layer, at, tuple(numbers[source] for source in sources)))
        numbers[node] = len(steps) - 1
    used = {source for step in steps for source in step.sources}
    if numbers[result] != len(steps) - 1 or used != set(range(INPUT, len(steps) - 1)):
        raise _NoRule  # a branch whose buffers move, though nobody sees what it gives
    return steps


def _is_identity(node: fx.Node, module: nn.Module) -> bool:
    if node.op != "call_module":
        return False
    return type(module.get_submodule(str(node.target))) is nn.Identity


Found = tuple[Rule, Any, str, Sequence[fx.Node]]


def _step(node: fx.Node, module: nn.Module) -> Found:
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        rule = layers.rule_for(layer)
        if rule is None or node.kwargs or len(node.args) != 1:
            raise _NoRule
        if getattr(layer, "inplace", False):
            _check_alone(node.args[0])
        return rule, layer, f"{node.target}." if node.target else "", _nodes(node.args)
    if node.op == "get_attr":
        if node.target not in dict(module.named_parameters()) | moved_buffers(module):
            raise _NoRule
        return layers.parameter, None, str(node.target), ()
    translate = _OPERATIONS.get(node.target)
    if node.op not in ("call_function", "call_method") or translate is None:
        raise _NoRule
    return translate(*node.args, **node.kwargs)


def _nodes(values: Sequence[Any]) -> list[fx.Node]:
    if not all(isinstance(value, fx.Node) for value in values):
        raise _NoRule
    return list(values)


def _check_alone(node: Any) -> None:
    """What is changed in place must not be used elsewhere."""
    if not isinstance(node, fx.Node) or len(node.users) > 1:
        raise _NoRule


def _is_batch_size(node: Any) -> bool:
    """``x.size(0)``, ``x.shape[0]``, or what they are taken from."""
    return _whose_batch_size(node) is not None


def _whose_batch_size(node: Any) -> fx.Node | None:
    if not isinstance(node, fx.Node):
        return None
    source = node.args[0] if node.args else None
    if node.op == "call_method" and node.target == "size":
        return _sample(source) if node.args[1:] in ((0,), ()) else None
    if node.op != "call_function":
        return None
    if node.target is getattr:
        return _sample(source) if node.args[1:] == ("shape",) else None
    return _whose_batch_size(source) if _is_first(node) else None


def _is_first(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[1:] == (0,)


def _sample(node: Any) -> fx.Node | None:
    """A parameter has no batch."""
    return node if isinstance(node, fx.Node) and node.op != "get_attr" else None


# --------------------------------------------------------------- operations as rules


def _shifted(dim: int) -> int:
    """A sample's dimension in a stack: the clients are in front. The batch is not asked for."""
    if dim == 0:
        raise _NoRule
    return dim + 1 if dim > 0 else dim


def _added(x: Any, other: Any) -> Found:
    return layers.add, None, "", _nodes([x, other])


def _added_in_place(x: Any, other: Any) -> Found:
    _check_alone(x)
    return _added(x, other)


def _rectified(x: Any, inplace: bool = False) -> Found:
    if inplace:
        _check_alone(x)
    return layers.relu, None, "", _nodes([x])


def _rectified_in_place(x: Any) -> Found:
    return _rectified(x, True)


def _activated(x: Any) -> Found:
    return layers.gelu, None, "", _nodes([x])


def _clipped(x: Any, inplace: bool = False) -> Found:
    if inplace:
        _check_alone(x)
    return layers.relu6, None, "", _nodes([x])


def _joined(tensors: Any, dim: int = 0) -> Found:
    return partial(_cat, _shifted(dim)), None, "", _nodes(tensors)


def _cat(dim: int, layer: None, tensors: Tensors, at: str, *parts: Tensor) -> Tensor:
    if parts[0].ndim != 5 or not parts[0].is_cuda:
        return torch.cat(parts, dim)
    if dim % 5 != 2:
        return torch.cat(parts, dim)
    # Pictures have their channels last in memory there, and PyTorch joins two dimensions fast.
    rows = [part.permute(0, 1, 3, 4, 2).flatten(0, 3) for part in parts]
    n, batch, _, height, width = parts[0].shape
    return torch.cat(rows, 1).view(n, batch, height, width, -1).permute(0, 1, 4, 2, 3)


def _flattened(x: Any, start_dim: int = 0, end_dim: int = -1) -> Found:
    function = partial(torch.flatten, start_dim=_shifted(start_dim), end_dim=_shifted(end_dim))
    return _of_stack(function, x)


def _viewed(x: Any, *shape: Any) -> Found:
    if len(shape) == 2 and _is_batch_size(shape[0]) and shape[1] == -1:
        return _flattened(x, 1)
    raise _NoRule


def _mean(x: Any, dim: Any, keepdim: bool = False) -> Found:
    dims = [_shifted(d) for d in ([dim] if isinstance(dim, int) else dim)]
    return _of_stack(partial(torch.mean, dim=dims, keepdim=keepdim), x)


def _transposed(x: Any, dim0: int, dim1: int) -> Found:
    return _of_stack(partial(torch.transpose, dim0=_shifted(dim0), dim1=_shifted(dim1)), x)


def _unflattened(x: Any, dim: int, sizes: Sequence[int]) -> Found:
    return _of_stack(partial(torch.unflatten, dim=_shifted(dim), sizes=sizes), x)


def _expanded(x: Any, *sizes: Any) -> Found:
    """To as many samples as the batch has."""
    like = _whose_batch_size(sizes[0])
    if like is None or not all(isinstance(size, int) for size in sizes[1:]):
        raise _NoRule
    return partial(_expand, sizes[1:]), None, "", _nodes([x, like])


def _expand(
    sizes: tuple[int, ...], layer: None, tensors: Tensors, at: str, x: Tensor, like: Tensor
) -> Tensor:
    return x.expand(-1, like.shape[1], *sizes)


def _chunked(x: Any, chunks: int, dim: int = 0) -> Found:
    return layers.chunk, (chunks, _shifted(dim)), "", _nodes([x])


def _is_chunks(node: Any) -> bool:
    called = isinstance(node, fx.Node) and node.op in ("call_function", "call_method")
    return called and _OPERATIONS.get(node.target) is _chunked


def _item(x: Any, index: Any) -> Found:
    """One of several parts, or of every sample the same place."""
    if _is_chunks(x):
        return _of_stack(operator.itemgetter(index), x)
    places = index if isinstance(index, tuple) else (index,)
    simple = all(isinstance(place, int | slice) for place in places)
    if not simple or places[0] != slice(None):
        raise _NoRule
    return _of_stack(operator.itemgetter((slice(None), *places)), x)


def _attended(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **named: Any
) -> Found:
    if attn_mask is not None or dropout_p:
        raise _NoRule
    return layers.attention, named, "", _nodes([query, key, value])


def _dropped(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Found:
    if inplace:
        _check_alone(x)
    return _of_stack(partial(F.dropout, p=p, training=training), x)


def _averaged(x: Any, output_size: Any) -> Found:
    return _of_layer(nn.AdaptiveAvgPool2d(output_size), x)


def _maxima(x: Any, *sizes: Any, **named: Any) -> Found:
    return _of_layer(nn.MaxPool2d(*sizes, **named), x)


def _of_layer(layer: nn.Module, x: Any) -> Found:
    rule = layers.rule_for(layer)
    if rule is None:
        raise _NoRule
    return rule, layer, "", _nodes([x])


def _of_stack(function: Callable[[Tensor], Tensor], x: Any) -> Found:
    return _apply, function, "", _nodes([x])


def _apply(function: Callable[[Tensor], Tensor], tensors: Tensors, at: str, x: Tensor) -> Tensor:
    return function(x)


def _by_sample(function: Callable[..., Tensor]) -> Callable[..., Found]:
    """Of an operation on single values."""
    return lambda x: _of_stack(function, x)


_OPERATIONS: dict[Any, Callable[..., Found]] = {
    operator.add: _added,
    torch.add: _added,
    "add": _added,
    operator.iadd: _added_in_place,
    "add_": _added_in_place,
    F.relu: _rectified,
    torch.relu: _rectified,
    "relu": _rectified,
    "relu_": _rectified_in_place,
    F.relu_: _rectified_in_place,
    F.relu6: _clipped,
    F.gelu: _activated,
    F.silu: _by_sample(F.silu),
    F.tanh: _by_sample(torch.tanh),
    torch.tanh: _by_sample(torch.tanh),
    torch.sigmoid: _by_sample(torch.sigmoid),
    torch.cat: _joined,
    torch.flatten: _flattened,
    "flatten": _flattened,
    "view": _viewed,
    "reshape": _viewed,
    torch.transpose: _transposed,
    "transpose": _transposed,
    torch.unflatten: _unflattened,
    "unflatten": _unflattened,
    "expand": _expanded,
    torch.chunk: _chunked,
    "chunk": _chunked,
    operator.getitem: _item,
    F.scaled_dot_product_attention: _attended,
    torch.mean: _mean,
    "mean": _mean,
    F.dropout: _dropped,
    F.adaptive_avg_pool2d: _averaged,
    F.max_pool2d: _maxima,
}


def _without_bias_gradients(steps: list[Step]) -> tuple[Step, ...]:
    """A BatchNorm with batch statistics takes every channel's mean away: the bias of a convolution
    that only it sees has a gradient of zero."""
    users: dict[int, list[Step]] = {}
    for step in steps:
        for source in step.sources:
            users.setdefault(source, []).append(step)

    def only_normed(number: int) -> bool:
        after = [step.layer for step in users.get(number, [])]
        return len(after) == 1 and isinstance(after[0], nn.BatchNorm2d) and after[0].training

    return tuple(
        Step(partial(layers.conv2d, bias_grad=False), s.layer, s.at, s.sources)
        if s.rule is layers.conv2d and only_normed(number)
        else s
        for number, s in enumerate(steps)
    )


# ----------------------------------------------------------------------- inside ``vmap``


def with_rules(module: nn.Module, head: str = "") -> None:
    """Let every part of ``module`` that has a plan use it where it is mapped over a stack. A part
    with the layer ``head`` inside has none: features are what that layer is called with."""
    if getattr(module, "inplace", False):
        return  # a rule gives something new, and somebody may look at the old
    plan = None if head else plan_of(module)
    if plan is not None:
        module.forward = partial(_mapped, module, plan, module.forward)
    else:
        first, _, inside = head.partition(".")
        for name, child in module.named_children():
            with_rules(child, inside if name == first else "")


def _mapped(
    layer: nn.Module, plan: Plan, otherwise: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    y = mapped(plan, tensors, x)
    return otherwise(x) if y is None else y


def mapped(plan: Plan, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """Inside ``vmap``, the plan for all clients; None where it is not plainly that."""
    stack = physical([x, *tensors.values()])
    if stack is None:
        return None
    with stack.entered():
        named = dict(zip(tensors, stack.tensors[1:], strict=True))
        y = plan.run(Tensors(named), stack.tensors[0])
        if not y.is_cuda:
            y = y.contiguous()  # as PyTorch's layers leave it: what follows may call view()
    return stack.wrap(y)


def mapped_both(
    plan: Plan,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    public_buffers: Mapping[str, Tensor],
    private: Tensor,
    public: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Private and public samples in one go, each with their own batch statistics and buffers."""
    stack = physical(
        [private, public, *params.values(), *buffers.values(), *public_buffers.values()]
    )
    if stack is None:
        return None
    with stack.entered():
        private, public, *rest = stack.tensors
        own = dict(zip([*params, *buffers], rest, strict=False))
        other = dict(zip(public_buffers, rest[len(own) :], strict=True))
        if private.is_cuda:
            tensors = Tensors(own, private.shape[1], other)
            y = plan.run(tensors, torch.cat([private, public], 1))
        else:
            y = _apart_then_together(plan, own, other, private, public)
        first, second = y[:, : private.shape[1]], y[:, private.shape[1] :]
    return stack.wrap(first), stack.wrap(second)


def _apart_then_together(
    plan: Plan, own: Mapping[str, Tensor], other: Mapping[str, Tensor], *samples: Tensor
) -> Tensor:
    apart, together = plan.split(plan.cut())
    halves: Iterator[Tensor] = iter(samples)
    if apart.steps:
        tensors = (Tensors(own), Tensors(dict(own) | dict(other)))
        halves = (apart.run(own, x) for own, x in zip(tensors, samples, strict=True))
    # One batch, last in memory.
    joined = torch.cat([half.movedim(1, -1) for half in halves], -1).movedim(-1, 1)
    return together.run(Tensors(own), joined) if together.steps else joined
