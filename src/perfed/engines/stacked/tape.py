# mypy: disable-error-code="no-untyped-call, attr-defined"
"""A function of tensors, written down operation by operation and played back: on a CPU.

Small operations cost less than what stands above them: ``vmap``, autograd, layers, Python itself.
None of that computes anything, and for tensors of the same shapes it always ends in the same plain
operations. So those are written down once, and then only they are run, by PyTorch's own interpreter
of such lists (TorchScript's), without Python and its lock: two stacks can use two cores.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.core.randomness import DispatchMode

log = logging.getLogger("perfed")
WORTH = 4
"""What comes less often is not written down."""

_aten = torch.ops.aten
_OF_NUMBERS = (_aten.scalar_tensor.default, _aten.arange.default, _aten._to_copy.default)
_INTEGER, _TENSOR = torch._C.IntType.get(), torch._C.TensorType.get()
_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}


class Taped:
    """A function of tensors that changes some of them, or returns one.

    It must do the same to all tensors of the shapes it is called with, as what ``vmap`` maps does,
    and where a tensor is part of a larger one, it must always be the same part. A tape costs a few
    calls, so it is made in the one with number ``WORTH``. Where it cannot be made, the function
    itself goes on being called.
    """

    _sliced = 0

    def __init__(self, function: Callable[..., Tensor | None]) -> None:
        self._function = function
        self._calls = 0
        self._play: Callable[..., Tensor | None] | None = None

    @property
    def ready(self) -> bool:
        """Whether calls are played back; several threads may then make them."""
        return self._play is not None

    def __call__(self, *tensors: Tensor) -> Tensor | None:
        if self._play is not None:
            return self._play(*tensors)
        self._calls += 1
        if self._calls != WORTH:
            return self._function(*tensors)
        with Tape(tensors) as tape:
            result = self._function(*tensors)
        self._play = tape.player(result, self._sliced)
        return result


class TapedSteps(Taped):
    """A function that changes tensors step by step: of its first ``sliced`` arguments, a step gets
    a slice along dimension 1. All steps from one to another are one call of the tape."""

    def __init__(self, function: Callable[..., None], sliced: int) -> None:
        super().__init__(function)
        self._sliced = sliced

    def steps(self, first: int, last: int, *tensors: Tensor) -> None:
        """Those with the numbers ``first``, …, ``last - 1``."""
        sliced, others = tensors[: self._sliced], tensors[self._sliced :]
        for number in range(first, last):
            if self._play is not None:
                self._play(number, last, *tensors)
                return
            self(*(tensor[:, number].clone() for tensor in sliced), *others)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: in the memory of the tensor that has a name."""

    name: str
    view: tuple[Any, ...] | None = None
    """Its size, strides and offset there; None for that tensor itself."""


@dataclass(frozen=True)
class Line:
    operation: Any
    arguments: list[Any]
    """In the order of the operation's schema, with those that were left out."""
    made: list[str | None]
    """Names for what it returns, where that has memory of its own."""
    reads: set[str]
    writes: set[str]


