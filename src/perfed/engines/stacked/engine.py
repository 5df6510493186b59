"""The stacked engine.

Jobs run together (:mod:`.together`), and requests that are equal but for their tensors
(:mod:`.requests`) are answered as one stack (:mod:`.stack`, :mod:`.layers`). A stack's computation
is recorded once and replayed (:mod:`.recorded`), on a CPU several stacks at a time.

What cannot be mapped over clients is answered as the sequential engine would: a module that
shuffles, decides by a tensor's value or looks at other samples in evaluation, and an objective
whose closure hides what may differ by client.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from perfed.core.errors import ConfigError, RunError
from perfed.core.notices import say_once
from perfed.core.pixels import joined
from perfed.core.predictor import What
from perfed.core.streams import seed_generators
from perfed.core.threads import cpu_threads
from perfed.engines.base import Ask, Forward, Job, Request, Sgd, Trained
from perfed.engines.local import LocalEngine
from perfed.engines.population import Population
from perfed.engines.precision import FLOAT32, Precision
from perfed.engines.sequential import SequentialEngine
from perfed.engines.stacked.alone import LoneModule
from perfed.engines.stacked.recorded import (
    RecordedForward,
    RecordedTraining,
    TapedForward,
    TapedTraining,
)
from perfed.engines.stacked.requests import grouped, objective_key
from perfed.engines.stacked.stack import (
    Samples,
    StackedModule,
    StackedStep,
    draw,
    places,
    stack_inputs,
    stack_moving,
    stack_of_one,
    stack_tensors,
)
from perfed.engines.stacked.together import perform_together

JOBS_AT_ONCE = 256
MOST_LANES = 32
"""Clients in one stack."""
SAMPLES_AT_ONCE = 4096
"""Samples that one forward pass of a stack sees, over all its clients."""
SAMPLES_ALONE = 128
"""The same of one client whose layers are large: what they give should stay in a core's cache."""
SAMPLES_OF_EACH = (64, 512)
"""The same in a recording, of each model: whichever leaves less of it empty."""
COST_OF_A_PLACE = 16
"""What a model in a recording costs beside its samples, in samples."""
MOST_RECORDINGS = 256
WORTH_THREADS = 100e6
"""Floating-point operations of all that waits for an answer, from which more threads than one are
woken: fewer take a core some milliseconds."""
Member = TypeVar("Member")

log = logging.getLogger("perfed")


