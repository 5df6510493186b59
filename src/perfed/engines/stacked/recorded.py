"""A stack's computation, recorded once and replayed: the local loop without Python in it.

On a GPU a recording is a CUDA graph, for a fixed number of clients: its inputs are tensors at fixed
places, into which each stack is copied. On a CPU it is a tape (:mod:`.tape`), quickly made, and
every number of clients has its own.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from perfed.core.pixels import samples_at
from perfed.core.predictor import What
from perfed.engines.base import Trained
from perfed.engines.stacked import hopper
from perfed.engines.stacked.alone import LoneModule
from perfed.engines.stacked.stack import (
    Drawn,
    Draws,
    Moving,
    Samples,
    StackedModule,
    StackedStep,
    unstack,
)
from perfed.engines.stacked.tape import Taped, TapedSteps


class Recording:
    """A function that works on tensors at fixed places, ready to be run again and again."""

    def __init__(
        self, function: Callable[[], Tensor | None], changes: Sequence[Tensor], device: torch.device
    ) -> None:
        """``function`` changes no other tensors than ``changes``."""
        before = [tensor.clone() for tensor in changes]

        def restore() -> None:
            for tensor, value in zip(changes, before, strict=True):
                tensor.copy_(value)

        self.output: Tensor | None = None
        self.run = self._plain(function)
        if device.type == "cuda":
            with hopper.compiling(device):
                function()
            restore()
            self.run = self._captured(function)
        restore()

    def _plain(self, function: Callable[[], Tensor | None]) -> Callable[[], None]:
        def run() -> None:
            self.output = function()

        return run

    def _captured(self, function: Callable[[], Tensor | None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is allocated or tuned on a first call comes here
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with without_collection(), torch.cuda.graph(graph):
            self.output = function()
        return graph.replay


@contextmanager
def without_collection() -> Iterator[None]:
    """An earlier run's graph that is collected while another is captured spoils the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class RecordedTraining:
    """The training of a stack of ``lanes`` clients."""

    ready = False  # a GPU does one thing at a time

    def __init__(
        self,
        step: StackedStep,
        lanes: int,
        moving: Moving,
        inputs: list[Tensor],
        samples: Samples,
        draws: Draws,
    ) -> None:
        state = (moving, inputs, draws.drawn, draws.public_start)
        self._state = tree_map(lambda t: filled(t, lanes), state)
        self._steps = draws.drawn.private[0].shape[1]
        device = samples.x.device
        self._rate = torch.zeros((), device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)

        def of_now(positions: Tensor) -> Tensor:
            return positions.index_select(1, self._number).squeeze(1)

        self._rounded = step.rounded(self._state[0].models)

        def one_step() -> None:
            moving, inputs, drawn, public_start = self._state
            now = Drawn(*([of_now(positions) for positions in part] for part in drawn))
            step(moving, inputs, samples, now, public_start, self._rate, self._rounded)
            self._number.add_(1).remainder_(self._steps)

        changes = [self._number, *tree_flatten((self._state[0], self._rounded))[0]]
        self._recording = Recording(one_step, changes, device)

    def begin(
        self, moving: Moving, inputs: list[Tensor], draws: Draws, rate: float
    ) -> Callable[[], dict[int, Trained]]:
        """What makes the rest of the way: here all of it."""
        return functools.partial(self.run, moving, inputs, draws, rate)

    def run(
        self, moving: Moving, inputs: list[Tensor], draws: Draws, rate: float
    ) -> dict[int, Trained]:
        """What each client of the stack then has."""
        state = (moving, inputs, draws.drawn, draws.public_start)
        copy_all(tree_flatten(self._state)[0], tree_flatten(state)[0])
        rounded = [(network, name) for network, own in self._rounded.items() for name in own]
        copy_all(
            [self._rounded[network][name] for network, name in rounded],
            [self._state[0].models[network].params[name] for network, name in rounded],
        )
        self._number.zero_()
        self._rate.fill_(rate)
        trained: dict[int, Trained] = {}
        for finished in steps_until_all_finish(draws.counts):
            self._recording.run()
            trained |= unstack(self._state[0], finished)
        return trained