class Tape(DispatchMode):
    """Inside, every operation is written down as it runs.

    Views are not written down. Whatever a chain of them ends in is one view of the tensor that
    holds the memory, and is made where it is used.
    """

    def __init__(self, arguments: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.faithful = True
        """Whether what is written down is all there is to it."""
        self.lines: list[Line] = []
        self.places: dict[int, Place] = {}
        self.arguments: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self._holders: dict[int, tuple[str, Tensor]] = {}  # by memory
        self._alive: list[Any] = []  # or a new tensor might get the id of an old one
        for number, tensor in enumerate(arguments):
            self.faithful &= _memory(tensor) not in self._holders  # of two, whose is a view?
            self.arguments[f"a{number}"] = tensor
            self._hold(f"a{number}", tensor)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        arguments = _signature(operation).in_order(args, kwargs or {})
        tensors = list(_tensors(arguments))
        for tensor in tensors:
            if id(tensor) not in self.places:  # no operation made it: it was there before
                self.faithful &= _memory(tensor) not in self._holders
                self._keep(tensor)
        returned = operation(*args, **(kwargs or {}))
        self._alive.append((arguments, returned))
        if operation in _OF_NUMBERS and not tensors:
            self._keep(returned)
        elif operation is _aten.ones_like.default and returned.is_contiguous():
            # Without what it is like: where a gradient begins, that is a loss nobody looks at.
            arguments = [list(returned.shape), returned.dtype, None, returned.device, None]
            self._write_down(_aten.ones.default, arguments, set(), returned)
        else:
            reads = {self.places[id(tensor)].name for tensor in tensors}
            self._write_down(operation, arguments, reads, returned)
        return returned

    def _write_down(
        self, operation: Any, arguments: list[Any], reads: set[str], returned: Any
    ) -> None:
        results = returned if isinstance(returned, tuple | list) else [returned]
        made = [self._name(result) for result in results]
        changed = [arguments[number] for number in _signature(operation).changed]
        if operation is _aten.native_batch_norm.default and arguments[5]:
            changed += arguments[3:5]  # running statistics, of which its schema is silent
        writes = {self.places[id(tensor)].name for tensor in _tensors(changed)}
        self.faithful &= not writes & self.constants.keys()
        writes |= {name for name in made if name is not None}
        if writes:
            self.lines.append(Line(operation, arguments, made, reads, writes))

    def _name(self, result: Any) -> str | None:
        """A new name for it; None where its memory has one."""
        if not isinstance(result, Tensor):
            self.faithful &= result is None  # a number may decide what comes next
            return None
        if id(result) in self.places:
            return None
        holder, whole = self._holders.get(_memory(result), (None, result))
        if holder is None:
            holder = f"t{len(self._holders)}"
            self._hold(holder, result)
            return holder
        if holder in self.constants:
            self._keep(result)
        else:
            self.faithful &= whole.dtype == result.dtype
            view = _view(result)
            self.places[id(result)] = Place(holder, None if view == _view(whole) else view)
        return None

    def _hold(self, name: str, tensor: Tensor) -> None:
        self.places[id(tensor)] = Place(name)
        self._holders.setdefault(_memory(tensor), (name, tensor))

    def _keep(self, tensor: Tensor) -> None:
        name = f"c{len(self.constants)}"
        self.constants[name] = tensor
        self._hold(name, tensor)

    def player(self, result: Tensor | None, sliced: int = 0) -> Callable[..., Tensor | None] | None:
        """The function that plays the tape; None where there is none that does the same. Where
        arguments are sliced, it plays it for the steps from one number to another."""
        if not self.faithful:
            return None
        try:
            return _player(self, result, sliced)
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:
            log.debug("a stack's computation cannot be played back: %s", error)
            return None

    def needed(self, result: Tensor | None) -> list[Line]:
        """The lines without those whose results nobody looks at."""
        wanted = {*self.arguments, *(self.places[id(tensor)].name for tensor in _tensors(result))}
        lines = []
        for line in reversed(self.lines):
            if line.writes & wanted:
                wanted |= line.reads
                lines.append(line)
        return lines[::-1]


def _player(tape: Tape, result: Tensor | None, sliced: int) -> Callable[..., Tensor | None]:
    script = Script(tape, sliced)
    with script.each_step() if sliced else nullcontext():
        for line in tape.needed(result):
            script.write(line)
    function = script.function(result)
    constants = tuple(tape.constants.values())

    # What changes its arguments makes nothing that leaves it, and that autograd might meet.
    without_gradients = torch.inference_mode if result is None else torch.no_grad

    def run(given: tuple[Any, ...]) -> Tensor | None:
        # Its optimiser would take longer than a run.
        with without_gradients(), torch.jit.optimized_execution(False):
            played: Tensor | None = function(*given, *constants)
        return played

    def play(*given: Any) -> Tensor | None:
        if not torch.is_autocast_enabled("cpu"):
            return run(given)
        with torch.autocast("cpu", enabled=False):
            return run(given)

    return play


class Script:
    """A tape in the form that TorchScript runs."""

    def __init__(self, tape: Tape, sliced: int) -> None:
        self._places = tape.places
        self._sliced = [*tape.arguments][:sliced]
        self._graph = torch._C.Graph()
        numbers = ["first", "last"] if sliced else []
        names = [*numbers, *tape.arguments, *tape.constants]
        self._values: dict[Any, Any] = {name: self._graph.addInput(name) for name in names}
        for name in numbers:
            self._values[name].setType(_INTEGER)

    @contextmanager
    def each_step(self) -> Iterator[None]:
        """What is written inside is done for each step."""
        first, last = self._values["first"], self._values["last"]
        count = self._append("aten::sub", [last, first], [_INTEGER]).output()
        going_on, nothing = self._constant(True), self._constant(None)  # both needed outside, too
        loop = self._append("prim::Loop", [count, going_on], [])
        body = loop.addBlock()
        done = body.addInputToBlock()
        done.setType(_INTEGER)
        with self._graph.insert_point_guard(body):
            number = self._append("aten::add", [first, done], [_INTEGER]).output()
            for name in self._sliced:
                values = [self._values[name], self._constant(1), number]
                part = self._append("aten::select", values, [_TENSOR]).output()
                self._values[name] = self._append(
                    "aten::clone", [part, nothing], [_TENSOR]
                ).output()
            yield
            body.registerOutput(going_on)

    def write(self, line: Line) -> None:
        signature = _signature(line.operation)
        values = list(map(self._value, line.arguments, signature.types))
        node = self._append(signature.name, values, signature.returns)
        if node.schema() == "(no schema)":
            raise LookupError(f"{line.operation} with {line.arguments}")
        for name, output in zip(line.made, node.outputs(), strict=True):
            if name is not None:
                self._values[name] = output

    def function(self, result: Tensor | None) -> Callable[..., Tensor | None]:
        self._graph.registerOutput(self._value(result, None))
        made: Callable[..., Tensor | None] = torch._C._create_function_from_graph(
            "play", self._graph
        )
        return made

    def _append(self, name: str, values: list[Any], types: list[Any]) -> Any:
        node = self._graph.insertNode(self._graph.create(name, values, len(types)))
        for output, kind in zip(node.outputs(), types, strict=True):
            output.setType(kind)
        return node

    def _value(self, value: Any, kind: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(self._places[id(value)])
        if isinstance(value, list | tuple) and [*_tensors(value)]:
            return self._append(
                "prim::ListConstruct", [self._value(item, None) for item in value], [kind]
            ).output()
        if isinstance(value, torch.memory_format):
            value = _FORMATS[value]
        return self._constant(list(value) if isinstance(value, tuple) else value)

    def _tensor(self, place: Place) -> Any:
        if place.view is None:
            return self._values[place.name]
        key = repr(place)
        if key not in self._values:
            values = [self._values[place.name], *map(self._constant, place.view)]
            node = self._append("aten::as_strided", values, [_TENSOR])
            self._values[key] = node.output()
        return self._values[key]

    def _constant(self, value: Any) -> Any:
        key = type(value), repr(value)
        if key not in self._values:
            if value == []:  # of what, a constant could not say: sizes, in all operations there are
                integers = torch._C.ListType(_INTEGER)
                self._values[key] = self._append("prim::ListConstruct", [], [integers]).output()
            else:
                self._values[key] = self._graph.insertConstant(value)
        return self._values[key]


def _memory(tensor: Tensor) -> int:
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _view(tensor: Tensor) -> tuple[Any, ...]:
    """What part of its memory it is, and in which order."""
    return list(tensor.shape), list(tensor.stride()), tensor.storage_offset()


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


@dataclass(frozen=True)
class Signature:
    """What an operation's schema says, which is slow to ask."""

    name: str
    arguments: list[str]
    defaults: list[Any]
    types: list[Any]
    returns: list[Any]
    changed: list[int]
    """The numbers of the arguments that the operation changes."""

    def in_order(self, args: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
        """All arguments, those that were left out as well."""
        rest = zip(self.arguments[len(args) :], self.defaults[len(args) :], strict=True)
        return [*args, *(options.get(name, default) for name, default in rest)]


@functools.cache
def _signature(operation: Any) -> Signature:
    schema = operation._schema
    arguments = schema.arguments
    return Signature(
        schema.name,
        [argument.name for argument in arguments],
        [argument.default_value for argument in arguments],
        [argument.type for argument in arguments],
        [returned.type for returned in schema.returns],
        [
            number
            for number, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ],
    )
