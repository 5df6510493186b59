"""A network as an objective sees it: logits, features, and the head between the two.

*Features* are what goes into the network's last layer, its *head*. ``head(features(x))`` is what
the network gives for ``x``. How the head is found is the business of :mod:`perfed.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from perfed.core.errors import ConfigError
from perfed.core.inputs import precision_of
from perfed.core.predictor import What
from perfed.core.tree import Weights


@dataclass(frozen=True)
class Between:
    """A network of a client's between its others: it takes the features of some of them, side by
    side, and gives as many numbers as one of them has features. So clients of each architecture
    have one of their own size. It stays with them: it never crosses."""

    architecture: Any
    takes: tuple[str, ...]
    """The names of networks; a client's own is ``OWN``."""
    gives: str


def outputs(
    module: nn.Module, head: str, tensors: dict[str, Tensor], x: Tensor, what: What
) -> Tensor:
    """One network's logits or features, in the precision of samples that are numbers: a network may
    compute in fewer bits, what is made of its outputs does not."""
    return caught(module, head, lambda: functional_call(module, tensors, (x,)), what).to(
        precision_of(x)
    )


def caught(module: nn.Module, head: str, call: Callable[[], Tensor], what: What) -> Tensor:
    """What a call of a network gives, or what goes into its head meanwhile."""
    if what == "logits":
        return call()
    given_to_head: list[Tensor] = []

    def catch(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        given_to_head.extend([*given, *named.values()][:1])

    layer = module.get_submodule(declared(head))
    handle = layer.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        call()
    finally:
        handle.remove()
    if not given_to_head:
        raise ConfigError(
            f"the network never calls its layer '{head}': name another", "models.head"
        )
    return given_to_head[-1]


def head_outputs(
    module: nn.Module, head: str, tensors: Mapping[str, Tensor], features: Tensor
) -> Tensor:
    """What the head makes of features."""
    layer = module.get_submodule(declared(head))
    logits: Tensor = functional_call(layer, head_tensors(head, tensors), (features,))
    return logits.to(features.dtype)


@torch.no_grad()
def on_features(module: nn.Module, head: str | None, weights: Weights, features: Tensor) -> Tensor:
    """What a network makes of features, in evaluation mode: its head, or all of it where it is
    between others and has none."""
    if head is None:
        return outputs(module.eval(), "", weights.params | weights.buffers, features, "logits")
    return head_outputs(module.eval(), head, weights.params, features)


def head_tensors(head: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a network's tensors that belong to its head, by their names there."""
    inside = f"{declared(head)}."
    return {name.removeprefix(inside): t for name, t in tensors.items() if name.startswith(inside)}


def base_of(head: str, weights: Weights) -> Weights:
    """A model without its head. Running statistics are all in the base: no head keeps any."""
    inside = f"{declared(head)}."
    params = {name: t for name, t in weights.params.items() if not name.startswith(inside)}
    return weights._replace(params=params)


def declared(head: str) -> str:
    if not head:
        raise ConfigError(
            "an algorithm that looks at features or heads must say so: needs_features = True",
            "algorithm",
        )
    return head


class Network:
    """A module with given weights, while training."""

    def __init__(
        self, module: nn.Module, weights: Weights, public_batchnorm: str, head: str = ""
    ) -> None:
        self._module = module
        self._weights = weights
        self._public_batchnorm = public_batchnorm
        self._head = head

    @property
    def params(self) -> dict[str, Tensor]:
        return self._weights.params

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that training moves: those that the module does not freeze."""
        free = {name for name, param in self._module.named_parameters() if param.requires_grad}
        return {name: t for name, t in self._weights.params.items() if name in free}

    def at(self, params: dict[str, Tensor], moves_statistics: bool = False) -> Network:
        """The same network at other parameters. Running statistics here are not moved by it,
        unless told so: where the model that is kept will be at those parameters."""
        weights = self._weights_at(params, moves_statistics)
        return Network(self._module, weights, self._public_batchnorm, self._head)

    def _weights_at(self, params: dict[str, Tensor], moves_statistics: bool) -> Weights:
        buffers = self._weights.buffers
        if not moves_statistics:
            buffers = {name: b.clone() for name, b in buffers.items()}
        return Weights(params, buffers)

    def with_params(self, some: Mapping[str, Tensor]) -> Network:
        """:meth:`at`, where only some parameters are others: the frozen ones stay."""
        return self.at(self._weights.params | dict(some))

    def __call__(self, x: Tensor) -> Tensor:
        """Logits of private samples; moves BatchNorm's running statistics."""
        return self._outputs(x, self._weights.buffers, "logits")

    def features(self, x: Tensor) -> Tensor:
        """Features of private samples; moves BatchNorm's running statistics."""
        return self._outputs(x, self._weights.buffers, "features")

    def head(self, features: Tensor) -> Tensor:
        """The logits that the last layer makes of features."""
        return head_outputs(self._module, self._head, self._weights.params, features)

    def public(self, x: Tensor) -> Tensor:
        """Logits of public samples; BatchNorm as ``training.public_batchnorm`` says."""
        return self._outputs(x, self._public_statistics(), "logits")

    def public_features(self, x: Tensor) -> Tensor:
        """Features of public samples; BatchNorm as ``training.public_batchnorm`` says."""
        return self._outputs(x, self._public_statistics(), "features")

    def observe(self, x: Tensor) -> None:
        """Move BatchNorm's statistics of public samples, where there are any."""
        if self._weights.public_buffers:
            with torch.no_grad():  # nothing is learnt from them
                self._outputs(x, self._public_statistics(), "logits")

    def _public_statistics(self) -> dict[str, Tensor]:
        """The buffers that public samples use, and move."""
        if self._public_batchnorm == "shared":
            return self._weights.buffers
        if self._public_batchnorm == "separate":
            return self._weights.public_buffers
        return {name: b.clone() for name, b in self._weights.buffers.items()}

    def _outputs(self, x: Tensor, buffers: dict[str, Tensor], what: What) -> Tensor:
        tensors = {**self._weights.params, **buffers}
        return outputs(self._module, self._head, tensors, x, what)
