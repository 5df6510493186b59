"""The coordinator: who is there, and what a round waits for.

A round asks its sites and waits until each has answered or the deadline is over; who is late, dead
or failing, or whose answer does not fit what the algorithm declares, is left out. Whoever was left
out is asked to join again, and is drawn again once it has answered that. With fewer than
``minimum`` answers the round is tried again: those who have done it answer from their checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from perfed.config import parse, read_mapping
from perfed.core.algorithm import Algorithm, ClientInfo, Server
from perfed.core.channel import Channel
from perfed.core.declaration import Known, networks
from perfed.core.errors import ConfigError, PerfedError, RunError
from perfed.core.message import Message
from perfed.core.metrics import MODEL_NAMES, QUANTITIES
from perfed.core.metrics import PARTS as JUDGED_PARTS
from perfed.core.selection import select_clients
from perfed.core.tree import Weights, flatten
from perfed.engines import ClientRecord
from perfed.engines.population import with_public_statistics
from perfed.flower.protocol import (
    EVALUATE,
    FIRST,
    JOIN,
    ROUND,
    Envelope,
    Header,
    Refused,
    check_answer,
    public_hash,
)
from perfed.flower.settings import CoordinatorOptions, read_coordinator
from perfed.flower.site import PARTS, Numbers, Plan, judged_alone
from perfed.models import build_module, initial_weights
from perfed.runs.coordinator import (
    Callback,
    Coordinator,
    RoundReport,
    Steps,
    check_finite,
    difference,
    drive,
    summaries,
)
from perfed.runs.directory import FEDERATION, RunDirectory, environment
from perfed.runs.result import Result

Say = Callable[[str], None]
MOST = 10**12  # samples that a site may say it has
JUDGED = [f"{part}_{quantity}" for part in JUDGED_PARTS for quantity in QUANTITIES]
HIGHEST = {name: 1.0 if "accuracy" in name else torch.finfo(torch.float32).max for name in JUDGED}
"""What can be; of several losses, the mean is then a number too."""


class Transport(Protocol):
    """What carries envelopes."""

    def nodes(self) -> list[int]:
        """Who is connected."""

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        """Returns a name by which to ask for the answer, which is of use for so long."""

    def receive(self, names: Iterable[str]) -> dict[str, Envelope | str]:
        """What has arrived of these: an answer, or why there will be none."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Something for one client to do."""

    client: int
    kind: str
    round: int
    message: Message


@dataclasses.dataclass
class Member:
    """What the coordinator knows of a client that has joined."""

    architecture: str
    sizes: dict[str, int]
    site: str
    """The folder it keeps its state in; another one under the same number is another site."""