class StackedEngine(LocalEngine):
    """Performs jobs together and answers equal requests as one.

    ``record`` says whether a stack's computation is recorded for a fixed number of clients, which
    is worth it on a GPU; a smaller stack is then filled up with copies of its first client. On a
    CPU ``threads`` stacks run at a time.
    """

    name = "stacked"

    def __init__(
        self, precision: Precision = FLOAT32, record: bool = False, threads: int = 1
    ) -> None:
        super().__init__(precision)
        self._record = record
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._sequential = SequentialEngine(precision)
        self._modules: dict[str, StackedModule] = {}
        self._expected: dict[str, int] = {}
        self._tables: Samples | None = None
        self._populations: list[Population] = []
        self._steps: dict[Hashable, StackedStep] = {}
        self._room: dict[str, int] = {}
        """How many clients of a network memory holds at a time, where that has been too few."""
        self.recordings: dict[Hashable, Any] = {}

    def expect(self, population: Population, clients_a_round: int) -> None:
        self._populations.append(population)
        if len(self._populations) > 1 and not all(p.has_all_samples for p in self._populations):
            raise ConfigError(
                "runs side by side need all samples in memory, and these are made or read for each "
                "client: run them one after another",
                "data",
            )
        self._tables = None
        self._steps.clear()
        self.recordings.clear()  # they look at the samples there were
        total = len(population.architectures)
        for label in population.modules:
            share = -(-population.holders(label) * clients_a_round // total)
            self._expected[label] = self._expected.get(label, 0) + share

    def perform_jobs(self, jobs: Sequence[Job]) -> list[Any]:
        results: list[Any] = []
        with torch.random.fork_rng(_generators(jobs)), _device_of(jobs):
            for job in jobs:  # now: trying a module out may draw random numbers
                self.module_of(job.client.population, job.client.architecture)
            for start in range(0, len(jobs), JOBS_AT_ONCE):
                part = jobs[start : start + JOBS_AT_ONCE]
                works = [functools.partial(self._work, job) for job in part]
                results += perform_together(works, self._answer, JobStreams(part))
        return results

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _work(self, job: Job, ask: Ask) -> Any:
        job.client.ask = functools.partial(self._ask, ask)
        try:
            return job.work()
        finally:
            # It knows the job: a circle, in which all that the job made would stay in memory until
            # Python looks for circles.
            del job.client.ask

    def _ask(self, ask: Ask, requests: Sequence[Request]) -> list[Any]:
        if any(map(self._needs_own_turn, requests)):
            return self._answers_alone(requests)
        return ask(requests)

    def _needs_own_turn(self, request: Request) -> bool:
        """Whether it cannot be answered together with those of other clients."""
        population = request.client.population
        labels = request.labels().values() if isinstance(request, Sgd) else [request.label]
        if any(self.module_of(population, label).obstacle for label in labels):
            return True
        if isinstance(request, Sgd) and objective_key(request.objective) is None:
            say_once(
                "an objective that closes over more than numbers, names and options trains one "
                "client at a time: hand tensors to client.sgd as inputs instead"
            )
            return True
        return False

    def _answers_alone(self, requests: Sequence[Request]) -> list[Any]:
        """As the sequential engine would, with its threads."""
        population = requests[0].client.population
        large = self._threads > 1 and population.is_large(population.by_label)
        with cpu_threads(self._threads if large else torch.get_num_threads()):
            return self._sequential.answers(requests)

    def module_of(self, population: Population, architecture: str) -> StackedModule:
        if architecture not in self._modules:
            module = StackedModule(
                population.modules[architecture],
                population.few(architecture),
                population.head(architecture),
            )
            self._modules[architecture] = module
            if module.obstacle is not None:
                log.warning(
                    "'%s' runs one client at a time, on the sequential engine: %s",
                    architecture,
                    module.obstacle,
                )
        return self._modules[architecture]

    def _answer(self, asked: Sequence[Sequence[Request]]) -> list[list[Any]]:
        """The answers to what each client has asked."""
        requests = [request for several in asked for request in several]
        if len(self.recordings) > MOST_RECORDINGS:
            self.recordings.clear()
        threads = self._threads_for(requests)
        stacks: list[Stack] = []
        models: list[Model] = []
        for kind, group in grouped(requests):
            if isinstance(group[0], Sgd):
                stacks += self._train(kind, group, threads)  # type: ignore[arg-type]
            else:
                stacks += self._forward(kind, group, threads, models)  # type: ignore[arg-type]
        answers: dict[int, Any] = {}
        for answered in self._computed(stacks, threads):
            answers |= answered
        for model in models:
            answers |= model.shares([answers.pop(id(piece)) for piece in model.pieces])
        return [[answers[id(request)] for request in several] for several in asked]

    def _threads_for(self, requests: Sequence[Request]) -> int:
        """By what is counted: what a clock says would change from run to run."""
        if self._threads == 1 or sum(request.flops for request in requests) < WORTH_THREADS:
            return 1
        return self._threads

    def _computed(self, stacks: Sequence[Stack], threads: int) -> Iterator[dict[int, Any]]:
        """What each stack answers. What needs no Python runs side by side."""
        if threads == 1 or self._record:
            for stack in stacks:
                with self.precision.active(stack.device):
                    yield stack.begin()()
            return
        rest = [self._begun(stack) for stack in stacks]
        each = max(1, threads // max(1, len(rest)))

        def finish(one: Callable[[], dict[int, Any]]) -> dict[int, Any]:
            torch.set_num_threads(each)  # of operations in this thread
            return one()

        self._pool = self._pool or ThreadPoolExecutor(self._threads)
        with cpu_threads(each):
            yield from self._pool.map(finish, rest)

    def _begun(self, stack: Stack) -> Callable[[], dict[int, Any]]:
        """The rest of a stack's computation, after what needs Python."""
        recording = self.recordings.get(stack.recording)
        if recording is not None and recording.ready:
            return lambda: stack.begin()()
        with self.precision.active(stack.device):
            return stack.begin()

    def _train(self, kind: Hashable, group: list[Sgd], threads: int) -> Iterator[Stack]:
        population, labels = group[0].client.population, group[0].labels()
        samples, starts = self._all_samples(population)
        alone = group[0].sample_clip is None and self._is_large(population, labels.values())
        if kind not in self._steps:
            stacked = {name: self.module_of(population, label) for name, label in labels.items()}
            lone = {name: module.alone for name, module in stacked.items()} if alone else {}
            self._steps[kind] = StackedStep(lone or stacked, group[0], alone)
        group = sorted(group, key=lambda request: request.steps)  # few wait for others to finish
        label = next(iter(labels.values()))
        lanes = 1 if alone else self._lanes_for(label, len(group), threads)
        for start in range(0, len(group), lanes):
            stack = group[start : start + lanes]
            train = functools.partial(self._begin_training, kind, samples, starts)
            begin = functools.partial(self._in_turns, train, label, lanes, stack)
            yield Stack(self._name(kind, lanes, stack), samples.x.device, begin)

    def _name(self, kind: Hashable, lanes: int, stack: Sequence[Any]) -> Hashable:
        """Of a stack's recording."""
        wide = places(stack) if isinstance(stack[0], Sgd) else 0
        return (kind, lanes if self._record else len(stack), wide)

    def _in_turns(
        self,
        begin: Callable[[int, list[Member]], Callable[[], dict[int, Any]]],
        label: str,
        lanes: int,
        stack: list[Member],
    ) -> Callable[[], dict[int, Any]]:
        """What ``begin`` makes of a stack; in halves, one after the other, where memory does not
        hold it, and so from then on."""
        rest: list[Callable[[], dict[int, Any]]] = []
        with suppress(torch.OutOfMemoryError):
            rest.append(begin(lanes, stack))

        def finish() -> dict[int, Any]:
            if rest:
                with suppress(torch.OutOfMemoryError):
                    return rest.pop()()
            # Not in an except clause: an exception would keep what is to be given back.
            return self._in_halves(begin, label, lanes, stack)

        return finish

    def _in_halves(
        self,
        begin: Callable[[int, list[Member]], Callable[[], dict[int, Any]]],
        label: str,
        lanes: int,
        stack: list[Member],
    ) -> dict[int, Any]:
        held = lanes if self._record else len(stack)
        if held == 1:
            raise RunError(
                f"memory does not hold one client of '{label}': a smaller training.batch_size may "
                "help"
            )
        self.recordings.clear()
        gc.collect()  # what is left of a recording that failed refers to itself
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = -(-held // 2)
        self._room[label] = min(half, self._room.get(label, half))
        log.warning("memory holds %d clients of '%s' at a time: they take turns", half, label)
        answers: dict[int, Any] = {}
        while stack:
            room = self._room[label]  # which the first half may have found too large, too
            answers |= self._in_turns(begin, label, room, stack[:room])()
            stack = stack[room:]
        return answers

    def _begin_training(
        self,
        kind: Hashable,
        samples: Samples,
        starts: dict[int, tuple[int, int]],
        lanes: int,
        stack: list[Sgd],
    ) -> Callable[[], dict[int, Trained]]:
        name, step = self._name(kind, lanes, stack), self._steps[kind]
        draws = draw(stack, starts)
        # A recording copies it, and a tape changes it.
        moving, inputs = stack_moving(stack, to_look_at=self._record), stack_inputs(stack)
        if name not in self.recordings:
            recorded = RecordedTraining if self._record else TapedTraining
            self.recordings[name] = recorded(step, lanes, moving, inputs, samples, draws)
        finish = self.recordings[name].begin(moving, inputs, draws, stack[0].rate)

        def answers() -> dict[int, Trained]:
            trained = finish()
            return {id(request): trained[lane] for lane, request in enumerate(stack)}

        return answers

    def _forward(
        self, kind: Hashable, group: list[Forward], threads: int, models: list[Model]
    ) -> Iterator[Stack]:
        """Stacks of pieces of models, which are put into ``models``."""
        population, what, label = group[0].client.population, group[0].what, group[0].label
        module: StackedModule | LoneModule = self.module_of(population, label)
        samples, starts = self._all_samples(population)
        table = samples.public_x if group[0].public else samples.x
        alone = self._is_large(population, [label])
        if alone and isinstance(module, StackedModule):
            module = module.alone
        shared = sharing_a_model(group)
        lanes = 1 if alone else self._lanes_for(label, len(shared), threads)
        if not group[0].public and not self._record:
            parts = threads if alone else max(1, lanes // len(shared))
            shared = [part for requests in shared for part in divided(requests, parts)]
        found = [model_of(requests, starts) for requests in shared]
        if self._record and not group[0].public:
            cut_to_fit(found, lanes)
        models += found
        pieces = sorted((p for model in found for p in model.pieces), key=lambda p: len(p.where))
        for start in range(0, len(pieces), lanes):
            stack = pieces[start : start + lanes]
            forward = functools.partial(self._begin_forward, kind, module, what, table)
            begin = functools.partial(self._in_turns, forward, label, lanes, stack)
            yield Stack(self._forward_name(kind, module, lanes, stack), table.device, begin)

    def _forward_name(
        self,
        kind: Hashable,
        module: StackedModule | LoneModule,
        lanes: int,
        stack: Sequence[Piece],
    ) -> Hashable:
        if isinstance(module, LoneModule):
            return (kind, self._samples_at_once(module, stack))
        if self._record:
            return (kind, lanes, self._samples_at_once(module, stack))
        return (kind, len(stack), max(len(piece.where) for piece in stack))

    def _samples_at_once(self, module: StackedModule | LoneModule, stack: Sequence[Piece]) -> int:
        longest = max(len(piece.where) for piece in stack)
        if isinstance(module, LoneModule):  # of few sizes, for each has a tape of its own
            return min(SAMPLES_ALONE, 1 << (longest - 1).bit_length())
        if self._record:
            return next((n for n in SAMPLES_OF_EACH if longest <= n), SAMPLES_OF_EACH[-1])
        return max(1, SAMPLES_AT_ONCE // len(stack))

    def _begin_forward(
        self,
        kind: Hashable,
        module: StackedModule | LoneModule,
        what: What,
        table: Tensor,
        lanes: int,
        stack: list[Piece],
    ) -> Callable[[], dict[int, Tensor]]:
        name = self._forward_name(kind, module, lanes, stack)
        where = pad_sequence([piece.where for piece in stack], batch_first=True)
        if isinstance(module, LoneModule):
            tensors = stack_of_one(stack[0].tensors)
        else:
            # A recording copies them.
            tensors = stack_tensors([piece.tensors for piece in stack], to_look_at=self._record)
        if name not in self.recordings:
            recorded = RecordedForward if self._record else TapedForward
            at_once = self._samples_at_once(module, stack)
            self.recordings[name] = recorded(module, what, lanes, at_once, tensors, table)
        finish = self.recordings[name].begin(tensors, where)

        def answers() -> dict[int, Tensor]:
            return {
                id(piece): rows[: len(piece.where)]
                for piece, rows in zip(stack, finish(), strict=True)
            }

        return answers

    def _is_large(self, population: Population, labels: Iterable[str]) -> bool:
        """Whether one client keeps a core busy: on a CPU nothing is gained by stacking it."""
        if self._record or population.device.type != "cpu":
            return False
        return population.is_large(labels)

    def _lanes_for(self, label: str, count: int, threads: int) -> int:
        """How many clients one stack holds. A recording has room for the expected number, divided
        evenly if that is more than ``MOST_LANES``. Otherwise all clients form one stack, or one for
        each thread if each thread then has at least two."""
        most = count if count < 2 * threads else -(-count // threads)
        if self._record:
            most = self._expected.get(label, 0) or MOST_LANES
        stacks = -(-most // min(MOST_LANES, self._room.get(label, MOST_LANES)))
        return -(-most // stacks)

    def _all_samples(self, population: Population) -> tuple[Samples, dict[int, tuple[int, int]]]:
        """The samples of all populations, and where each one's begin."""
        if population not in self._populations:
            self._populations.append(population)
            self._tables = None
            self.recordings.clear()
        if not population.has_all_samples and self._tables and self._tables.x is not population.x:
            self._tables = None  # there was not enough room
            self.recordings.clear()
        if self._tables is None:
            self._tables = join_samples(self._populations)
        starts, private, public = {}, 0, 0
        for each in self._populations:
            starts[id(each)] = (private, public)
            private, public = private + len(each.x), public + len(each.public_x)
        return self._tables, starts


@dataclass(frozen=True, eq=False)
class Stack:
    """Requests that are answered as one."""

    recording: Hashable
    """The name of the recording they have or will have."""
    device: torch.device
    begin: Callable[[], Callable[[], dict[int, Any]]]
    """Does what needs Python, and returns what makes the answers, by the requests' ids."""


def join_samples(populations: Sequence[Population]) -> Samples:
    return Samples(
        joined([population.x for population in populations]),
        joined([population.y for population in populations]),
        joined([population.public_x for population in populations]),
    )


@dataclass(frozen=True, eq=False)
class Piece:
    """A model, and those of the samples it is run on that have one place in a stack."""

    tensors: dict[str, Tensor]
    where: Tensor


@dataclass
class Model:
    """A model to run forward, and for whom: clients that share a model are one."""

    requests: list[Forward]
    pieces: list[Piece]

    def cut(self, length: int) -> None:
        self.pieces = [
            Piece(piece.tensors, part)
            for piece in self.pieces
            for part in torch.split(piece.where, length)
        ]

    def shares(self, rows_of_pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """Each request's part of the outputs."""
        rows = rows_of_pieces[0] if len(rows_of_pieces) == 1 else torch.cat([*rows_of_pieces])
        if self.requests[0].where is None:
            return {id(request): rows for request in self.requests}
        sizes = [len(request.where) for request in self.requests if request.where is not None]
        pieces = torch.split(rows, sizes)
        return {id(request): piece for request, piece in zip(self.requests, pieces, strict=True)}


def cut_to_fit(models: Sequence[Model], lanes: int) -> None:
    """Cut models into pieces for a recording of so many places, all of which it computes, used or
    not: with clients of two samples beside one of a thousand, nearly all would be empty."""
    lengths = [len(piece.where) for model in models for piece in model.pieces]

    def cost(size: int) -> int:
        stacks = -(-sum(-(-length // size) for length in lengths) // lanes)
        return stacks * lanes * (size + COST_OF_A_PLACE)

    best = min(SAMPLES_OF_EACH, key=cost)
    for model in models:
        model.cut(best)


def sharing_a_model(group: Sequence[Forward]) -> list[list[Forward]]:
    """Those that ask about one model can share a pass over their samples."""
    shared: dict[Hashable, list[Forward]] = {}
    for request in group:
        memory = tuple(t.data_ptr() for t in request.tensors().values())
        shared.setdefault((id(request.client.population), memory), []).append(request)
    return list(shared.values())


def divided(requests: list[Forward], parts: int) -> list[list[Forward]]:
    """So many parts, or one for each request: where a model has several places in a stack, or
    several threads, each takes some of the samples."""
    return [requests[part::parts] for part in range(min(parts, len(requests)))]


def model_of(requests: list[Forward], starts: Mapping[int, tuple[int, int]]) -> Model:
    population = requests[0].client.population
    private, public = starts[id(population)]
    if requests[0].where is None:
        where = torch.arange(len(population.public_x), device=population.device) + public
    else:
        own = [request.where for request in requests if request.where is not None]
        where = torch.cat(own) + private
    return Model(requests, [Piece(requests[0].tensors(), where)])


def _generators(jobs: Sequence[Job]) -> Iterable[int]:
    cuda = any(job.client.population.device.type == "cuda" for job in jobs)
    return range(torch.cuda.device_count()) if cuda else ()


def _device_of(jobs: Sequence[Job]) -> AbstractContextManager[Any]:
    """Inside, the jobs' GPU is the current one: new streams, recordings and kernels are there."""
    devices = [job.client.population.device for job in jobs[:1]]  # an engine has one
    cuda = [torch.cuda.device(device) for device in devices if device.type == "cuda"]
    return cuda[0] if cuda else nullcontext()


class JobStreams:
    """Torch's global generators as each job left them, so that none moves another's numbers."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._generators = [torch.default_generator]
        self._generators += [torch.cuda.default_generators[gpu] for gpu in _generators(jobs)]
        self._states: dict[int, list[Tensor]] = {}

    def begin(self, number: int) -> None:
        if number not in self._states:
            seed_generators(self._jobs[number].key())
            return
        for generator, state in zip(self._generators, self._states[number], strict=True):
            generator.set_state(state)

    def pause(self, number: int) -> None:
        self._states[number] = [generator.get_state() for generator in self._generators]
