"""What the server of a federation knows of networks: only those in its own configuration, and those
that the algorithm names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from perfed.config import Experiment
from perfed.core.errors import ConfigError
from perfed.core.inputs import Inputs
from perfed.core.tree import Weights
from perfed.engines.population import named_networks, with_public_statistics
from perfed.models import Architecture, build_module, find_head, initial_weights, inputs_for


class ServerNetworks(Mapping[str, nn.Module]):
    """A module for each architecture, made when it is asked for."""

    def __init__(self, experiment: Experiment, inputs: Inputs, classes: int) -> None:
        self._experiment = experiment
        self._classes = classes
        self.labels = [a.label() for a in experiment.models.architectures]
        own = dict(zip(self.labels, experiment.models.architectures, strict=True))
        self._architectures = own | named_networks(experiment.algorithm, own)
        self.inputs = inputs_for(self._architectures.values(), inputs)
        self._initial: dict[tuple[str, int], Weights] = {}
        self._modules: dict[str, nn.Module] = {}

    def initial(self, architecture: str, number: int = 0) -> Weights:
        """The initial weights number 0, 1, … of an architecture."""
        key = (architecture, number)
        if key not in self._initial:
            known, experiment = self._known(architecture), self._experiment
            initial = initial_weights(
                known, self.inputs, self._classes, experiment.seed, number=number
            )
            self._initial[key] = with_public_statistics(
                initial, experiment.algorithm, experiment.training
            )
        return self._initial[key]

    def widths(self) -> dict[str, int]:
        """How many features each configured network gives; empty where nobody looks at them."""
        if not self._experiment.algorithm.needs_features:
            return {}
        return {
            label: find_head(self._known(label), self[label], self.inputs)[1]
            for label in self.labels
        }

    def last_layers(self) -> dict[str, nn.Module]:
        """Of each configured network; empty where nobody looks at them."""
        if not self._experiment.algorithm.needs_features:
            return {}
        return {label: self[label].get_submodule(self.head(label)) for label in self.labels}

    def head(self, architecture: str) -> str:
        """The name of an architecture's last layer."""
        return self._known(architecture).head_in(self[architecture])

    def __getitem__(self, architecture: str) -> nn.Module:
        if architecture not in self._modules:
            known = self._known(architecture)
            self._modules[architecture] = build_module(known, self.inputs, self._classes)
        return self._modules[architecture]

    def __iter__(self) -> Any:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def _known(self, architecture: str) -> Architecture:
        if architecture not in self._architectures:
            raise ConfigError(
                f"'{self._experiment.algorithm.registered_name}' sends weights, and "
                f"'{architecture}' is not among the coordinator's experiment.models.architectures"
            )
        return self._architectures[architecture]