def copy_all(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Into the first clients of each place: with one call for those of one type, which on a GPU is
    a kernel or two for many tensors."""
    by_type: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values, strict=True):
        here, there = by_type.setdefault((place.dtype, value.dtype), ([], []))
        here.append(place if len(place) == len(value) else place[: len(value)])
        there.append(value)
    for here, there in by_type.values():
        torch._foreach_copy_(here, there)


def steps_until_all_finish(counts: Sequence[int]) -> Iterator[list[int]]:
    """For each step, whose last one it is. Those who are done are taken out then; what becomes of
    their places in the stack is of no interest."""
    for step in range(1, max(counts) + 1):
        yield [lane for lane, count in enumerate(counts) if count == step]


class RecordedForward:
    """The outputs of ``lanes`` models, so many samples of each at once."""

    ready = False

    def __init__(
        self,
        module: StackedModule | LoneModule,
        what: What,
        lanes: int,
        at_once: int,
        tensors: Mapping[str, Tensor],
        samples: Tensor,
    ) -> None:
        self._tensors = {name: filled(t, lanes) for name, t in tensors.items()}
        self._where = torch.zeros(lanes, at_once, dtype=torch.int64, device=samples.device)

        @torch.no_grad()
        def forward() -> Tensor:
            run = torch.func.vmap(functools.partial(module.outputs, False, what))
            rows: Tensor = run(self._tensors, samples_at(samples, self._where))
            return rows

        self._recording = Recording(forward, [], samples.device)

    def begin(self, tensors: Mapping[str, Tensor], where: Tensor) -> Callable[[], Tensor]:
        return functools.partial(self.run, tensors, where)

    def run(self, tensors: Mapping[str, Tensor], where: Tensor) -> Tensor:
        copy_all([self._tensors[name] for name in tensors], [*tensors.values()])
        parts = []
        for part in torch.split(where, self._where.shape[1], dim=1):
            self._where[: part.shape[0], : part.shape[1]] = part
            self._recording.run()
            assert self._recording.output is not None
            parts.append(self._recording.output[: part.shape[0], : part.shape[1]].clone())
        return torch.cat(parts, dim=1)


class TapedTraining:
    """On a CPU, the training of stacks of one size."""

    def __init__(
        self,
        step: StackedStep,
        lanes: int,
        moving: Moving,
        inputs: list[Tensor],
        samples: Samples,
        draws: Draws,
    ) -> None:
        self._step = step
        self._samples = samples
        self._form = tree_flatten((draws.drawn, moving, inputs))[1]
        self._taped = TapedSteps(self._one_step, len(tree_flatten(draws.drawn)[0]))

    @property
    def ready(self) -> bool:
        return self._taped.ready

    def begin(
        self, moving: Moving, inputs: list[Tensor], draws: Draws, rate: float
    ) -> Callable[[], dict[int, Trained]]:
        """Make steps until there is a tape. What comes back makes the others, in any thread, and
        gives what each client of the stack then has. Moves ``moving`` itself."""
        trained: dict[int, Trained] = {}
        parts = self._parts(moving, inputs, draws, rate)
        _go_on_until(lambda: self.ready, parts, trained.update)

        def finish() -> dict[int, Trained]:
            for finished in parts:
                trained.update(finished)
            return trained

        return finish

    def _parts(
        self, moving: Moving, inputs: list[Tensor], draws: Draws, rate: float
    ) -> Iterator[dict[int, Trained]]:
        """Single steps, and once there is a tape all steps up to the next that is somebody's last;
        for each part, who has finished with it."""
        tensors, _ = tree_flatten((draws.drawn, moving, inputs))
        tensors += draws.public_start, torch.tensor(rate)
        done = 0
        while later := [count for count in draws.counts if count > done]:
            first, done = done, min(later) if self.ready else done + 1
            self._taped.steps(first, done, *tensors)
            finished = [lane for lane, count in enumerate(draws.counts) if count == done]
            yield unstack(moving, finished, copied=len(draws.counts) > 1)

    def _one_step(self, *tensors: Tensor) -> None:
        *first, public_start, rate = tensors
        drawn, moving, inputs = tree_unflatten(first, self._form)
        self._step(moving, inputs, self._samples, drawn, public_start, rate)


class TapedForward:
    """On a CPU, the outputs of stacks of one size, so many samples at once."""

    def __init__(
        self,
        module: StackedModule | LoneModule,
        what: What,
        lanes: int,
        at_once: int,
        tensors: Mapping[str, Tensor],
        samples: Tensor,
    ) -> None:
        self._evaluate = functools.partial(module.outputs, False, what)
        self._alone = isinstance(module, LoneModule)
        self._at_once = at_once
        self._names = list(tensors)
        self._samples = samples
        self._taped: dict[int, Taped] = {}

    @property
    def ready(self) -> bool:
        return bool(self._taped) and all(taped.ready for taped in self._taped.values())

    def begin(self, tensors: Mapping[str, Tensor], where: Tensor) -> Callable[[], Tensor]:
        """As for training, chunk by chunk."""
        rows: list[Tensor] = []
        chunks = self._chunks(tensors, where)
        _go_on_until(lambda: self.ready, chunks, rows.append)

        def finish() -> Tensor:
            rows.extend(chunks)
            return rows[-1]

        return finish

    def _chunks(self, tensors: Mapping[str, Tensor], where: Tensor) -> Iterator[Tensor]:
        """The rows of all samples, which each chunk fills further. A few rows kept from every chunk
        would lie between its large tensors, where the next chunk's then do not fit: memory grew."""
        every, done = torch.empty(0), 0
        for part in torch.split(where, self._at_once, dim=1):
            count = part.shape[1]
            if self._alone:  # the last chunk like the others, that it needs no tape of its own
                part = pad(part, (0, self._at_once - count))
            taped = self._taped.setdefault(part.shape[1], Taped(self._forward))
            rows = taped(part.clone(), *tensors.values())
            assert rows is not None
            if not done:
                every = rows.new_empty(len(rows), where.shape[1], *rows.shape[2:])
            every[:, done : done + count] = rows[:, :count]
            done += count
            del rows
            yield every

    @torch.no_grad()
    def _forward(self, where: Tensor, *tensors: Tensor) -> Tensor:
        if self._alone:
            own = {n: t.squeeze(0) for n, t in zip(self._names, tensors, strict=True)}
            return self._evaluate(own, samples_at(self._samples, where[0])).unsqueeze(0)
        named = dict(zip(self._names, tensors, strict=True))
        rows: Tensor = torch.func.vmap(self._evaluate)(named, samples_at(self._samples, where))
        return rows


def _go_on_until(
    enough: Callable[[], bool], parts: Iterator[Any], take: Callable[[Any], None]
) -> None:
    while not enough():
        try:
            take(next(parts))
        except StopIteration:
            return


def filled(tensor: Tensor, lanes: int) -> Tensor:
    """As many clients as there are lanes: the first one's tensor again where there are fewer."""
    missing = lanes - len(tensor)
    return hopper.dense_layout(torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])]))
