"""The engine `ray`: every client lives on one of several workers, and only messages move.

Workers can die. What their clients kept at the last *collection* (for a checkpoint, or because the
log has grown too large) is in ``population.records`` here, and the log has the messages of all
rounds since. All that a client does follows from its record, its messages and its addressed random
streams; so a new worker that gets the records and goes through the log is the one that died.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from perfed.core.errors import ConfigError, RunError
from perfed.core.message import Message
from perfed.core.metrics import own_metrics
from perfed.engines.base import Call
from perfed.engines.population import Population
from perfed.engines.precision import FLOAT32, Precision
from perfed.engines.ray.bank import Recipe, Share
from perfed.engines.ray.cluster import Session, WorkerDied, import_ray, session
from perfed.engines.ray.parcel import pack, unpack

LOG_LIMIT = 2**30  # bytes of messages kept for the case that a worker dies
DEATHS = 3  # one after another, and it is no accident
CPU = torch.device("cpu")

log = logging.getLogger("perfed")


@dataclass
class Worker:
    actor: Any
    log: list[Share] = field(default_factory=list)
    """Its share of all rounds since the last collection."""
    coming: list[Any] = field(default_factory=list)
    """Answers that nobody has waited for yet."""
    crowded: bool = False
    """Whether it shares a core, since its machine was lost and no other core was free."""


@dataclass
class Hosted:
    """A population whose clients live on workers."""

    number: int
    population: Population
    clients_a_round: int
    homes: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """The worker of each client."""
    data: Any = None
    """The federation, in Ray's object store."""
    round: tuple[Call, set[int]] | None = None
    """The last one and whom it has changed, until it is whole."""
    changed: set[int] = field(default_factory=set)
    """Who has changed since the last collection."""


