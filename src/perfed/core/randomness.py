# mypy: disable-error-code="no-untyped-call"
"""Random numbers that a network draws while it trains, from addressed streams.

Dropout and its kin ask torch's global generator: what they get depends on the device, and on who
asked before. Inside :func:`addressed` it is a pure function of the client's key for this step,
of which draw of the step it is, and of the place in the tensor. So it is the same on every engine
and device, for one client and for a stack of clients.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from perfed.core.streams import BITS, random_bits, substream

Draw = Callable[[Sequence[int]], Tensor]  # so many random bits for each element of this shape
_aten = torch.ops.aten
_RECURRENT = (torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)


class DispatchMode(TorchDispatchMode):
    """Inside, every operation on tensors is seen."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is ever compiled; to tell the compiler so would import it, for seconds."""
        return False


def is_random(operation: Any, args: Sequence[Any] = (), kwargs: Any = None) -> bool:
    """Whether an operation draws random numbers. Fused attention may, and does not without
    dropout."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def draws_numbers(module: nn.Module, x: Tensor) -> bool:
    """Whether ``module`` draws random numbers while it trains, found by trying."""
    tensors = {name: t.detach().clone() for name, t in module.state_dict().items()}
    was_training = module.training
    devices = [x.device] if x.is_cuda else []
    watch = _Watch()
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), watch:
            functional_call(module.train(), tensors, (x,))
    except Exception:  # a network that cannot train says so where it trains
        return False
    finally:
        module.train(was_training)
    return watch.found


class _Watch(DispatchMode):
    found = False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.found |= is_random(operation, args, kwargs)
        return operation(*args, **(kwargs or {}))


@contextmanager
def dice_of(module: nn.Module) -> Iterator[Callable[[], bool]]:
    """Says whether a network threw Python's or NumPy's own dice inside; the next numbers of both
    are afterwards what they were. No engine has a stream for them."""
    python, numpy = random.getstate(), np.random.get_state()
    before = _dice(module)
    try:
        yield lambda: _dice(module) != before
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _dice(module: nn.Module) -> bytes:
    """The state of the generators that everybody shares, and of those that a network holds."""
    kinds = random.Random | np.random.Generator | np.random.RandomState
    held = [v for part in module.modules() for v in vars(part).values() if isinstance(v, kinds)]
    return pickle.dumps((random.getstate(), np.random.get_state(), held))


@contextmanager
def addressed(keys: Tensor | None) -> Iterator[None]:
    """Inside, random numbers come from the streams with these keys: one client's, or one for each
    client of a stack, whose tensors then have the clients first. None: as torch has them."""
    if keys is None:
        yield
        return
    # Fused attention and cuDNN's recurrent layers have generators of their own.
    recurrent = _PlainRecurrent() if keys.is_cuda else nullcontext()
    with sdpa_kernel(SDPBackend.MATH), recurrent, _Addressed(keys):
        yield


class _PlainRecurrent(TorchFunctionMode):
    """Inside, recurrent layers run without cuDNN."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = function in _RECURRENT
        with torch.backends.cudnn.flags(enabled=False) if plain else nullcontext():
            return function(*args, **(kwargs or {}))


class _Addressed(DispatchMode):
    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self._keys = keys
        self._count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = _RULES.get(operation)
        if rule is not None:
            return rule(self._draw, *args, **(kwargs or {}))
        if is_random(operation, args, kwargs) and self._keys.ndim:
            raise RuntimeError(f"randomness of {operation.name()}, which has no addressed stream")
        return operation(*args, **(kwargs or {}))

    def _draw(self, shape: Sequence[int]) -> Tensor:
        self._count += 1
        stack = tuple(self._keys.shape)
        if tuple(shape[: len(stack)]) != stack:
            raise RuntimeError("randomness that is not each client's own")
        return random_bits(substream(self._keys, self._count), math.prod(shape[len(stack) :])).view(
            *shape
        )


def _chance(draw: Draw, shape: Sequence[int], probability: float) -> Tensor:
    kept: Tensor = draw(shape) < min(int(probability * 2**BITS), 2**BITS - 1)
    return kept


def _uniform(draw: Draw, shape: Sequence[int]) -> Tensor:
    """In [0, 1), with the bits of a float32, so that every device rounds alike."""
    return (draw(shape) >> (BITS - 24)).to(torch.float64) * 2.0**-24


def _normal(draw: Draw, shape: Sequence[int]) -> Tensor:
    """By Box and Muller."""
    radius = (-2 * (1 - _uniform(draw, shape)).log()).sqrt()
    return radius * (2 * math.pi * _uniform(draw, shape)).cos()


def _bernoulli_(draw: Draw, tensor: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
    return tensor.copy_(_chance(draw, tensor.shape, p))


def _bernoulli(draw: Draw, like: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
    return _bernoulli_(draw, torch.empty_like(like), p)


def _native_dropout(draw: Draw, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _chance(draw, x.shape, 1 - p)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _uniform_(
    draw: Draw, tensor: Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None
) -> Tensor:
    return tensor.copy_(low + (high - low) * _uniform(draw, tensor.shape))


def _normal_(
    draw: Draw, tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None
) -> Tensor:
    return tensor.copy_(mean + std * _normal(draw, tensor.shape))


def _made(numbers: Callable[[Draw, Sequence[int]], Tensor]) -> Callable[..., Tensor]:
    """A new tensor of such numbers, of a shape or like another tensor."""

    def make(draw: Draw, like: Tensor | Sequence[int], **options: Any) -> Tensor:
        if isinstance(like, Tensor):
            empty = torch.empty_like(like, **options)
        else:
            empty = torch.empty(like, **options)
        return empty.copy_(numbers(draw, empty.shape))

    return make


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.bernoulli_.float: _bernoulli_,
    _aten.bernoulli.p: _bernoulli,
    _aten.native_dropout.default: _native_dropout,
    _aten.uniform_.default: _uniform_,
    _aten.normal_.default: _normal_,
    _aten.rand.default: _made(_uniform),
    _aten.rand_like.default: _made(_uniform),
    _aten.randn.default: _made(_normal),
    _aten.randn_like.default: _made(_normal),
}
