"""Which client gets which architecture, and the check that it fits the data."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from perfed.core.errors import ConfigError, shape_text
from perfed.core.inputs import Inputs
from perfed.core.network import head_outputs, outputs
from perfed.core.notices import say_once
from perfed.core.schema import Options, option
from perfed.core.streams import numpy_stream, torch_stream
from perfed.core.tree import Weights, moved_buffers
from perfed.models.architectures import Architecture, Shape

_HTFE4 = ("cnn4", "googlenet", "mobilenet-v2", "resnet18")
GROUPS: dict[str, tuple[str, ...]] = {
    "htfe2": ("cnn4", "resnet18"),
    "htfe3": ("resnet10", "resnet18", "resnet34"),
    "htfe4": _HTFE4,
    "htfe8": (*_HTFE4, "resnet34", "resnet50", "resnet101", "resnet152"),
    "htfe9": tuple(f"resnet{layers}" for layers in (4, 6, 8, 10, 18, 34, 50, 101, 152)),
}
"""HtFLlib's groups of networks; all give features of one width."""
GROUP_FEATURES = 512


@dataclass(frozen=True)
class Models(Options):
    """``architectures`` from the smallest to the largest, and how they are dealt out."""

    architectures: tuple[Architecture, ...] = option(
        ("mlp",),
        "the networks in use, smallest first; 'models: htfe2' (3, 4, 8, 9): a group of HtFLlib's",
    )
    assign: Literal["by-size", "shares", "in-turn", "list"] = option(
        "by-size",
        "by-size: drawn, larger networks more often for clients with more samples; shares: a fixed "
        "share of the clients has each; in-turn: client 0 has the first, 1 the second, … and again "
        "from the first; list: as given in per_client",
    )
    shares: tuple[float, ...] = option(
        (), "with assign: shares, the share of clients with each architecture", gt=0, le=1
    )
    per_client: tuple[int, ...] = option(
        (), "with assign: list, each client's position in 'architectures'", ge=0
    )
    initial: Literal["common", "own"] = option(
        "common",
        "initial weights: common, one draw for all clients of an architecture; own, one per client",
    )

    @classmethod
    def expand(cls, value: Any) -> Any:
        """``models: mlp``, ``models: [mlp, cnn]`` and ``models: htfe8``, and in Python
        ``models=MyNet``."""
        if isinstance(value, str) and value in GROUPS:
            networks = [{"name": name, "features": GROUP_FEATURES} for name in GROUPS[value]]
            return {"architectures": networks, "assign": "in-turn"}
        if isinstance(value, str | nn.Module) or callable(value):
            value = [value]
        return {"architectures": value} if isinstance(value, list | tuple) else value

    def validate(self) -> None:
        if not self.architectures:
            raise ConfigError("at least one is needed", "architectures")
        if self.shares and self.assign != "shares":
            raise ConfigError("given, but assign is not 'shares'", "shares")
        if self.assign == "shares":
            if len(self.shares) != len(self.architectures):
                raise ConfigError(
                    f"{len(self.shares)} for {len(self.architectures)} architectures: "
                    "must be one for each",
                    "shares",
                )
            if abs(sum(self.shares) - 1) > 1e-6:
                raise ConfigError(f"sum to {sum(self.shares):g}: must sum to 1", "shares")
        if self.per_client and self.assign != "list":
            raise ConfigError("given, but assign is not 'list'", "per_client")
        if self.per_client and max(self.per_client) >= len(self.architectures):
            raise ConfigError(
                f"position {max(self.per_client)} of {len(self.architectures)} architectures",
                "per_client",
            )

    def deal(self, train_sizes: np.ndarray, seed: int) -> list[Architecture]:
        """Each client's architecture."""
        return [self.architectures[position] for position in self.positions(train_sizes, seed)]

    def positions(self, train_sizes: np.ndarray, seed: int) -> np.ndarray:
        """The position of each client's architecture."""
        if self.assign == "list":
            if len(self.per_client) != len(train_sizes):
                raise ConfigError(
                    f"{len(self.per_client)} entries for {len(train_sizes)} clients",
                    "models.per_client",
                )
            positions = np.array(self.per_client, dtype=int)
        elif self.assign == "in-turn":
            positions = np.arange(len(train_sizes)) % len(self.architectures)
        elif self.assign == "shares":
            counts = _counts(np.array(self.shares), len(train_sizes))
            ordered = np.repeat(np.arange(len(counts)), counts)
            positions = numpy_stream(seed, "architectures").permutation(ordered)
        else:
            # The paper: "the probability of a larger model … is proportional to the client's
            # dataset size". With two architectures that is this rule to the letter; with more,
            # the expected position grows in proportion.
            positions = numpy_stream(seed, "architectures").binomial(
                len(self.architectures) - 1, train_sizes / train_sizes.max()
            )
        return positions