class Membership:
    """Which node is which client. A node is asked to join when it is first seen, and again after
    it was left out of a round."""

    def __init__(
        self, transport: Transport, invitation: Envelope, options: CoordinatorOptions, say: Say
    ) -> None:
        self.members: dict[int, Member] = {}
        self.numbers: dict[int, Numbers] = {}
        """The newest judgement of each client that told its own."""
        self.admit: Callable[[str], None] = lambda architecture: None
        """Raises ConfigError where the server cannot serve an architecture."""
        self.has_trained: Callable[[int], bool] = lambda client: False
        self.changed: Callable[[], None] = lambda: None
        self._transport = transport
        self._invitation = invitation
        self._options = options
        self._say = say
        self._node_of: dict[int, int] = {}
        self._asked: dict[int, tuple[str, float]] = {}  # node → the invitation, and when
        self._connected: set[int] = set()

    def look(self) -> None:
        """See who is connected, take in who has answered, and invite whoever has not joined."""
        self._connected = set(self._transport.nodes())
        self._node_of = {c: n for c, n in self._node_of.items() if n in self._connected}
        waiting = {name: node for node, (name, _) in self._asked.items() if name}
        for name, answer in self._transport.receive(waiting).items() if waiting else ():
            node = waiting[name]
            self._asked[node] = ("", time.monotonic())
            try:
                self._take_in(node, answer)
            except PerfedError as error:
                self._say(f"node {node} may not join: {error}")
        joined = set(self._node_of.values())
        for node in self._connected - joined:
            _, asked = self._asked.get(node, ("", -float("inf")))
            if time.monotonic() - asked > self._options.deadline:
                try:
                    name = self._transport.send(node, self._invitation, self._options.deadline)
                except PerfedError as error:
                    name = ""
                    self._say(f"node {node} cannot be asked to join: {error}")
                self._asked[node] = (name, time.monotonic())

    def present(self) -> list[int]:
        return sorted(self._node_of)

    def node(self, client: int) -> int:
        return self._node_of[client]

    def has_moved(self, client: int, node: int) -> bool:
        """Whether a client has come back as another node: what the old one was asked is lost."""
        return self._node_of.get(client, node) != node

    def leave_out(self, client: int, node: int) -> None:
        """Until it has answered an invitation, which goes out at once; unless it has come back as
        another node meanwhile."""
        if self._node_of.get(client) == node:
            del self._node_of[client]
            self._asked.pop(node, None)

    def _take_in(self, node: int, answer: Envelope | str) -> None:
        if isinstance(answer, str):
            raise Refused(answer)
        check_answer(self._invitation.header, answer)
        client, member, numbers = _introduction(answer.facts, self._options.experiment.clients)
        self._forget_other_numbers(member.site, client)
        before = self.members.get(client)
        if before is not None and before.site != member.site and client in self._node_of:
            raise Refused(f"client {client} is another site already: give this one its own number")
        if before is not None and before.architecture != member.architecture:
            raise Refused(
                f"client {client} came with '{before.architecture}' before, "
                f"now with '{member.architecture}'"
            )
        self.admit(member.architecture)
        self.members[client] = member
        self._node_of[client] = node
        if numbers:
            self.numbers[client] = numbers
        self._say(
            f"client {client} is there: {member.architecture}, {member.sizes['train']} samples"
        )
        self.changed()

    def _forget_other_numbers(self, site: str, client: int) -> None:
        """A site that came with a wrong number, and has done nothing under it, gives it back."""
        for other, member in list(self.members.items()):
            if member.site == site and other != client and not self.has_trained(other):
                del self.members[other]
                self._node_of.pop(other, None)
                self.numbers.pop(other, None)


