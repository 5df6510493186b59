"""What is played back does what the function does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from perfed.engines.stacked.tape import WORTH, Tape, Taped, TapedSteps


def counted(function: Callable[..., Any]) -> tuple[Taped, list[int]]:
    """The function on tape, and how often it itself has run."""
    runs: list[int] = []

    def counting(*tensors: Tensor) -> Any:
        runs.append(1)
        return function(*tensors)

    return Taped(counting), runs


def views(x: Tensor, y: Tensor) -> Tensor:
    halves = x.reshape(2, 3, 4).transpose(0, 1)[1:].split(1)
    return torch.cat([half.expand(2, 2, 4) for half in halves], 1) * y[1:].unsqueeze(1)


def changes(x: Tensor, y: Tensor) -> Tensor:
    row = x.view(-1)[3:15].view(4, 3)  # a view, changed in place and seen through another
    row.mul_(2).add_(y[:, :3].reshape(-1)[:1])
    torch.sub(x[0], 1.5, out=x[1])
    x.t()[0] = y.sum()
    return x + 1


def gradients(x: Tensor, y: Tensor) -> Tensor:
    def loss(row: Tensor) -> Tensor:
        target = torch.tensor(2)
        kept = row.detach().clone()
        kept += 1
        return F.cross_entropy(row, target) + 2.0 * row.softmax(0).square().sum() / kept.sum()

    slope: Tensor = vmap(grad(loss))(x)
    weight = y.detach().requires_grad_()
    value = F.relu(weight @ slope.mT).square().mean()
    (other,) = torch.autograd.grad(value, weight)
    return other.sum(0) + slope.amax()


def tables(x: Tensor, y: Tensor) -> Tensor:
    where = torch.arange(6) % 2
    return x.view(-1)[where] + TABLE[where] + torch.where(y.view(-1)[:6] > 0, 1.0, y[0, 0])


TABLE = torch.tensor([10.0, 20.0])


@pytest.mark.parametrize("function", [views, changes, gradients, tables])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tape_does_what_the_function_does(
    function: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    taped, runs = counted(function)
    random = torch.Generator().manual_seed(0)
    for _ in range(WORTH + 4):
        given = [torch.randn(*size, generator=random).to(dtype) for size in ((4, 6), (3, 4))]
        if function is gradients:
            given[1] = torch.randn(5, 6, generator=random).to(dtype)
        copies = [tensor.clone() for tensor in given]
        torch.testing.assert_close(taped(*given), function(*copies), rtol=0, atol=0)
        torch.testing.assert_close(given, copies, rtol=0, atol=0)
    assert taped.ready
    assert len(runs) == WORTH  # in the last of which it was written down


def test_what_nobody_looks_at_is_left_out() -> None:
    def function(x: Tensor) -> Tensor:
        torch.ones_like(x.exp().sum())
        unseen = torch.zeros_like(x)
        unseen.add_(x.sin())
        return x + torch.ones_like(x.cos())

    x = torch.ones(3)
    with Tape((x,)) as tape:
        result = function(x)
    operations = [torch.ops.aten.ones.default, torch.ops.aten.add.Tensor]
    assert [line.operation for line in tape.needed(result)] == operations


COUNT = torch.zeros(1)


def counts(x: Tensor) -> Tensor:
    COUNT.add_(1)  # not an argument: the next time would begin where this one ended
    return x * 2


def decides(x: Tensor) -> Tensor:
    return x * 2 if float(x.sum()) > 0 else -x


def reinterprets(x: Tensor) -> Tensor:
    return x.view(torch.int32).bitwise_and(-8).view(torch.float32)


@pytest.mark.parametrize("function", [counts, decides, reinterprets])
def test_what_cannot_be_written_down_is_not(function: Callable[[Tensor], Tensor]) -> None:
    taped, runs = counted(function)
    for number in range(-WORTH, WORTH):
        x = torch.full((4,), float(number) + 0.3)
        torch.testing.assert_close(taped(x), function(x), rtol=0, atol=0)
    assert not taped.ready
    assert len(runs) == 2 * WORTH


def test_arguments_that_share_memory_are_not_written_down() -> None:
    def function(x: Tensor, y: Tensor) -> None:
        x.add_(1)
        y.mul_(2)

    taped, _ = counted(function)
    for _ in range(WORTH + 1):
        both = torch.ones(2)
        taped(both[:1], both[:1])
        assert both[0] == 4
    assert not taped.ready


def test_several_threads_may_play_one_tape() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(20):
            x = (x @ y).tanh()
        return x

    taped, runs = counted(function)
    y = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    given = [torch.full((8, 8), number / 50) for number in range(50)]
    for x in given[:WORTH]:
        taped(x, y)
    with ThreadPoolExecutor(4) as pool:
        played = list(pool.map(lambda x: taped(x, y), given))
    assert len(runs) == WORTH
    for x, found in zip(given, played, strict=True):
        torch.testing.assert_close(found, function(x, y), rtol=0, atol=0)


def test_under_autocast_a_tape_computes_in_the_same_numbers() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.linear(x, y).float() + 1

    taped, runs = counted(function)
    for number in range(WORTH + 2):
        x, y = torch.full((3, 4), 0.1 + number), torch.full((2, 4), 1.7)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            torch.testing.assert_close(taped(x, y), function(x, y), rtol=0, atol=0)
    assert len(runs) == WORTH


def test_steps_on_tape_are_those_of_the_function() -> None:
    def step(where: Tensor, factor: Tensor, x: Tensor, y: Tensor) -> None:
        x += factor[:, None] * y[where].tanh()
        y[0] += x.sum()

    taped = TapedSteps(step, sliced=2)
    random = torch.Generator().manual_seed(0)
    for first in (0, 2):
        steps = 12
        where = torch.randint(0, 5, (3, steps, 4), generator=random)
        factor = torch.randn(3, steps, generator=random)
        given = [torch.randn(3, 4, generator=random), torch.randn(5, generator=random)]
        copies = [tensor.clone() for tensor in given]
        for last in (7, 8, steps):  # before the tape is made, and after
            taped.steps(first, last, where, factor, *given)
            for number in range(first, last):
                step(where[:, number], factor[:, number], *copies)
            torch.testing.assert_close(given, copies, rtol=0, atol=0)
            first = last
    assert taped.ready


def test_steps_that_cannot_be_written_down_are_made_one_by_one() -> None:
    def step(x: Tensor, y: Tensor) -> None:
        y += x * 2 if float(x.sum()) > 0 else -x

    taped = TapedSteps(step, sliced=1)
    x, y = torch.tensor([[1.0, -2.0, 3.0, -4.0, 5.0, -6.0]]), torch.zeros(1)
    taped.steps(0, 6, x, y)
    assert not taped.ready
    assert y.item() == 2 + 2 + 6 + 4 + 10 + 6