def _counts(shares: np.ndarray, clients: int) -> np.ndarray:
    """Whole numbers nearest to the shares that sum to ``clients`` (largest remainders)."""
    exact = shares * clients
    counts = np.floor(exact + 1e-9).astype(int)
    most_left = np.argsort(counts - exact, kind="stable")
    counts[most_left[: clients - counts.sum()]] += 1
    return counts


def inputs_for(architectures: Iterable[Architecture], inputs: Inputs) -> Inputs:
    """What a sample is to these networks: whole numbers that nobody calls tokens are measurements
    to those that compute with numbers."""
    if inputs.tokens is None or inputs.tokens.declared:
        return inputs
    found = list(architectures)
    if any(architecture.takes != "numbers" for architecture in found):
        return inputs
    say_once(
        f"samples are whole numbers, which '{found[0].label()}' takes as measurements: if they are "
        "tokens, choose a network for tokens"
    )
    return Inputs(inputs.shape)


def _speak_of_softmax(label: str, output: torch.Tensor) -> None:
    """Losses and soft decisions apply softmax themselves: a second one makes all classes alike."""
    numbers = output.double()
    ones = torch.ones(len(numbers), dtype=numbers.dtype, device=numbers.device)
    if (numbers >= 0).all() and torch.allclose(numbers.sum(1), ones, atol=1e-4):
        what = "softmax: what it gives are probabilities"
    elif torch.allclose(numbers.exp().sum(1), ones, atol=1e-4):
        what = "log-softmax: what it gives are log-probabilities"
    else:
        return
    say_once(f"'{label}' ends in {what}; perfed takes logits, so leave that last layer out")


def build_module(architecture: Architecture, inputs: Inputs | Shape, classes: int) -> nn.Module:
    """The module, after checking that it takes the data and has an output per class."""
    label, inputs = architecture.label(), Inputs.of(inputs)
    _check_kind(architecture, inputs)
    try:
        with torch_stream(0, "template"):
            module = architecture.build_for(inputs, classes)
            module.eval()
            x = inputs.zeros(2)
            with torch.no_grad():
                output = module(x)
                if inputs.tokens:  # a GPU would fail beyond repair on one that is too high
                    module(x + inputs.vocabulary - 1)
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's own module raises
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"'{label}' cannot take samples of {_described(inputs)}: {reason[0]}", "models"
        ) from None
    if not isinstance(output, torch.Tensor):
        raise ConfigError(
            f"'{label}' gives a {type(output).__name__}: it must give a tensor, "
            f"{classes} numbers (logits) for each sample",
            "models",
        )
    if output.ndim != 2 or len(output) != 2:
        raise ConfigError(
            f"'{label}' gives a tensor of shape {tuple(output.shape)} for 2 samples: it must give "
            f"a row of {classes} numbers (logits) for each",
            "models",
        )
    if output.shape[1] != classes:
        raise ConfigError(
            f"'{label}' gives {output.shape[1]} numbers for one sample, but the data has "
            f"{classes} classes: its last layer must have {classes} outputs",
            "models",
        )
    _check_parameters(label, module)
    _speak_of_softmax(label, output)
    if _is_changed(x) or _changes_in_training(module, inputs):
        raise ConfigError(
            f"'{label}' changes its input in place, the clients' data: it must work on a copy "
            "(x = x + 1, not x += 1; no inplace=True in the first layer)",
            "models",
        )
    return module


