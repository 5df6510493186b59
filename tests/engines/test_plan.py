"""Networks as people write them become plans, and a plan is what the network computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from perfed.core.randomness import addressed
from perfed.engines.stacked import layers
from perfed.engines.stacked.layers import Tensors
from perfed.engines.stacked.operations import Chunks, apply
from perfed.engines.stacked.plan import Plan, plan_of
from perfed.engines.stacked.stack import StackedModule

CLIENTS, BATCH = 3, 4


class Block(nn.Module):
    """As torchvision writes it: in place, and ``+=``."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        rectified: Tensor = self.relu(out)
        return rectified


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 4, 1), Block(4, 6, 2))
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.blocks(x), 1)
        logits: Tensor = self.fc(torch.flatten(x, 1))
        return logits


class PreActivation(nn.Module):
    """What BatchNorm gives is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1)
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(x))
        logits: Tensor = self.fc((y + self.conv(y)).mean((2, 3)))
        return logits


class Functional(nn.Module):
    """As tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc1 = nn.Conv2d(3, 4, 3), nn.Linear(4 * 3 * 3, 8)
        self.fc2 = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = x.view(x.size(0), -1)
        x = F.dropout(F.relu(self.fc1(x)), training=self.training)
        logits: Tensor = self.fc2(x)
        return logits


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(7, 7, 3, padding=1, groups=7)
        self.norm, self.fc = nn.GroupNorm(7, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, F.relu6(self.one(x))], dim=1)
        x = self.norm(self.two(x))
        x = F.adaptive_avg_pool2d(x, (1, 1))
        logits: Tensor = self.fc(x.reshape(x.shape[0], -1))
        return logits


class Attending(nn.Module):
    """A transformer's block. Parameters are used outside of layers, one with fewer dimensions than
    what it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.answer = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(5, 8))
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Identity()
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.project(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.answer.expand(x.shape[0], -1, -1), patches], 1) + self.places
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        seen = F.scaled_dot_product_attention(
            self._by_head(q), self._by_head(k), self._by_head(v), is_causal=True
        )
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        logits: Tensor = self.fc(F.gelu(x)[:, -1])
        return logits

    def _by_head(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (2, -1)).transpose(1, 2)


NETWORKS: list[Callable[[], nn.Module]] = [Residual, PreActivation, Functional, Dense, Attending]


def stacked_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Of clients that differ."""
    named = (*module.named_parameters(), *module.named_buffers())

    def moved(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return torch.stack([t] * CLIENTS)
        return t.detach() * (1 + 0.1 * torch.rand(CLIENTS, *t.shape, dtype=t.dtype))

    return {name: moved(t) for name, t in named}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", NETWORKS)
def test_a_plan_is_what_the_network_computes(make: Callable[[], nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    module = make().double().train(training)
    plan = plan_of(module)
    assert plan is not None
    tensors = stacked_tensors(module)
    apart = {name: t.clone() for name, t in tensors.items()}
    x = torch.randn(CLIENTS, BATCH, 3, 8, 8, dtype=torch.float64)
    names = [name for name, _ in module.named_parameters()]
    for part in (tensors, apart):
        for name in names:
            part[name].requires_grad_()
    keys = torch.arange(CLIENTS)
    with addressed(keys):
        together = plan.run(Tensors(tensors), x)
    each = []
    for k in range(CLIENTS):
        with addressed(keys[k]):
            each.append(functional_call(module, {n: t[k] for n, t in apart.items()}, (x[k],)))
    torch.testing.assert_close(together, torch.stack(each))
    found = torch.autograd.grad(together.square().sum(), [tensors[n] for n in names])
    wanted = torch.autograd.grad(torch.stack(each).square().sum(), [apart[n] for n in names])
    for name, a, b in zip(names, found, wanted, strict=True):
        torch.testing.assert_close(a, b, msg=name)
    for name, _ in module.named_buffers():
        torch.testing.assert_close(tensors[name], apart[name], msg=name)


class SharedInPlace(nn.Module):
    """``relu_`` changes what is added afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu = nn.Linear(3, 3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        total: Tensor = self.relu(y) + y
        return total


class UnseenBranch(nn.Module):
    """Its statistics move, though nobody sees what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        y: Tensor = self.fc(x)
        return y


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) if x.sum() > 0 else self.fc(-x)
        return y


class OneSample(nn.Module):
    """What it gives is not for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.fc(x)[0]
        return y


class SizeOfParameter(nn.Module):
    """The size of a parameter is not that of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.table.expand(self.table.shape[0], -1)
        return y


@pytest.mark.parametrize(
    "make", [SharedInPlace, UnseenBranch, Undecided, OneSample, SizeOfParameter, nn.LSTM]
)
def test_what_a_plan_would_get_wrong_has_none(make: Callable[..., nn.Module]) -> None:
    assert plan_of(make(3, 3) if make is nn.LSTM else make()) is None


def test_a_network_without_a_plan_is_mapped_if_that_is_right() -> None:
    assert StackedModule(SharedInPlace(), torch.randn(4, 3)).obstacle is None
    assert StackedModule(Undecided(), torch.randn(4, 3)).obstacle is not None


def test_private_and_public_samples_meet_after_the_last_batch_norm() -> None:
    module = Residual().double().eval()
    plan = plan_of(module)
    assert plan is not None
    apart, together = plan.split(plan.cut())
    rules = [step.rule for step in apart.steps]
    assert rules.count(layers.batch_norm) == 6
    assert rules[-2:] == [layers.add, layers.relu]  # the branch and its shortcut have met
    tensors = Tensors({n: t.detach()[None] for n, t in module.state_dict().items()})
    x = torch.randn(1, BATCH, 3, 8, 8, dtype=torch.float64)
    halves = together.run(tensors, apart.run(tensors, x))
    torch.testing.assert_close(halves[0], module(x[0]))


def test_features_are_what_the_last_layer_is_given() -> None:
    plan = plan_of(Residual())
    assert plan is not None
    features = plan.before_last()
    assert isinstance(features, Plan)
    tensors = Tensors(stacked_tensors(Residual()))
    x = torch.randn(CLIENTS, BATCH, 3, 8, 8)
    logits = plan.last().run(tensors, features.run(tensors, x))
    torch.testing.assert_close(logits, plan.run(tensors, x), rtol=1e-3, atol=1e-3)


def test_the_gradients_of_chunks_are_joined_without_a_copy_where_they_lie_side_by_side() -> None:
    x = torch.randn(2, 4, 6, requires_grad=True)
    whole = torch.randn(2, 4, 6)
    parts = whole.chunk(3, -1)
    for order in ([0, 1, 2], [0, 2, 1], [0, 0, 0]):
        grads = [parts[number] for number in order]
        (joined,) = torch.autograd.grad(apply(Chunks, x, 3, -1), x, grads)
        torch.testing.assert_close(joined, torch.cat(grads, -1))
        assert (joined.data_ptr() == whole.data_ptr()) == (order == [0, 1, 2])
