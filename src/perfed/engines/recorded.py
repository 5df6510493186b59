"""A stack's computation, recorded once and replayed: the local loop without Python in it.

A recording is for a fixed number of clients. It is traced to a graph of tensor operations, compiled
where there is a compiler (and then compared with the plain graph), and on a GPU captured as a CUDA
graph. Its inputs are tensors at fixed places, into which each stack is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from perfed.core.tree import Weights
from perfed.engines.stack import Draws, Samples, StackedModule, StackedStep

Function = Callable[..., list[Tensor]]
log = logging.getLogger("perfed")


class Recording:
    """A function of fixed tensors, ready to be run again and again."""

    def __init__(self, function: Function, tensors: Sequence[Tensor], changes: int) -> None:
        """``function`` changes the first ``changes`` of ``tensors`` in place."""
        self._tensors = list(tensors)
        before = [tensor.clone() for tensor in tensors[:changes]]
        traced = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        self._outputs: list[Tensor] = []
        self._run: Callable[[], None] = self._plain(traced)
        if tensors[0].is_cuda:
            self._run = self._captured(self._compiled(traced, before))
        for tensor, value in zip(tensors, before, strict=False):
            tensor.copy_(value)

    def run(self) -> list[Tensor]:
        self._run()
        return self._outputs

    def _plain(self, function: Function) -> Callable[[], None]:
        def run() -> None:
            self._outputs = function(*self._tensors)

        return run

    def _compiled(self, traced: torch.fx.GraphModule, before: Sequence[Tensor]) -> Function:
        """Compiled, if that works here and gives what the plain graph gives."""
        try:
            compiled: Function = torch._inductor.compile(traced, [*self._tensors])
            expected = self._result_of(traced, before)
            result = self._result_of(compiled, before)
        except Exception as error:  # whatever a compiler can stumble over
            log.warning("not compiled, so slower: %s", str(error).split("\n")[0])
            return traced
        for one, other in zip(result, expected, strict=True):
            scale = other.double().norm() + 1e-6
            if not (one.double() - other.double()).norm() <= 0.05 * scale:
                log.warning("the compiler gave other numbers; going on without, slower")
                return traced
        return compiled

    def _result_of(self, function: Function, before: Sequence[Tensor]) -> list[Tensor]:
        for tensor, value in zip(self._tensors, before, strict=False):
            tensor.copy_(value)
        outputs = function(*self._tensors)
        return [tensor.clone() for tensor in (*self._tensors[: len(before)], *outputs)]

    def _captured(self, function: Function) -> Callable[[], None]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is allocated or tuned on a first call comes here
            for _ in range(2):
                function(*self._tensors)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs = function(*self._tensors)
        return graph.replay


class RecordedTraining:
    """The training of a stack of ``lanes`` clients."""

    def __init__(
        self,
        step: StackedStep,
        lanes: int,
        weights: Weights,
        inputs: list[Tensor],
        samples: Samples,
        draws: Draws,
    ) -> None:
        state = (weights, inputs, draws.private, _listed(draws.public), draws.public_start)
        self._state = tree_map(lambda t: filled(t, lanes), state)
        device = samples.x.device
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        self._rate = torch.zeros((), device=device)
        leaves, form = tree_flatten(self._state)
        given = [samples.x, samples.y, samples.public_x, self._rate]
        self._steps = draws.private[0].shape[1]

        def one_step(number: Tensor, *tensors: Tensor) -> list[Tensor]:
            x, y, public_x, rate, *rest = tensors
            weights, inputs, private, public, start = tree_unflatten(rest, form)
            now = number % self._steps

            def of_now(positions: Tensor) -> Tensor:
                return positions.index_select(1, now).squeeze(1)

            step(
                weights,
                inputs,
                Samples(x, y, public_x),
                [of_now(positions) for positions in private],
                of_now(public[0]) if public else None,
                start,
                rate,
            )
            number.add_(1)
            return []

        tensors = [self._number, *given, *leaves]
        self._recording = Recording(one_step, tensors, len(tensors))

    def run(self, weights: Weights, inputs: list[Tensor], draws: Draws, rate: float) -> Weights:
        state = (weights, inputs, draws.private, _listed(draws.public), draws.public_start)
        for place, value in zip(tree_flatten(self._state)[0], tree_flatten(state)[0], strict=True):
            place[: len(value)] = value
        self._number.zero_()
        self._rate.fill_(rate)
        for _ in range(self._steps):
            self._recording.run()
        trained: Weights = self._state[0]
        return trained


class RecordedForward:
    """The logits of ``lanes`` models, so many samples of each at once."""

    def __init__(
        self,
        module: StackedModule,
        lanes: int,
        at_once: int,
        tensors: Mapping[str, Tensor],
        samples: Tensor,
    ) -> None:
        self._tensors = {name: filled(t, lanes) for name, t in tensors.items()}
        self._where = torch.zeros(lanes, at_once, dtype=torch.int64, device=samples.device)
        names = list(self._tensors)

        def forward(where: Tensor, samples: Tensor, *stacked: Tensor) -> list[Tensor]:
            named = dict(zip(names, stacked, strict=True))
            with torch.no_grad():
                return [torch.func.vmap(module.evaluate)(named, samples[where])]

        self._recording = Recording(forward, [self._where, samples, *self._tensors.values()], 0)

    def run(self, tensors: Mapping[str, Tensor], where: Tensor) -> Tensor:
        for name, value in tensors.items():
            self._tensors[name][: len(value)] = value
        parts = []
        for part in torch.split(where, self._where.shape[1], dim=1):
            self._where[: part.shape[0], : part.shape[1]] = part
            (logits,) = self._recording.run()
            parts.append(logits[: part.shape[0], : part.shape[1]].clone())
        return torch.cat(parts, dim=1)


def _listed(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def filled(tensor: Tensor, lanes: int) -> Tensor:
    """As many clients as there are lanes: the first one's tensor again where there are fewer."""
    missing = lanes - len(tensor)
    return torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])]).contiguous()