class FederatedRun(Coordinator):
    """An experiment whose clients are at sites of their own."""

    def __init__(
        self,
        options: CoordinatorOptions,
        directory: RunDirectory,
        transport: Transport,
        callbacks: Iterable[Callback] = (),
        say: Say = print,
    ) -> None:
        experiment = options.experiment
        super().__init__(experiment, callbacks, torch.device("cpu"), checkpoint_seconds=0.0)
        self.options = options
        self._transport = transport
        self._say = say
        public = options.public_samples()
        self._shape: tuple[int, ...] = public.shape[1:]
        self._public_x = torch.as_tensor(public, dtype=torch.get_default_dtype())
        self._public = public_hash(public)
        self._architectures = {a.label(): a for a in experiment.models.architectures}
        self._initial: dict[tuple[str, int], Weights] = {}
        self._absent: dict[str, str] = {}
        self._nodes: dict[int, int] = {}
        """Where each client was when it was last asked."""
        self._directory = directory
        self.run = self._run_id()
        plan = Plan(
            experiment.name,
            experiment.seed,
            experiment.clients,
            options.classes,
            experiment.models.initial,
            experiment.training,
            self.algorithm,
            experiment.wire,
        )
        invitation = Envelope(self._header(JOIN, -1), facts={"plan": plan.to_mapping()})
        self.membership = Membership(transport, invitation, options, say)
        self.membership.admit = self._admit
        self.membership.has_trained = lambda client: bool(self.progress.trained[client])
        self.membership.changed = self._write_members

    def finish(self) -> Result:
        """Run to the end."""
        return drive(self.steps(self._directory), self)

    # What sites are asked, and how long they have for it.

    def perform(self, jobs: Sequence[Task]) -> list[Envelope | None]:
        """Each site's answer; None for those left out, and :attr:`_absent` says why."""
        headers = {task.client: self._header(task.kind, task.round) for task in jobs}
        waiting: dict[str, int] = {}
        nodes = {task.client: self.membership.node(task.client) for task in jobs}
        self._nodes |= nodes
        for task in jobs:
            envelope = Envelope(headers[task.client], task.message)
            try:
                name = self._transport.send(nodes[task.client], envelope, self.options.deadline)
            except PerfedError as error:
                self._leave_out(task.client, nodes[task.client], str(error))
            else:
                waiting[name] = task.client
        answers: dict[int, Envelope] = {}
        ends = time.monotonic() + self.options.deadline
        while waiting:
            for name, answer in self._transport.receive(waiting).items():
                client = waiting.pop(name)
                try:
                    answers[client] = _checked(headers[client], answer)
                except PerfedError as error:
                    self._leave_out(client, nodes[client], str(error))
            if not waiting:
                break
            if time.monotonic() > ends:
                late = f"no answer within {self.options.deadline:g} s"
                for client in waiting.values():
                    self._leave_out(client, nodes[client], late)
                break
            self.membership.look()
            for name, client in list(waiting.items()):
                if self.membership.has_moved(client, nodes[client]):
                    del waiting[name]
                    self._leave_out(client, nodes[client], "was started anew")
            time.sleep(self.options.poll)
        return [answers.get(task.client) for task in jobs]

    def _leave_out(self, client: int, node: int, reason: str) -> None:
        self._say(f"client {client} is left out: {reason}")
        self._absent[str(client)] = reason
        self.membership.leave_out(client, node)

    def _gather(
        self,
        kind: str,
        round: int,
        messages: Callable[[list[int]], Mapping[int, Message]],
        channel: Channel,
    ) -> Steps[dict[int, Message]]:
        """The answers of a round that are admitted: of as many clients as it needs, or at least of
        the minimum. Whose answer was refused is not asked again before a deadline is over."""
        everyone = self.algorithm.trains_everyone()
        wanted = self.experiment.clients if everyone else self.experiment.clients_per_round
        replies: dict[int, Message] = {}
        self._absent = {}
        self._begin_round()
        while True:
            missing = max(1, self.options.minimum - len(replies))
            patience = self.options.deadline if self._refused else float("inf")
            self._wait_for(missing, without={*replies, *self._refused}, seconds=patience)
            if len({*self.membership.present()} - {*replies, *self._refused}) < missing:
                self._refused = {}  # they may have been mended meanwhile
            clients = self._draw(round, wanted - len(replies), {*replies, *self._refused})
            tasks = [Task(c, kind, round, message) for c, message in messages(clients).items()]
            answers = zip(tasks, (yield tasks), strict=True)
            answered = {task.client: answer for task, answer in answers if answer is not None}
            sent = {client: answer.message for client, answer in answered.items()}
            for client, message in self._admitted(round, sent, channel).items():
                replies[client] = message
                self._absent.pop(str(client), None)
                if "numbers" in answered[client].facts:
                    self.membership.numbers[client] = _numbers(answered[client].facts)
            for client in answered.keys() - replies.keys():
                self._leave_out(client, self._nodes[client], self._refused[client])
            if len(replies) >= self.options.minimum:
                return replies
            self._say(
                f"round {round}: {len(replies)} answers, {self.options.minimum} are needed; again"
            )

    def _wait_for(
        self, count: int, without: Iterable[int] = (), seconds: float = float("inf")
    ) -> None:
        """Until ``count`` sites are there, or the time is over."""
        began = said = time.monotonic()
        while True:
            self.membership.look()
            there = set(self.membership.present()) - set(without)
            now = time.monotonic()
            if len(there) >= count or now - began >= seconds:
                return
            if said == began or now - said >= self.options.deadline:
                self._say(f"waiting for {count} sites; there: {sorted(there)}")
                said = now
            time.sleep(self.options.poll)

    def _draw(self, round: int, count: int, without: Iterable[int]) -> list[int]:
        """As in a simulation, of those that are there."""
        there = [client for client in self.membership.present() if client not in without]
        if not there:
            return []
        sizes = np.array([self.membership.members[client].sizes["train"] for client in there])
        drawn = select_clients(
            sizes,
            min(count, len(there)),
            self.experiment.selection == "by-size",
            self.experiment.seed,
            round,
        )
        return [there[position] for position in drawn]

    # The coordinator's contract.

    def _open(self, directory: RunDirectory) -> None:
        if not (directory.path / "environment.json").is_file():
            directory.write_json(
                "environment.json", environment(self.device) | {"engine": "flower"}
            )
        if (directory.path / "partition.json").is_file():
            record = directory.read_json("partition.json")
            self.membership.members = {
                client: Member(**known)
                for client, known in enumerate(record["clients"])
                if known is not None
            }
        for line in directory.lines("clients.jsonl")[-1:]:
            self.membership.numbers = _from_columns(line, self.experiment.clients)

    def _restore(self, records: Mapping[int, ClientRecord]) -> None:
        """Started again: those that were there get the time of a round to say that they are."""
        known = len(self.membership.members)
        self._wait_for(known, seconds=self.options.deadline)

    def _opening(self, channel: Channel) -> Steps[dict[str, Any] | None]:
        self._wait_for(self.options.start_with or self.experiment.clients)
        self.progress.state = self.algorithm.start(self._server(-1))
        if type(self.algorithm).first_message is Algorithm.first_message:
            return None
        replies = yield from self._gather(
            FIRST, -1, lambda clients: dict.fromkeys(clients, Message()), channel
        )
        self._merge(-1, replies)
        traffic = vars(channel.total).copy()
        return {
            "round": -1,
            "clients": sorted(replies),
            **self._facts([]),
            "traffic": traffic,
            "traffic_total": traffic,
        }

    def _round(self, round: int, channel: Channel) -> Steps[tuple[list[int], dict[str, int]]]:
        before = dataclasses.replace(channel.total)
        with self._timed("clients"):
            replies = yield from self._gather(
                ROUND, round, lambda clients: self._broadcast(round, clients, channel), channel
            )
        with self._timed("merge"):
            self._merge(round, replies)
        for client in replies:
            self.progress.trained[client] += 1
        return sorted(replies), difference(channel.total, before)

    def _evaluate(self, round: int, directory: RunDirectory) -> Steps[dict[str, Any]]:
        with self._timed("evaluate"):
            if judged_alone(self.algorithm):  # a client judges itself whenever it has trained
                numbers = self.membership.numbers
            else:
                numbers = yield from self._ask_for_numbers(round)
                while len(numbers) < self.options.minimum and round + 1 == self.experiment.rounds:
                    self._say("too few have judged the final models; again")  # or there is no end
                    self._wait_for(self.options.minimum)
                    numbers = yield from self._ask_for_numbers(round)
        numbers = alike(numbers)
        if not numbers:
            return {}
        directory.append("clients.jsonl", {"round": round} | self._columns(numbers))
        who = sorted(numbers)
        columns = {
            kind: {
                name: np.array([numbers[client][kind][name] for client in who])
                for name in numbers[who[0]][kind]
            }
            for kind in numbers[who[0]]
        }
        members = [self.membership.members[client] for client in who]
        return summaries(
            columns,
            np.array([member.sizes["train"] for member in members]),
            np.array([member.sizes["test"] for member in members]),
            [self.progress.trained[client] for client in who],
        )

    def _ask_for_numbers(self, round: int) -> Steps[dict[int, Numbers]]:
        messages = self._evaluation_messages(round, self.membership.present())
        tasks = [Task(c, EVALUATE, round, message) for c, message in messages.items()]
        answers = yield tasks
        return {
            task.client: _numbers(answer.facts)
            for task, answer in zip(tasks, answers, strict=True)
            if answer is not None
        }

    def _merge(self, round: int, replies: Mapping[int, Message]) -> None:
        super()._merge(round, replies)
        check_finite(round, {"the server": [*flatten(self.progress.state).items()]})
        try:
            json.dumps(self._described, allow_nan=False)  # as the round's line will have it
        except (TypeError, ValueError) as error:
            name = self.algorithm.registered_name
            raise RunError(f"round {round}: what '{name}' describes is no JSON: {error}") from None

    def _columns(self, numbers: Mapping[int, Numbers]) -> dict[str, dict[str, list[float | None]]]:
        """A place for every client; those of whom nothing is known have no number."""
        one = next(iter(numbers.values()))
        return {
            kind: {
                name: [
                    numbers[client][kind][name] if client in numbers else None
                    for client in self._everyone()
                ]
                for name in one[kind]
            }
            for kind in one
        }

    def _facts(self, clients: list[int]) -> dict[str, Any]:
        """Who took no part and why, also where that began in an earlier round."""
        gone = set(range(self.experiment.clients)) - set(self.membership.present())
        return {"absent": {str(client): "is not there" for client in sorted(gone)} | self._absent}

    def _server(self, round: int) -> Server:
        there = Counter(member.architecture for member in self.membership.members.values())
        return self._server_for(round, dict.fromkeys(self._architectures, 0) | there)

    def _server_for(self, round: int, population: Mapping[str, int]) -> Server:
        return Server(
            self.experiment.seed,
            round,
            population,
            self._initial_weights,
            _Modules(self._module),
            self._public_x,
        )

    def _info(self, client: int) -> ClientInfo:
        member = self.membership.members[client]
        return ClientInfo(client, member.architecture, member.sizes["train"])

    def _known(self, client: int) -> Known:
        info = self._info(client)
        return Known(
            {"P": len(self._public_x), "N": self.options.classes},
            info.samples,
            lambda network: self._initial_weights(network or info.architecture),
            received=self._broadcasts.get(client, Message()),
        )

    # What the server knows of networks: only those in its own configuration.

    def _admit(self, architecture: str) -> None:
        """A method that sends weights cannot serve an architecture the server does not know."""
        self.algorithm.start(self._server_for(-1, {architecture: 1}))
        for network in networks(self._messages.up):
            self._initial_weights(network or architecture)

    def _initial_weights(self, architecture: str, number: int = 0) -> Weights:
        key = (architecture, number)
        if key not in self._initial:
            known, experiment = self._configured(architecture), self.experiment
            drawn = initial_weights(
                known, self._shape, self.options.classes, experiment.seed, number=number
            )
            self._initial[key] = with_public_statistics(drawn, self.algorithm, experiment.training)
        return self._initial[key]

    def _module(self, architecture: str) -> torch.nn.Module:
        return build_module(self._configured(architecture), self._shape, self.options.classes)

    def _configured(self, architecture: str) -> Any:
        if architecture not in self._architectures:
            raise ConfigError(
                f"'{self.algorithm.registered_name}' sends weights, and '{architecture}' is not "
                "among the coordinator's experiment.models.architectures"
            )
        return self._architectures[architecture]

    # What identifies the run.

    def _header(self, kind: str, round: int) -> Header:
        return Header(kind, self.run, round, self._public)

    def _run_id(self) -> str:
        if not (self._directory.path / FEDERATION).is_file():
            run = f"{self.experiment.name}-{uuid.uuid4().hex[:12]}"
            self._directory.write_json(FEDERATION, {"run": run, "public": self._public})
        recorded = self._directory.read_json(FEDERATION)
        if recorded["public"] != self._public:
            raise RunError(f"{self._directory.path} was begun with another public set")
        run_id: str = recorded["run"]
        return run_id

    def _write_members(self) -> None:
        members = self.membership.members
        clients = [
            dataclasses.asdict(members[client]) if client in members else None
            for client in self._everyone()
        ]
        self._directory.write_json("partition.json", {"clients": clients})


