"""A worker: a bank of clients, and the stacked engine that runs them."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from perfed.config import Training
from perfed.core.algorithm import Algorithm
from perfed.core.hostile import Attack
from perfed.core.message import Message
from perfed.core.metrics import learn
from perfed.core.participation import Participation
from perfed.core.privacy import Privacy
from perfed.core.tree import identity
from perfed.core.wire import Link
from perfed.data import Federation
from perfed.engines.base import ClientRecord, Method
from perfed.engines.execution import stacked_engine
from perfed.engines.local import LocalEngine
from perfed.engines.population import Population
from perfed.engines.precision import Precision
from perfed.engines.ray.parcel import Parcel, pack, unpack
from perfed.engines.sequential import SequentialEngine
from perfed.engines.store import ClientStore
from perfed.models import Models


@dataclass(frozen=True)
class Recipe:
    """What a population is made from, but for its data."""

    algorithm: Algorithm
    models: Models
    training: Training
    rounds: int
    seed: int
    link: Link
    privacy: Privacy | None
    clients_a_round: int
    store_bytes: int | None
    metrics: list[tuple[str, tuple[str, str]]]
    """Where those are found that are not perfed's own."""
    folder: Path | None
    """Where clients beyond ``store_bytes`` wait, if this machine has it."""
    participation: Participation
    attack: Attack | None = None


@dataclass(frozen=True)
class Share:
    """One worker's part of a call."""

    population: int
    method: Method
    messages: Mapping[int, Message]
    round: int

    @cached_property
    def size(self) -> int:
        """Bytes of its tensors; one that several clients get counts once."""
        tensors = [t for message in self.messages.values() for t in message.arrays.values()]
        return sum(t.nbytes for t in {identity(t): t for t in tensors}.values())


class Bank:
    """Does what it is told, in order; what it keeps are its clients' records."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor written to
        self._said = _Said()
        logging.getLogger("perfed").addHandler(self._said)
        self._populations: dict[int, Population] = {}

    def prepare(self, kind: str, precision: Precision, dtype: torch.dtype) -> int:
        """Make ready for a run; the process's number."""
        self.clear()
        torch.set_default_dtype(dtype)
        self._device = torch.device(kind)
        stacked = stacked_engine()
        self._engine: LocalEngine = SequentialEngine(precision)
        if stacked is not None:
            self._engine = stacked(precision, record=kind == "cuda")
        return os.getpid()

    def admit(self, number: int, federation: Federation, recipe: Recipe, records: Parcel) -> None:
        """A population, and what those of its clients that live here keep."""
        learn(recipe.metrics)
        store = ClientStore(self._device, recipe.store_bytes)
        if recipe.folder is not None and recipe.folder.is_dir():
            store.folder = recipe.folder
        store.update(unpack(records, self._device))
        population = Population(
            recipe.algorithm,
            federation,
            recipe.models,
            recipe.training,
            recipe.rounds,
            recipe.seed,
            self._device,
            store,
            recipe.link,
            attack=recipe.attack,
            privacy=recipe.privacy,
            participation=recipe.participation,
        )
        population.engine = self._engine
        self._engine.expect(population, recipe.clients_a_round)
        self._populations[number] = population

    def call(self, shares: Parcel) -> tuple[Parcel, list[str]]:
        """What each share of a call gives, and what there was to say meanwhile."""
        received: list[Share] = unpack(shares, self._device)
        calls = [
            self._populations[share.population].call(share.method, share.messages, share.round)
            for share in received
        ]
        return pack(self._engine.perform(calls)), self._said.taken()

    def commit(self, number: int) -> None:
        self._engine.commit(self._populations[number])

    def records(self, number: int, clients: Sequence[int]) -> Parcel:
        kept = self._populations[number].records
        records: dict[int, ClientRecord] = {client: kept[client] for client in clients}
        return pack(records)

    def clear(self) -> None:
        for population in self._populations.values():
            population.records.close()
        self._populations.clear()
        self._said.taken()


class _Said(logging.Handler):
    """Lines that a user should see, kept until somebody takes them along."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def taken(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines
