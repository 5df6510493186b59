"""Recurrent layers in basic operations, which can be mapped over clients; torch's own cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

State = tuple[Tensor, ...]  # (hidden,), or (hidden, cell) of an LSTM


def run(
    layer: nn.RNNBase, otherwise: Callable[..., Any], x: Any, hx: Any = None
) -> tuple[Tensor, Any]:
    """As the layer's own ``forward``; of packed sequences, which differ in length, that itself."""
    if not isinstance(x, Tensor) or x.ndim != 3:
        packed: tuple[Tensor, Any] = otherwise(x, hx)
        return packed
    steps = x.transpose(0, 1) if layer.batch_first else x
    starts = _states(layer, steps, hx)
    ends: list[State] = []
    directions = 2 if layer.bidirectional else 1
    for level in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            output, end = _swept(layer, steps, starts[len(ends)], level, direction == 1)
            outputs.append(output)
            ends.append(end)
        steps = torch.cat(outputs, -1) if directions > 1 else outputs[0]
        if layer.dropout and layer.training and level < layer.num_layers - 1:
            steps = dropout(steps, layer.dropout)
    final = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return (
        steps.transpose(0, 1) if layer.batch_first else steps,
        final if isinstance(layer, nn.LSTM) else final[0],
    )


def _states(layer: nn.RNNBase, steps: Tensor, hx: Any) -> list[State]:
    """What every level and direction begins with."""
    sweeps = layer.num_layers * (2 if layer.bidirectional else 1)
    if hx is None:
        batch = steps.shape[1]
        hidden = steps.new_zeros(batch, layer.proj_size or layer.hidden_size)
        cell = (steps.new_zeros(batch, layer.hidden_size),) if isinstance(layer, nn.LSTM) else ()
        return [(hidden, *cell)] * sweeps
    given = hx if isinstance(layer, nn.LSTM) else (hx,)
    return [tuple(part[sweep] for part in given) for sweep in range(sweeps)]


def _swept(
    layer: nn.RNNBase, steps: Tensor, state: State, level: int, backwards: bool
) -> tuple[Tensor, State]:
    """One level of the layer, in one direction, over all steps."""
    suffix = f"l{level}_reverse" if backwards else f"l{level}"

    def product(x: Tensor, kind: str) -> Tensor:
        bias = getattr(layer, f"bias_{kind}_{suffix}") if layer.bias and kind != "hr" else None
        return linear(x, getattr(layer, f"weight_{kind}_{suffix}"), bias)

    cell, recur = CELLS[type(layer)], partial(product, kind="hh")
    inputs = product(steps, "ih")  # of all steps at once
    outputs: list[Tensor] = []
    order = range(len(steps))
    for number in reversed(order) if backwards else order:
        state = cell(layer, inputs[number], state, recur)
        if layer.proj_size:
            state = (product(state[0], "hr"), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _plain(layer: nn.RNN, x: Tensor, state: State, recur: Callable[[Tensor], Tensor]) -> State:
    total = x + recur(state[0])
    return (total.relu() if layer.nonlinearity == "relu" else total.tanh(),)


def _gru(layer: nn.GRU, x: Tensor, state: State, recur: Callable[[Tensor], Tensor]) -> State:
    reset, update, new = x.chunk(3, -1)
    past_reset, past_update, past_new = recur(state[0]).chunk(3, -1)
    kept = (update + past_update).sigmoid()
    new = (new + (reset + past_reset).sigmoid() * past_new).tanh()
    return (new + kept * (state[0] - new),)


def _lstm(layer: nn.LSTM, x: Tensor, state: State, recur: Callable[[Tensor], Tensor]) -> State:
    enter, forget, new, leave = (x + recur(state[0])).chunk(4, -1)
    cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


CELLS: dict[type[nn.Module], Callable[..., State]] = {
    nn.RNN: _plain,
    nn.GRU: _gru,
    nn.LSTM: _lstm,
}