class _Modules(Mapping[str, torch.nn.Module]):
    """Modules by architecture, made when asked for."""

    def __init__(self, make: Callable[[str], torch.nn.Module]) -> None:
        self._make = make
        self._made: dict[str, torch.nn.Module] = {}

    def __getitem__(self, architecture: str) -> torch.nn.Module:
        if architecture not in self._made:
            self._made[architecture] = self._make(architecture)
        return self._made[architecture]

    def __iter__(self) -> Any:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class Lines(Callback):
    """A line for every round."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def on_start(self, experiment: Any, directory: Path, first_round: int) -> None:
        self._say(f"{experiment.name}: round {first_round} of {experiment.rounds}, in {directory}")

    def on_round(self, report: RoundReport) -> None:
        accuracy = "" if report.accuracy is None else f"accuracy {100 * report.accuracy:.1f} %, "
        self._say(
            f"round {report.round + 1}/{report.experiment.rounds}: {accuracy}"
            f"{report.traffic.bytes:,} bytes so far, {report.seconds:.1f} s"
        )

    def on_end(self, result: Result) -> None:
        self._say(result.table())


def coordinate(path: Path, transport: Transport, say: Say = print) -> Result:
    """Start the run of a coordinator's file, or go on with it where it was."""
    options = read_coordinator(path)
    with chdir(path.absolute().parent):
        folder = Path(options.directory).absolute()
        if not (folder / "config.yaml").is_file():
            if not (folder / FEDERATION).is_file():  # else killed before its first line
                RunDirectory.create(folder)
        elif parse(read_mapping(folder / "config.yaml")) != options.experiment:
            raise RunError(
                f"{folder} holds a run with another configuration: choose another 'directory'"
            )
        directory = RunDirectory(folder)
        if directory.finished:
            say(f"{folder} is finished")
            return Result(folder)
        with directory.locked():
            return FederatedRun(options, directory, transport, [Lines(say)], say).finish()