class RayEngine:
    """Sends each client's part of a call to the client's worker."""

    name = "ray"

    def __init__(
        self, precision: Precision = FLOAT32, device: str = "auto", workers: int = 0
    ) -> None:
        import_ray()
        self.precision = precision
        self._device = device
        self._count = workers
        self._gpus = 0.0
        """What a worker has of a GPU."""
        self._hosted: dict[Population, Hosted] = {}
        self.workers: list[Worker] = []
        self._session: Session | None = None
        self._open = ExitStack()
        self._said: set[str] = set()

    def expect(self, population: Population, clients_a_round: int) -> None:
        clients = len(population.architectures)
        if self._count > clients:
            raise ConfigError(
                f"{self._count} workers for {clients} clients: must be at most {clients}",
                "--workers",
            )
        assert not self.workers, "all populations of an engine are expected before its first call"
        self._hosted[population] = Hosted(len(self._hosted), population, clients_a_round)

    def facts(self) -> dict[str, Any]:
        self._connected()
        return {"engine": self.name, "precision": self.precision.name, "workers": self._count}

    def perform(self, calls: Sequence[Call]) -> list[Any]:
        if not calls:
            return []
        if not self.workers:
            self._start()
        shares = [self._divided(call) for call in calls]
        asked: dict[int, tuple[Any, ...]] = {}
        for number in range(len(self.workers)):
            mine = [by_worker[number] for by_worker in shares if number in by_worker]
            if mine:
                asked[number] = ("call", pack(mine))
        answers = {}
        for number, (parcel, said) in self._ask(asked).items():
            answers[number] = iter(unpack(parcel, calls[0].population.device))
            self._say(said)
        results = []
        for call, by_worker in zip(calls, shares, strict=True):
            given = [(share, next(answers[number])) for number, share in by_worker.items()]
            results.append(joined(call, given))
            if call.method == "client_round":
                touched = {client for client, outcome in results[-1].items() if outcome.changed}
                self._hosted[call.population].round = call, touched
        return results

    def commit(self, population: Population) -> None:
        hosted = self._hosted[population]
        assert hosted.round is not None
        (call, touched), hosted.round = hosted.round, None
        for number, share in self._divided(call).items():
            if touched & share.messages.keys():
                self.workers[number].log.append(share)
                self._tell(number, "commit", hosted.number)
        hosted.changed |= touched
        if sum(share.size for worker in self.workers for share in worker.log) > LOG_LIMIT:
            for each in self._hosted:
                self.collect(each)

    def collect(self, population: Population) -> None:
        hosted = self._hosted[population]
        asked: dict[int, tuple[Any, ...]] = {}
        for client in sorted(hosted.changed):
            what = asked.setdefault(int(hosted.homes[client]), ("records", hosted.number, []))
            what[2].append(client)
        for parcel in self._ask(asked).values():
            population.records.update(unpack(parcel, CPU))
        for worker in self.workers:
            worker.log = [share for share in worker.log if share.population != hosted.number]
        hosted.changed.clear()
        self._spread_out()

    def close(self) -> None:
        workers, self.workers = self.workers, []
        if workers:
            self._connected().give([worker.actor for worker in workers], self._gpus)
        self._session = None
        self._open.close()

    def _connected(self) -> Session:
        """Ray, and with it the number and kind of workers."""
        if self._session is not None:
            return self._session
        self._session = self._open.enter_context(session())
        cores, gpus = self._session.count("CPU"), self._session.count("GPU")
        if self._device == "cpu":
            gpus = 0
        elif self._device == "cuda" and not gpus:
            raise ConfigError("Ray has no GPU here", "--device")
        if self.precision.name == "tf32" and not gpus:
            raise ConfigError("tf32 is a GPU's; a CPU has float32 and bf16", "--precision")
        useful = sum(hosted.clients_a_round for hosted in self._hosted.values())
        self._count = self._count or max(1, min(gpus or cores, useful))
        self._gpus = 1 / -(-self._count // gpus) if gpus else 0.0
        if not gpus and self._session.shared and self._count > cores:
            raise ConfigError(
                f"{self._count} workers, but Ray has {cores} cores: must be at most that many",
                "--workers",
            )
        return self._session

    def _start(self) -> None:
        session = self._connected()
        for hosted in self._hosted.values():
            hosted.homes = dealt(hosted.population, self._count)
            hosted.data = session.put(hosted.population.federation)
        for number in range(self._count):
            self.workers.append(Worker(session.take(self._gpus)))
            self._introduce(number)
        session.wait_for([coming for worker in self.workers for coming in worker.coming])

    def _introduce(self, number: int) -> None:
        """Tell a new worker all that its clients had at the last collection."""
        kind = "cuda" if self._gpus else "cpu"
        self._tell(number, "prepare", kind, self.precision, torch.get_default_dtype())
        for hosted in self._hosted.values():
            population = hosted.population
            store = population.records
            records = {client: store[client] for client in store if hosted.homes[client] == number}
            recipe = Recipe(
                population.algorithm,
                population.assignment,
                population.training,
                population.rounds,
                population.seed,
                population.link,
                population.privacy,
                -(-hosted.clients_a_round // self._count),
                None if store.limit is None else store.limit // self._count,
                own_metrics(),
                store.folder,
                population.participation,
                population.attack,
            )
            self._tell(number, "admit", hosted.number, hosted.data, recipe, pack(records))

    def _replace(self, number: int, why: str) -> None:
        """A new worker in the place of a dead one, in the state it was in."""
        log.warning(
            "worker %d of %d has died, another takes its place: %s", number, self._count, why
        )
        session, dead = self._connected(), self.workers[number]
        session.kill(dead.actor)
        actor, crowded = session.take_place(self._gpus)
        if crowded:
            log.warning("no core is free for worker %d: it shares one until there is", number)
        self.workers[number] = Worker(actor, dead.log, crowded=crowded)
        self._introduce(number)
        session.wait_for(self.workers[number].coming[:1])  # with a line where that takes long
        for share in dead.log:
            self._tell(number, "call", pack([share]))
            self._tell(number, "commit", share.population)

    def _spread_out(self) -> None:
        """Workers that share a core move to one of their own, where a machine has joined. Nothing
        is in their logs now, and no round is under way: all that their clients have is here."""
        if any(hosted.round is not None for hosted in self._hosted.values()):
            return
        crowded = [n for n, worker in enumerate(self.workers) if worker.crowded and not worker.log]
        free = self._connected().free_cores() if crowded else 0
        for number in crowded[:free]:
            session, old = self._connected(), self.workers[number]
            self.workers[number] = Worker(session.take(self._gpus))
            self._introduce(number)
            session.kill(old.actor)
            log.warning("worker %d of %d has a core of its own again", number, self._count)

    def _tell(self, number: int, *what: Any) -> None:
        worker = self.workers[number]
        worker.coming.append(self._connected().send(worker.actor, *what))

    def _ask(self, asked: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """What workers answer; one that dies is replaced, and asked again."""
        answers: dict[int, Any] = {}
        missing, why = dict(asked), ""
        for _ in range(DEATHS):
            for number, what in missing.items():
                self._tell(number, *what)
            for number in list(missing):
                worker = self.workers[number]
                coming, worker.coming = worker.coming, []
                try:
                    for one in coming:
                        answers[number] = self._connected().answer(one)
                    del missing[number]
                except WorkerDied as death:
                    why = str(death)
            if not missing:
                return answers
            for number in missing:
                self._replace(number, why)
        raise RunError(f"a worker died {DEATHS} times one after another: {why}")

    def _divided(self, call: Call) -> dict[int, Share]:
        """The share of each worker that has one."""
        hosted, mine = self._hosted[call.population], dict[int, dict[int, Message]]()
        for client, message in call.messages.items():
            mine.setdefault(int(hosted.homes[client]), {})[client] = message
        return {
            number: Share(hosted.number, call.method, part, call.round)
            for number, part in mine.items()
        }

    def _say(self, lines: Sequence[str]) -> None:
        """What a worker had to say, once, though every one of them says it."""
        for line in lines:
            if line not in self._said:
                self._said.add(line)
                log.warning("%s", line)


def dealt(population: Population, workers: int) -> np.ndarray:
    """The worker of each client.

    Clients with like networks and like many samples take turns: so every worker gets its share of
    each architecture and of those clients that are selected most often.
    """
    labels = {label: number for number, label in enumerate(sorted(population.by_label))}
    networks = np.fromiter(map(labels.__getitem__, population.architectures), dtype=np.int32)
    homes = np.empty(len(networks), dtype=np.int32)
    alike = np.lexsort((population.federation.train_sizes, networks))
    homes[alike] = np.arange(len(networks)) % workers
    return homes


def joined(call: Call, given: Sequence[tuple[Share, Any]]) -> Any:
    """What the whole call gives, from what the shares gave."""
    if call.method != "evaluate":
        found = {client: one for _, part in given for client, one in part.items()}
        return {client: found[client] for client in call.messages}
    places = {client: place for place, client in enumerate(call.messages)}
    columns: dict[str, dict[str, np.ndarray]] = {}
    for share, part in given:
        where = [places[client] for client in share.messages]
        for kind, numbers in part.items():
            for name, values in numbers.items():
                empty = np.empty(len(places), values.dtype)
                columns.setdefault(kind, {}).setdefault(name, empty)[where] = values
    return columns
