"""A function of tensors, written down operation by operation and played back: on a CPU.

Small operations cost less than what stands above them: ``vmap``, autograd, layers, dictionaries.
None of that computes anything, and for tensors of the same shapes it always ends in the same plain
operations. So those are written down once, and then only they are run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Taped:
    """A function of tensors that changes some of them, or returns one.

    It must do the same to all tensors of the shapes it is called with, as what ``vmap`` maps does.
    A tape is made the second time: what comes once is not worth one, and a first time may differ.
    """

    def __init__(self, function: Callable[..., Tensor | None]) -> None:
        self._function = function
        self._calls = 0
        self._play: Callable[..., Tensor | None] | None = None

    def __call__(self, *tensors: Tensor) -> Tensor | None:
        if self._play is not None:
            with _plainly():
                return self._play(*tensors)
        self._calls += 1
        if self._calls != 2:
            return self._function(*tensors)
        with Tape(tensors) as tape:
            result = self._function(*tensors)
        self._play = tape.player(result)
        return result


def _plainly() -> ExitStack:
    """Inside, nothing is added to an operation: no gradients, no other precision."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    if torch.is_autocast_enabled("cpu"):
        stack.enter_context(torch.autocast("cpu", enabled=False))
    return stack


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: in the memory of the tensor that a variable holds."""

    variable: str
    view: tuple[Any, ...] | None = None
    """Its size, strides and offset there; None for that tensor itself."""


@dataclass
class _Line:
    operation: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: list[str | None]
    """The variables for what it returns, where that is in memory of its own."""
    writes: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)


class Tape(TorchDispatchMode):
    """Inside, every operation is written down as it runs.

    Views are not written down. Whatever a chain of them ends in is one view of the tensor that
    holds the memory, and is made where it is used.
    """

    def __init__(self, arguments: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._places: dict[int, _Place] = {}
        self._memory: dict[int, str] = {}  # the variable that holds it
        self._alive: list[Any] = [arguments]  # or a new tensor might get the id of an old one
        self._constants: dict[str, Any] = {}
        self._lines: list[_Line] = []
        self._made = 0
        self._dtypes: dict[str, torch.dtype] = {}
        self._arguments = [f"a{number}" for number in range(len(arguments))]
        self._faithful = True
        """Whether what is written down is all there is to it."""
        for variable, tensor in zip(self._arguments, arguments, strict=True):
            if _memory(tensor) in self._memory:  # of two that overlap, whose is a view?
                self._faithful = False
            self._holds(variable, tensor)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        for tensor in _tensors((args, options)):
            if id(tensor) not in self._places:
                self._constant(tensor)
        returned = operation(*args, **options)
        self._alive.append((args, options, returned))
        if self._faithful:
            self._write_down(operation, args, options, returned)
        return returned

    def _write_down(self, operation: Any, args: Any, options: Any, returned: Any) -> None:
        line = _Line(operation, args, options, [])
        results = returned if isinstance(returned, tuple | list) else [returned]
        for result in results:
            line.made.append(self._result(result))
        line.reads = {self._places[id(tensor)].variable for tensor in _tensors((args, options))}
        line.writes = {name for name in line.made if name is not None}
        for tensor in _tensors(list(_written(operation, args, options))):
            line.writes.add(self._places[id(tensor)].variable)
        if line.writes & self._constants.keys():  # would not be the same the next time
            self._faithful = False
        if line.writes:
            self._lines.append(line)

    def _result(self, result: Any) -> str | None:
        """The new variable for it, or None where its memory is known."""
        if not isinstance(result, Tensor):
            self._faithful &= result is None  # a number may decide what comes next
            return None
        if id(result) in self._places:
            return None
        variable = self._memory.get(_memory(result))
        if variable is None:
            self._made += 1
            self._holds(f"t{self._made}", result)
            return f"t{self._made}"
        if variable in self._constants:
            self._constant(result)
            return None
        view = (tuple(result.shape), result.stride(), result.storage_offset())
        self._places[id(result)] = _Place(variable, view)
        self._faithful &= result.dtype == self._dtypes[variable]
        return None

    def _holds(self, variable: str, tensor: Tensor) -> None:
        self._places[id(tensor)] = _Place(variable)
        self._memory[_memory(tensor)] = variable
        self._dtypes[variable] = tensor.dtype

    def _constant(self, tensor: Tensor) -> None:
        """What no operation has made was there before: a table, a number."""
        variable = self._memory.get(_memory(tensor))
        self._faithful &= variable is None or variable in self._constants
        name = self._named(tensor)
        self._holds(name, tensor)
        self._alive.append(tensor)

    def _named(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def player(self, result: Tensor | None) -> Callable[..., Tensor | None] | None:
        """The function that plays the tape; None where it would not be the same."""
        if not self._faithful:
            return None
        script = _Script(self, result)
        return script.compiled()


class _Script:
    """A tape as Python code, one operation a line, every variable gone after its last use."""

    def __init__(self, tape: Tape, result: Tensor | None) -> None:
        self._tape = tape
        self._views: dict[_Place, str] = {}
        self._body: list[str] = []
        self._last: dict[str, int] = {}
        self._used: list[str] = []
        for line in self._needed(result):
            self._write(line)
        self._say(f"return {'' if result is None else self._text(result)}")

    def _needed(self, result: Tensor | None) -> list[_Line]:
        """Without those whose results nobody looks at."""
        tape = self._tape
        wanted = {*tape._arguments, *(tape._places[id(t)].variable for t in _tensors(result))}
        lines = []
        for line in reversed(tape._lines):
            if line.writes & wanted:
                wanted |= line.reads
                lines.append(line)
        return lines[::-1]

    def _write(self, line: _Line) -> None:
        function = self._tape._named(line.operation._op)
        words = [self._text(value) for value in line.arguments]
        words += [f"{name}={self._text(value)}" for name, value in line.options.items()]
        call = f"{function}({', '.join(words)})"
        if any(line.made):
            targets = ", ".join(name or "_" for name in line.made)
            call = f"{targets} = {call}"
        self._used += filter(None, line.made)
        self._say(call)

    def _say(self, text: str) -> None:
        self._last |= dict.fromkeys(self._used, len(self._body))
        self._used = []
        self._body.append(text)

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._variable(self._tape._places[id(value)])
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._text(item) for item in value)}]"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        return self._tape._named(value)

    def _variable(self, place: _Place) -> str:
        variable = place.variable
        if place.view is not None:
            if place not in self._views:
                self._views[place] = f"v{len(self._views)}"
                size, strides, offset = place.view
                self._last[variable] = len(self._body)
                self._body.append(
                    f"{self._views[place]} = as_strided({variable}, {size}, {strides}, {offset})"
                )
            variable = self._views[place]
        self._used.append(variable)
        return variable

    def compiled(self) -> Callable[..., Tensor | None]:
        gone: dict[int, list[str]] = {}
        for variable, line in self._last.items():
            if variable[0] in "tv" and line < len(self._body) - 1:
                gone.setdefault(line, []).append(variable)
        lines = [f"def play({', '.join(self._tape._arguments)}):"]
        for number, text in enumerate(self._body):
            lines.append(f"    {text}")
            if number in gone:
                lines.append(f"    del {', '.join(gone[number])}")
        space = {"as_strided": torch.as_strided, **self._tape._constants}
        exec("\n".join(lines), space)
        play: Callable[..., Tensor | None] = space["play"]
        return play


def _memory(tensor: Tensor) -> int:
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _written(operation: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation changes."""
    if not operation._schema.is_mutable:
        return
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.kwarg_only:
                yield options[argument.name]
            elif number < len(args):
                yield args[number]