def _checked(task: Header, answer: Envelope | str) -> Envelope:
    if isinstance(answer, str):
        raise Refused(answer)
    check_answer(task, answer)
    if not isinstance(answer.facts, Mapping):
        raise Refused("its answer has no facts")
    if task.kind == EVALUATE or "numbers" in answer.facts:
        _numbers(answer.facts)
    return answer


def _introduction(facts: Mapping[str, Any], clients: int) -> tuple[int, Member, Numbers]:
    """What a site says of itself on joining. It may run other code than this: nothing is taken
    for granted."""
    try:
        client, sizes = int(facts["client"]), {p: int(facts["sizes"][p]) for p in PARTS}
        member = Member(str(facts["architecture"]), sizes, str(facts["site"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Refused("it does not say who it is") from None
    if not member.architecture.isprintable():
        raise Refused(f"its architecture's name, {member.architecture!a}, is no text")
    if not 0 <= client < clients or not 1 <= min(sizes.values()) <= max(sizes.values()) <= MOST:
        raise Refused(f"client {client} with {sizes} samples: there is no such client")
    return client, member, _numbers(facts) if "numbers" in facts else {}


def _numbers(facts: Mapping[str, Any]) -> Numbers:
    """How a site judges its models; raises Refused where these are not numbers."""
    try:
        said = dict(facts["numbers"])
        numbers = {kind: {name: float(said[kind][name]) for name in JUDGED} for kind in said}
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Refused("its judgement of its models is not one") from None
    possible = all(0 <= one[name] <= HIGHEST[name] for one in numbers.values() for name in one)
    if not numbers or not numbers.keys() <= MODEL_NAMES.keys() or not possible:
        raise Refused("its judgement of its models is not one")
    return numbers


def alike(numbers: Mapping[int, Numbers]) -> dict[int, Numbers]:
    """Without those who judge other kinds of models than most do."""
    kinds = Counter(tuple(sorted(judged)) for judged in numbers.values())
    usual = kinds.most_common(1)[0][0] if kinds else ()
    return {k: judged for k, judged in numbers.items() if tuple(sorted(judged)) == usual}


def _from_columns(line: Mapping[str, Any], clients: int) -> dict[int, Numbers]:
    """The numbers of each client, from a line of an evaluation."""
    return {
        client: {
            kind: {name: values[client] for name, values in columns.items()}
            for kind, columns in line.items()
            if kind != "round"
        }
        for client in range(clients)
        if all(
            values[client] is not None
            for kind, columns in line.items()
            if kind != "round"
            for values in columns.values()
        )
    }