def _check_kind(architecture: Architecture, inputs: Inputs) -> None:
    if architecture.takes == "tokens" and not inputs.tokens:
        raise ConfigError(
            f"'{architecture.label()}' needs tokens, and these samples are numbers (shape "
            f"{shape_text(inputs.shape)}): if they are tokens, set data.vocabulary",
            "models",
        )
    if architecture.takes == "numbers" and inputs.tokens:
        raise ConfigError(
            f"'{architecture.label()}' needs numbers, and these samples are tokens: choose a "
            "network for tokens ('perfed list models')",
            "models",
        )


def _described(inputs: Inputs) -> str:
    if not inputs.tokens:
        return f"shape {shape_text(inputs.shape)}"
    hint = "" if inputs.tokens.declared else " (if they are measurements, save them as float32)"
    return f"{inputs}{hint}"


def _is_changed(zeros: torch.Tensor) -> bool:
    """PyTorch counts changes in place, also those that leave a zero as it is; not those through
    ``x.data`` or NumPy."""
    return zeros._version > 0 or bool(zeros.any())


def _changes_in_training(module: nn.Module, inputs: Inputs) -> bool:
    """As above for what happens in training only, such as noise or Dropout."""
    x = inputs.zeros(2)
    try:
        with torch_stream(0, "template"), torch.no_grad():
            copy.deepcopy(module).train()(x)
    except (Exception, SystemExit):  # a network that cannot train says so where it trains
        return False
    return _is_changed(x)


def _check_parameters(label: str, module: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"'{label}' has no parameters to train: nothing in it learns", "models")


def check_trains_on_one(label: str, module: nn.Module, inputs: Inputs, where: str) -> None:
    """BatchNorm has no variance of one value; ``where`` sets the samples of a mini-batch to one."""
    device = next(module.parameters()).device
    try:
        with torch_stream(0, "template"), torch.no_grad():
            copy.deepcopy(module).train()(inputs.zeros(1, device))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            f"BatchNorm in '{label}' has one value per channel to normalise: must be at least 2",
            where,
        ) from None


def find_head(
    architecture: Architecture, module: nn.Module, inputs: Inputs | Shape
) -> tuple[str, int]:
    """The name of a network's last layer and the width of what goes into it, after checking that
    the network is just that: features, and a head that makes its logits of them."""
    label = architecture.label()
    head = architecture.head_in(module)
    if not head:
        raise ConfigError(
            f"'{label}' has no Linear layer that could be its head: name its last layer, as in "
            "{name: imported, factory: file.py:Net, head: classifier}",
            "models",
        )
    if any(True for _ in module.get_submodule(head).buffers()):
        raise ConfigError(
            f"'{label}' keeps running statistics in its last layer '{head}': name one without",
            "models",
        )
    device = next(module.parameters()).device
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch_stream(0, "template"), torch.no_grad():
        x = Inputs.of(inputs).random(2).to(device)
        features = outputs(module.eval(), head, tensors, x, "features")
        logits = outputs(module, head, tensors, x, "logits")
        if features.ndim != 2:
            raise ConfigError(
                f"'{label}' gives its last layer '{head}' values of shape "
                f"{shape_text(features.shape[1:])} for a sample: features must be a row of numbers",
                "models",
            )
        made = head_outputs(module, head, tensors, features)
    if made.shape != logits.shape or not torch.allclose(made, logits, rtol=1e-3, atol=1e-4):
        raise ConfigError(
            f"'{label}' changes the output of its layer '{head}' before it returns it: name the "
            "layer that gives the logits (head: …)",
            "models",
        )
    return head, features.shape[1]


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def initial_weights(
    architecture: Architecture,
    inputs: Inputs | Shape,
    classes: int,
    seed: int,
    client: int = -1,
    number: int = 0,
) -> Weights:
    """The architecture's initial weights: common to all clients, or one client's own."""
    with torch_stream(seed, f"initial/{architecture.address()}/{number}", client):
        module = architecture.build_for(Inputs.of(inputs), classes)
        if any(isinstance(layer, LazyModuleMixin) for layer in module.modules()):
            with torch.no_grad():  # such layers draw their weights when they first see data
                module.eval()(Inputs.of(inputs).zeros(2))
        if client >= 0 or number:
            architecture.redraw(module)
    return Weights(dict(module.named_parameters()), moved_buffers(module)).clone()
