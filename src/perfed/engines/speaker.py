"""The client that speaks where messages are private: its training is noised, and counted.

It has a model and a state of its own, apart from those at home, and its samples are behind a wall:
it learns how many there are only as its client tells, and of what they are only by noised training.
So whatever it sends costs what its training cost, whatever the algorithm does with its models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from perfed.core.accounting import Spending
from perfed.core.algorithm import Parts
from perfed.core.errors import ConfigError
from perfed.core.predictor import Predictor
from perfed.core.tree import Tree, Weights
from perfed.engines.base import STEPS, ClientRecord, EngineClient, Sgd

SPEAKER = "speaker"
"""Where a client keeps what its speaker has."""


class Speaker(EngineClient):
    """What an algorithm sees of a client whose messages are private."""

    def __init__(self, home: EngineClient, opening: bool = False) -> None:
        self._home = home
        self._opening = opening
        super().__init__(home.population, home.id, home.round)
        self._take(_kept(home))
        self.ask = home.ask
        self.seed = home.population.secret
        self.samples = torch.tensor(home.population.told_size(home.id))
        self.spent = spent_steps(home.kept)

    def _take(self, record: ClientRecord) -> None:
        self._record = record
        self.weights, self.state, self.kept = record.weights, dict(record.state), dict(record.kept)

    def leave(self) -> None:
        """Put what it has now into what its client keeps."""
        self.check_kept()
        self._home.kept[SPEAKER] = self.record().tree()
        self._home.kept[STEPS] = torch.tensor(self.spent)

    def sgd(self, weights: Any, objective: Any, *inputs: Any, **options: Any) -> Any:
        """Noised, unless the objective looks at public samples only. Where the budget is spent
        nothing more is learnt from private ones: the weights stay as they are."""
        if isinstance(objective, Parts) and objective.private is None:
            return super().sgd(weights, objective, *inputs, **options)
        if self._opening:  # nothing is kept of an opening, and so it would not be counted
            raise self._refusal("trains before the first round")
        steps = self.steps if options.get("steps") is None else options["steps"]
        account, purse = self.population.account(self.id), self.population.purse
        counted = self.spent if purse is None else 0  # a purse has counted them already
        if not account.allows(counted, steps):
            self._trainings += 1  # the next one keeps its optimizer's state
            return weights
        # Whatever the algorithm says: no two trainings may draw the same samples, or noise.
        options["stream"] = counted + sum(one.steps for one in account.before)
        if purse is not None:
            purse.spend(Spending(steps, account.rate, account.privacy.noise))
        trained = super().sgd(weights, objective, *inputs, **options)
        self.spent += steps
        return trained

    def _as_asked(self, request: Sgd) -> Sgd:
        if isinstance(request.objective, Parts) and request.objective.private is None:
            return request
        privacy = self.population.privacy
        assert privacy is not None
        return dataclasses.replace(request, sample_clip=privacy.clip, privacy=privacy)

    # Its samples.

    def _learnt_from(self, part: str) -> NoReturn:
        raise self._refusal(f"looks at {part} samples")

    def label_counts(self) -> NoReturn:
        raise self._refusal("looks at label counts")

    def class_sums(self, rows: Tensor, on: str = "train") -> NoReturn:
        raise self._refusal(f"sums over {on} samples")

    def likelihoods(self, models: Sequence[Predictor], part: str) -> NoReturn:
        raise self._refusal(f"looks at {part} samples")

    def losses(self, models: Sequence[Weights], part: str) -> NoReturn:
        raise self._refusal(f"looks at {part} samples")

    def _refusal(self, does: str) -> ConfigError:
        name = self.population.algorithm.registered_name
        return ConfigError(
            f"'{name}' {does} to make its message, which no noise covers: choose another method, "
            "or leave out privacy",
            "algorithm",
        )


def spent_steps(kept: Tree) -> int:
    """How many noised steps a client has made, by what it keeps."""
    return int(kept.get(STEPS, 0))


def as_it_was_at_home(before: ClientRecord, after: ClientRecord) -> ClientRecord:
    """``after`` of a round in which the model at home broke: what speaks has gone on, and what is
    at home is as it was ``before``."""
    spoken = {name: after.kept[name] for name in (SPEAKER, STEPS, "link") if name in after.kept}
    return ClientRecord(before.weights, before.state, before.kept | spoken)


def _kept(home: EngineClient) -> ClientRecord:
    if SPEAKER in home.kept:
        return ClientRecord.from_tree(home.kept[SPEAKER])
    return ClientRecord(home.population.first_weights(home.id))
