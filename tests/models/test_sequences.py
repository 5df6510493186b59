"""Networks for sequences: as many parameters as their formulas say, and stacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from perfed.core.errors import ConfigError
from perfed.core.inputs import Inputs, Tokens
from perfed.engines.stacked.stack import StackedModule
from perfed.models import architectures, build_module, find_head, inputs_for, parameter_count

TOKENS = Inputs((7,), Tokens(11))
STEPS = Inputs((7, 3))
NETWORKS: list[tuple[Any, Inputs]] = [
    ("gru", STEPS),
    ({"name": "gru", "hidden": 4, "layers": 2, "both_ways": True, "dropout": 0.3}, STEPS),
    ("token-mean", TOKENS),
    ({"name": "token-mean", "width": 5, "hidden": [6], "padding": 0, "dropout": 0.2}, TOKENS),
    ({"name": "token-gru", "width": 5, "hidden": 4, "padding": 0}, TOKENS),
]


def made(spec: Any, inputs: Inputs = TOKENS, classes: int = 4) -> nn.Module:
    return build_module(architectures.build(spec), inputs, classes)


def gru_parameters(inputs: int, hidden: int, layers: int, directions: int) -> int:
    """Three gates, each with a matrix for the input, one for the past, and two biases."""
    widths = [inputs, *[hidden * directions] * (layers - 1)]
    return sum(directions * 3 * hidden * (width + hidden + 2) for width in widths)


@pytest.mark.parametrize(("hidden", "layers", "both_ways"), [(8, 1, False), (5, 3, True)])
def test_a_gru_has_the_parameters_of_its_formula(hidden: int, layers: int, both_ways: bool) -> None:
    spec = {"name": "gru", "hidden": hidden, "layers": layers, "both_ways": both_ways}
    directions = 2 if both_ways else 1
    reader = gru_parameters(3, hidden, layers, directions)
    assert parameter_count(made(spec, STEPS)) == reader + (hidden * directions + 1) * 4
    embedded = gru_parameters(6, hidden, layers, directions) + 11 * 6
    token_gru = spec | {"name": "token-gru", "width": 6}
    assert parameter_count(made(token_gru)) == embedded + (hidden * directions + 1) * 4


def test_token_mean_has_a_row_for_each_token() -> None:
    assert parameter_count(made({"name": "token-mean", "width": 6})) == 11 * 6 + (6 + 1) * 4
    hidden = {"name": "token-mean", "width": 6, "hidden": [5, 3]}
    assert parameter_count(made(hidden)) == 11 * 6 + (6 + 1) * 5 + (5 + 1) * 3 + (3 + 1) * 4


@pytest.mark.parametrize(("spec", "inputs"), NETWORKS, ids=str)
def test_stacked_is_one_at_a_time_values_and_gradients(spec: Any, inputs: Inputs) -> None:
    module = made(spec, inputs).double()
    torch.manual_seed(0)
    x = torch.stack([inputs.random(6) for _ in range(3)])
    x = x if inputs.tokens else x.double()
    stacked = StackedModule(module, x[0])
    assert stacked.obstacle is None
    own = {n: torch.randn(3, *t.shape, dtype=t.dtype) for n, t in module.named_parameters()}

    def gradients(run: Any, tensors: dict[str, Tensor], x: Tensor) -> list[Tensor]:
        attached = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        logits = run(attached, x)
        loss = (logits * torch.arange(4.0)).sum() + logits.square().sum()
        return [logits, *torch.autograd.grad(loss, [*attached.values()])]

    mapped = gradients(vmap(lambda t, x: functional_call(stacked.evaluating, t, (x,))), own, x)
    module.eval()
    for client in range(3):
        alone = {name: t[client] for name, t in own.items()}
        single = gradients(lambda t, x: functional_call(module, t, (x,)), alone, x[client])
        for a, b in zip(mapped, single, strict=True):
            torch.testing.assert_close(a[client], b)


@pytest.mark.parametrize(("spec", "inputs"), NETWORKS, ids=str)
def test_they_have_heads(spec: Any, inputs: Inputs) -> None:
    architecture = architectures.build(spec)
    assert find_head(architecture, build_module(architecture, inputs, 4), inputs)[1] > 0


@pytest.mark.parametrize("name", ["token-mean", "token-gru"])
def test_padding_has_no_part_in_the_mean(name: str) -> None:
    module = made({"name": name, "padding": 0})
    short, long = torch.tensor([[5, 3]]), torch.tensor([[5, 3, 0, 0, 0]])
    torch.testing.assert_close(module(short), module(long))
    assert module(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()  # nothing but padding


@pytest.mark.parametrize(
    ("spec", "inputs", "message"),
    [
        ("token-mean", Inputs((1, 8, 8)), "'token-mean' needs tokens, and these samples are num"),
        ("token-gru", Inputs((7,)), "if they are tokens, set data.vocabulary"),
        ("cnn", Inputs((3, 8, 8), Tokens(5)), "'cnn' needs numbers, and these samples are tokens"),
        ("gru", TOKENS, "'gru' needs numbers"),
        ("gru", Inputs((7,)), "'gru' needs sequences, steps×features; this data is 7"),
        ("token-mean", Inputs((7, 2), Tokens(5)), "needs one token after another"),
        ({"name": "token-mean", "padding": 11}, TOKENS, "padding: is 11, tokens are 0 … 10"),
    ],
)
def test_samples_that_do_not_fit_are_said_in_a_line(
    spec: Any, inputs: Inputs, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        made(spec, inputs)
    assert "\n" not in str(caught.value)


class Own(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], classes: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 3)
        self.head = nn.Linear(3 * input_shape[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(x).flatten(1))
        return logits


def test_a_network_of_ones_own_is_told_the_vocabulary() -> None:
    assert parameter_count(made(Own)) == 11 * 3 + (21 + 1) * 4
    with pytest.raises(ConfigError, match="required positional argument: 'vocabulary'"):
        made(Own, Inputs((7,)))
    too_few = nn.Sequential(nn.Embedding(10, 2), nn.Flatten(), nn.Linear(14, 4))
    with pytest.raises(ConfigError, match="cannot take samples of 7 tokens of 11: index out of ra"):
        made(too_few)


def test_whole_numbers_are_measurements_to_networks_for_numbers() -> None:
    """Where nobody says that they are tokens."""
    found = Inputs((7,), Tokens(11, declared=False))
    mlp, mean, own = (architectures.build(a) for a in ("mlp", "token-mean", Own))
    assert inputs_for([mlp], found) == Inputs((7,))
    assert inputs_for([mlp], TOKENS) == TOKENS
    assert inputs_for([mlp, mean], found) == inputs_for([own], found) == found
    with pytest.raises(ConfigError, match="if they are measurements, save them as float32"):
        made(nn.Linear(7, 4), found)
