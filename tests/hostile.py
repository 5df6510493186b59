"""Messages that no honest client sends, by algorithm, and what must be said of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage

Arrays = dict[str, Tensor]
Lie = tuple[Callable[[Arrays], Arrays], str]


def changed(name: str, change: Callable[[Tensor], Any]) -> Callable[[Arrays], Arrays]:
    """One array, whose flat name begins so, is another."""

    def lie(arrays: Arrays) -> Arrays:
        full = next(path for path in arrays if path.startswith(name))
        return arrays | {full: torch.as_tensor(change(arrays[full]))}

    return lie


def without(name: str) -> Callable[[Arrays], Arrays]:
    full = changed(name, lambda values: values)
    return lambda arrays: {path: t for path, t in full(arrays).items() if not path.startswith(name)}


def spoilt(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(values: Tensor) -> Tensor:
        values = values.clone()
        values.reshape(-1)[-1] = value
        return values

    return spoil


DECISIONS: dict[str, Lie] = {
    "1e30": (changed("soft", lambda t: t + 1e30), "soft_decisions: row 0 sums to 1e+31, must be 1"),
    "3e38": (changed("soft", lambda t: t + 3e38), "soft_decisions: has 3e+38, more than can be"),
    "rows of 1000": (changed("soft", lambda t: t * 1000), "row 0 sums to 1000, must be 1"),
    "zeros": (changed("soft", torch.zeros_like), "row 0 sums to 0, must be 1"),
    "negative": (
        changed("soft", lambda t: torch.cat([t[:, :1] - 1, t[:, 1:2] + 1, t[:, 2:]], 1)),
        "must not be negative",
    ),
    "int64": (changed("soft", lambda t: t.round().long()), "is int64, must be float32"),
    "float64": (changed("soft", lambda t: t.double()), "is float64, must be float32"),
    "bool": (changed("soft", lambda t: t > 0.5), "is bool, must be float32"),
    "NaN": (changed("soft", spoilt(float("nan"))), "soft_decisions: is not finite"),
    "Inf": (changed("soft", spoilt(float("inf"))), "soft_decisions: is not finite"),
    "short": (changed("soft", lambda t: t[:3]), "is 3×10, must be |P|×N (30×10)"),
    "turned": (changed("soft", lambda t: t.T), "is 10×30, must be |P|×N (30×10)"),
    "flat": (changed("soft", lambda t: t[0, 0]), "is a single number, must be |P|×N (30×10)"),
    "extra": (
        lambda arrays: arrays | {"more": torch.zeros(1000, 1000)},
        "an unknown array 'more', must be soft_decisions",
    ),
    "extra below": (
        lambda arrays: arrays | {"soft_decisions/x": torch.zeros(1)},
        "an unknown array 'soft_decisions/x', must be",
    ),
    "escape codes": (
        lambda arrays: arrays | {"\x1b[2J\n": torch.zeros(1)},
        r"an unknown array '\x1b[2J\n', must be",
    ),
    "missing": (without("soft"), "soft_decisions: is missing"),
    "nothing": (lambda arrays: {}, "soft_decisions: is missing"),
}
LIES: dict[str, dict[str, Lie]] = {
    "perfed-ckt": DECISIONS,
    "perfed-evidence": {
        "rows of 1000": DECISIONS["rows of 1000"],
        "samples 1e9": (
            changed("samples", lambda t: t * 0 + 10**9),
            "samples: is 1000000000, must",
        ),
        "samples -1e6": (changed("samples", lambda t: t * 0 - 10**6), "samples: is -1000000, must"),
        "samples 0": (changed("samples", lambda t: t * 0), "samples: is 0, must be"),
        "samples 1.5": (changed("samples", lambda t: t + 0.5), "is float32, must be int64"),
        "samples of many": (changed("samples", lambda t: t.repeat(9)), "must be a single number"),
        "gains 1e30": (changed("gains", lambda t: t + 1e30), "gains: has 1e+30, must be numbers"),
        "no gains": (without("gains"), "gains: is missing"),
    },
    "fedavg": {
        "NaN": (changed("model/params", spoilt(float("nan"))), "is not finite"),
        "3e38": (changed("model/params", lambda t: t + 3e38), "more than can be summed"),
        "other shape": (changed("model/params", lambda t: t[:1]), ": is 1"),
        "float64": (changed("model/params", lambda t: t.double()), "is float64, must be float32"),
        "one less": (without("model/params/1.weight"), "1.weight: is missing"),
        "one more": (
            lambda arrays: arrays | {"model/params/more": torch.zeros(3)},
            "an unknown array 'model/params/more'",
        ),
        "samples 1e9": (
            changed("samples", lambda t: t * 0 + 10**9),
            "samples: is 1000000000, must",
        ),
    },
    "scaffold": {
        "control": (changed("control_change", lambda t: t[None]), "control_change/"),
        "no control": (without("control_change"), "is missing"),
    },
    "hypcluster": {
        "cluster 7": (changed("cluster", lambda t: t * 0 + 7), "cluster: has 7, must be whole"),
        "cluster -1": (changed("cluster", lambda t: t * 0 - 1), "cluster: has -1, must be whole"),
    },
    "fedfomo": {
        "one more": (
            changed("amounts", lambda t: torch.zeros(len(t) + 1)),
            "amounts: is",
        ),
        "none": (changed("amounts", lambda t: t[:0]), "amounts: is 0, must be as many as"),
        "1e30": (changed("amounts", lambda t: t + 1e30), "amounts: has 1e+30, must be"),
        "negative": (changed("amounts", lambda t: t - 2), "amounts: has -"),
    },
}
LIES["perfed-kin"] = LIES["perfed-evidence"]
EVERY = [(name, lie) for name, lies in LIES.items() for lie in lies]


@dataclass(frozen=True)
class Lying(Stage):
    """What comes from some clients, from round 1 on, is not what they sent."""

    clients: tuple[int, ...] = option((1,), "whose")
    algorithm: str = option("perfed-ckt", "what they should send")
    lie: str = option(
        "1e30",
        "what comes instead",
    )

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        if at.client not in self.clients or at.round < 1:
            return message, state
        lie, _ = LIES[self.algorithm][self.lie]
        return Message.from_arrays(lie(message.arrays)), state
