"""The coordinator: who is there, and what a round waits for.

A round asks its sites and waits until each has answered or the deadline is over; who is late, dead
or failing, or whose answer does not fit what the algorithm declares, is left out. Whoever was left
out is asked to join again, and is selected again once it has answered that. With fewer than
``minimum`` answers the round is tried again: those who have done it answer from their checkpoints.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perfed.core.algorithm import ClientInfo, Reply, Server
from perfed.core.channel import Channel
from perfed.core.declaration import Known, networks
from perfed.core.errors import Diverged, PerfedError, RunError
from perfed.core.message import Message
from perfed.core.own_code import running
from perfed.core.selection import select_clients
from perfed.core.tensorfile import write_atomically
from perfed.core.tree import Tree
from perfed.engines import ClientRecord
from perfed.engines.population import check_one_head, check_one_width
from perfed.flower.conduct import Conduct
from perfed.flower.handout import Handout, write_handouts
from perfed.flower.heard import heard
from perfed.flower.membership import (
    Answer,
    Member,
    Membership,
    Say,
    Transport,
    Unreadable,
    was_given,
)
from perfed.flower.numbers import (
    Numbers,
    alike,
    arrays_of,
    checked_numbers,
    columns_of,
    numbers_in,
)
from perfed.flower.protocol import (
    EVALUATE,
    FIRST,
    JOIN,
    ROUND,
    Envelope,
    Header,
    Refused,
    check_answer,
    new_task,
    public_hash,
)
from perfed.flower.server_networks import ServerNetworks
from perfed.flower.settings import CoordinatorOptions, read_coordinator
from perfed.flower.watch import Watch, typical_accuracy
from perfed.runs.coordinator import (
    Callback,
    Coordinator,
    RoundReport,
    Steps,
    difference,
    drive,
    summaries,
)
from perfed.runs.directory import FEDERATION, RunDirectory, environment
from perfed.runs.result import Result
from perfed.runs.settings import changes, read_experiment, text_of

PRESENCE = "presence.json"  # in the run directory: who was seen when
PRESENCE_SECONDS = 5.0  # after which it is written anew
RETURNS = 15.0
"""Seconds that a round waits for who was lost in the one before: a site that was killed and started
again then misses one round. With a key it can come back only when Flower has noticed that it was
gone, which is when the round ends without it."""
MOST_NAMED = 5  # clients that a round's line names as missing
RELEASED = "released"  # in the run directory: for a number, the name of the site that may have it


@dataclasses.dataclass(frozen=True)
class Task:
    """Something for one client to do."""

    client: int
    kind: str
    round: int
    message: Message


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
        super().__init__(experiment, callbacks, torch.device("cpu"), 0.0, experiment.clients)
        self.options = options
        self._transport = transport
        self._say = say
        public, inputs = options.public_samples()
        self._networks = ServerNetworks(experiment, inputs, options.classes)
        self._public_x = self._networks.inputs.tensor(public)
        self.public = public_hash(public)
        self._widths = self._networks.widths()
        check_one_width(self.algorithm, self._widths)
        check_one_head(self.algorithm, self._networks.last_layers())
        self._absent: dict[str, str] = {}
        self._answered: set[int] = set()
        """Who said anything in this round, be it that it cannot."""
        self._accuracy: float | None = None
        """The sites' typical validation accuracy, where this round was evaluated."""
        self._heard: dict[str, Any] = {}
        """What this round's answers tell of the sites."""
        self._nodes: dict[int, int] = {}
        """Where each client was when it was last asked."""
        self._directory = directory
        self._rollbacks: list[dict[str, int]] = []
        self.run = self._identity()
        plan = options.plan()
        invitation = Envelope(self._header(JOIN, -1), facts={"plan": plan.to_mapping()})
        self.membership = Membership(transport, invitation, options, say)
        self.membership.admit = self._admit
        self.membership.has_trained = lambda client: client in self.progress.trained
        self.membership.is_released = self._is_released
        self.membership.changed = self._write_members
        self._presence_written = -float("inf")
        self.watch = Watch()
        self.conduct = Conduct(options.set_aside_after, options.set_aside_rounds)

    def finish(self) -> Result:
        """Run to the end."""
        return drive(self.steps(self._directory), self)

    # What sites are asked, and how long they have for it.

    def perform(self, jobs: Sequence[Task]) -> list[Envelope | None]:
        """Each site's answer; None for those left out, and :attr:`_absent` says why."""
        headers = {task.client: new_task(self._header(task.kind, task.round)) for task in jobs}
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
                if isinstance(answer, Envelope | Unreadable):
                    self._answered.add(client)
                try:
                    answers[client] = _checked(headers[client], answer)
                except Refused as error:
                    if was_given(answer) and headers[client].kind != EVALUATE:
                        self.refused[client] = str(error)
                    self._leave_out(client, nodes[client], str(error))
            if not waiting:
                break
            if time.monotonic() > ends:
                late = f"no answer within {self.options.deadline:g} s"
                for client in waiting.values():
                    self._leave_out(client, nodes[client], late)
                break
            self._look()
            for name, client in list(waiting.items()):
                if self.membership.has_moved(client, nodes[client]):
                    del waiting[name]
                    self._leave_out(client, nodes[client], "was started anew")
            time.sleep(self.options.poll)
        return [answers.get(task.client) for task in jobs]

    def _look(self) -> None:
        """Who is there; and for whoever asks, also when this process is gone, when each was."""
        self.membership.look()
        if time.monotonic() - self._presence_written >= PRESENCE_SECONDS:
            self._write_presence()

    def _write_presence(self) -> None:
        self._presence_written = time.monotonic()
        content = {
            "time": time.time(),
            "there": self.membership.present(),
            "seen": {str(client): seen for client, seen in sorted(self.membership.seen.items())},
            "kept_out": self.membership.kept_out,
        }
        self._directory.write_json(PRESENCE, content)

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
        the minimum. Whose answer was refused, in this round or several times before, is not asked
        again before a deadline is over."""
        everyone = self.algorithm.trains_everyone()
        wanted = self.experiment.clients if everyone else self.experiment.clients_per_round
        replies: dict[int, Message] = {}
        self._wait_for_lost()
        self._absent, self._answered = {}, set()
        self._begin_round()
        resting = {*self.conduct.aside(round)}
        while True:
            missing = max(1, self.options.minimum - len(replies))
            patience = self.options.deadline if resting else float("inf")
            self._wait_for(missing, without={*replies, *resting}, seconds=patience)
            if len({*self.membership.present()} - {*replies, *resting}) < missing:
                resting = set()  # they may have been mended meanwhile
            clients = self._select(round, wanted - len(replies), {*replies, *resting})
            tasks = [Task(c, kind, round, message) for c, message in messages(clients).items()]
            answers = zip(tasks, (yield tasks), strict=True)
            answered = {task.client: answer for task, answer in answers if answer is not None}
            sent = {client: answer.message for client, answer in answered.items()}
            for client, message in self._admitted(round, sent, channel).items():
                replies[client] = message
                self._absent.pop(str(client), None)
                self.refused.pop(client, None)
                if "numbers" in answered[client].facts:
                    self.membership.numbers[client] = checked_numbers(answered[client].facts)
            for client in answered.keys() - replies.keys():
                self._leave_out(client, self._nodes[client], self.refused[client])
            resting |= self.refused.keys() & set(clients)
            if len(replies) >= self.options.minimum:
                for client in self.conduct.note(round, replies, self.refused):
                    self._say(f"client {client} is {self.conduct.aside(round + 1)[client]}")
                return replies
            self._say(
                f"round {round}: {len(replies)} answers, {self.options.minimum} are needed; again"
            )

    def _wait_for_lost(self) -> None:
        """Who was asked in the round before and gave no answer that could be taken or refused. Who
        does not come back is waited for once: it is not asked again before it is there."""
        lost = {int(client) for client in self._absent} - self.refused.keys()
        ends = time.monotonic() + min(RETURNS, self.options.deadline)
        while lost - {*self.membership.present()} and time.monotonic() < ends:
            self._look()
            time.sleep(self.options.poll)

    def _wait_for(
        self, count: int, without: Iterable[int] = (), seconds: float = float("inf")
    ) -> None:
        """Until ``count`` sites are there, or the time is over."""
        began = said = time.monotonic()
        while True:
            self._look()
            there = set(self.membership.present()) - set(without)
            now = time.monotonic()
            if len(there) >= count or now - began >= seconds:
                return
            if said == began or now - said >= self.options.deadline:
                self._say(f"waiting for {count} sites; there: {sorted(there)}")
                said = now
            time.sleep(self.options.poll)

    def _select(self, round: int, count: int, without: Iterable[int]) -> list[int]:
        """As in a simulation, of those that are there."""
        there = [client for client in self.membership.present() if client not in without]
        if not there:
            return []
        sizes = np.array([self.membership.members[client].sizes["train"] for client in there])
        selected = select_clients(
            sizes,
            min(count, len(there)),
            self.experiment.selection == "by-size",
            self.experiment.seed,
            round,
        )
        return [there[position] for position in selected]

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
            self.membership.numbers = numbers_in(line, self.experiment.clients)

    def _restore(self, records: Mapping[int, ClientRecord]) -> None:
        """Started again: those that were there get the time of a round to say that they are."""
        lines = self._directory.lines("rounds.jsonl")
        lines = [line for line in lines if line["round"] < self.progress.next_round]
        self.conduct.recall(lines)
        self.watch.recall(lines)
        known = len(self.membership.members)
        self._wait_for(known, seconds=self.options.deadline)

    def _opening(self, channel: Channel) -> Steps[dict[str, Any] | None]:
        self._wait_for(self.options.start_with or self.experiment.clients)
        self.progress.state = self._started()
        if not self.algorithm.has_opening:
            return None
        replies = yield from self._gather(
            FIRST, -1, lambda clients: dict.fromkeys(clients, Message()), channel
        )
        self.merge(-1, replies)
        traffic = vars(channel.total).copy()
        return {
            "round": -1,
            "clients": sorted(replies),
            **self._absence([]),
            "traffic": traffic,
            "traffic_total": traffic,
        }

    def _round(self, round: int, channel: Channel) -> Steps[tuple[list[int], dict[str, int]]]:
        before = dataclasses.replace(channel.total)
        self._accuracy = None
        with self._timed("clients"):
            replies = yield from self._gather(
                ROUND, round, lambda clients: self._broadcast(round, clients, channel), channel
            )
        with self._timed("merge"):
            self.merge(round, replies)
        self._note_training(replies)
        return sorted(replies), difference(channel.total, before)

    def _evaluate(self, round: int, directory: RunDirectory) -> Steps[dict[str, Any]]:
        with self._timed("evaluate"):
            if (
                not self.algorithm.evaluated_with_server
            ):  # a client evaluates itself whenever it has trained
                numbers = dict(self.membership.numbers)
            else:
                numbers = yield from self._ask_for_numbers(round)
                while len(numbers) < self.options.minimum and round + 1 == self.experiment.rounds:
                    self._say(
                        "too few have evaluated the final models; again"
                    )  # or there is no end
                    self._wait_for(self.options.minimum)
                    numbers = yield from self._ask_for_numbers(round)
        numbers = alike({client: told for client, told in numbers.items() if told})
        if not numbers:  # or all sites keep theirs to themselves
            return {}
        self._accuracy = typical_accuracy(numbers)
        line = {"round": round} | columns_of(numbers, self._everyone())
        directory.append("clients.jsonl", line)
        who = sorted(numbers)
        members = [self.membership.members[client] for client in who]
        return summaries(
            arrays_of(numbers, who),
            np.array([member.sizes["train"] for member in members]),
            np.array([member.sizes["test"] for member in members]),
            [self.progress.trained.get(client, 0) for client in who],
        )

    def _ask_for_numbers(self, round: int) -> Steps[dict[int, Numbers]]:
        there = {*self.membership.present()} - self.conduct.aside(round).keys()
        messages = self.evaluation_messages(round, sorted(there))
        tasks = [Task(c, EVALUATE, round, message) for c, message in messages.items()]
        answers = yield tasks
        return {
            task.client: checked_numbers(answer.facts) if "numbers" in answer.facts else {}
            for task, answer in zip(tasks, answers, strict=True)
            if answer is not None
        }

    def merge(self, round: int, replies: Mapping[int, Message]) -> None:
        self._heard = {}
        try:
            super().merge(round, replies)
        except Diverged as error:
            raise Diverged(f"{error}; {self._way_back()}") from None

    def _describe(self, before: Tree, state: Tree, replies: Sequence[Reply]) -> None:
        super()._describe(before, state, replies)
        self._heard = heard(self.algorithm, self._messages.up or {}, state, replies)

    def _facts(self, clients: list[int]) -> dict[str, Any]:
        """Who took no part, what the watch has seen, and where the state comes from."""
        round = self.progress.next_round
        seen: dict[str, Any] = {"answered": len(self._answered), "admitted": len(clients)}
        if self._accuracy is not None:
            seen["validation_accuracy"] = self._accuracy
        facts = self._absence(clients) | {"watched": seen, "heard": self._heard}
        self._write_presence()
        suspect = self.watch.note(round, seen)
        for sign in suspect:
            self._say(f"WARNING: round {round}: {sign}; {self._way_back()}")
        if suspect:
            facts["suspect"] = suspect
        if rolled_back := [one["to"] for one in self._rollbacks if one["before"] == round]:
            facts["rolled_back_to"] = rolled_back[-1]
        return facts

    def _way_back(self) -> str:
        to = -1 if self.watch.best_round is None else self.watch.best_round
        return (
            f"to go back to the server's state after round {to}, stop the run ('flwr stop'), then "
            f"'perfed federation rollback --to {to} {self._directory.path}', then 'flwr run' again"
        )

    def _wanted_states(self, rounds: list[int]) -> set[int]:
        """The last ones, and the best."""
        return {*rounds[-self.options.states :]} | ({*rounds} & {self.watch.best_round})

    def _close(self, directory: RunDirectory) -> Steps[None]:
        try:
            self._write_handouts(directory)
        except PerfedError as error:  # the algorithm's own: the run is over all the same
            self._say(f"nothing is kept for sites that come later: {error}")
        yield from ()

    def _write_handouts(self, directory: RunDirectory) -> None:
        """What a client would be sent of which nothing is known but its network."""
        round, plan = self.experiment.rounds, self.options.plan().to_mapping()
        server, state = self.server(round), self.progress.state
        known = [*server.architectures]
        samples = int(np.mean([m.sizes["train"] for m in self.membership.members.values()]))
        handouts = []
        for network in known if self._sends_weights_down() else known[:1]:
            info = ClientInfo(self.experiment.clients, network, samples)
            with running(self.algorithm, "broadcast"):
                down = self.algorithm.broadcast(server, state, info)
            with running(self.algorithm, "evaluation_message"):
                evaluation = self.algorithm.evaluation_message(server, state, info)
            handouts.append(Handout(self._header(ROUND, round), plan, down, evaluation))
        write_handouts(directory.path, known if self._sends_weights_down() else [], handouts)

    def _sends_weights_down(self) -> bool:
        """Whether what a client gets depends on its network, as far as the algorithm says."""
        sent = self._messages
        return sent.down is None or "" in networks(sent.down) | networks(sent.evaluation)

    def _absence(self, clients: list[int]) -> dict[str, Any]:
        """Who took no part and why, also where that began in an earlier round."""
        gone = set(range(self.experiment.clients)) - set(self.membership.present())
        aside = self.conduct.aside(self.progress.next_round)
        absent = dict.fromkeys(sorted(gone), "is not there") | aside
        for client in clients:
            absent.pop(client, None)
        return {"absent": {str(client): why for client, why in absent.items()} | self._absent}

    def server(self, round: int) -> Server:
        there = Counter(member.architecture for member in self.membership.members.values())
        return self._server_for(round, dict.fromkeys(self._networks.labels, 0) | there)

    def _server_for(self, round: int, population: Mapping[str, int]) -> Server:
        return Server(
            self.experiment.seed,
            round,
            population,
            self._networks.initial,
            self._networks,
            lambda: self._public_x,
            self._networks.head,
        )

    def info(self, client: int) -> ClientInfo:
        member = self.membership.members[client]
        return ClientInfo(client, member.architecture, member.sizes["train"])

    def known(self, client: int) -> Known:
        info, features = self.info(client), self.membership.members[client].features
        sizes = {"P": len(self._public_x), "N": self.options.classes}
        sizes |= {"F": features} if features else {}
        return Known(
            sizes,
            info.samples,
            lambda network: self._networks.initial(network or info.architecture),
            lambda network: self._networks.head(network or info.architecture),
            self._broadcasts.get(client, Message()),
        )

    def _admit(self, member: Member) -> None:
        """A method that sends weights cannot serve an architecture the server does not know; one
        that compares features cannot serve two widths of them."""
        self.algorithm.start(self._server_for(-1, {member.architecture: 1}))
        for network in networks(self._messages.up):
            self._networks.initial(network or member.architecture)
        if self.algorithm.shares_features:
            # What the coordinator knows by itself counts, and what a first site says only else.
            told = {other.features for other in self.membership.members.values()}
            widths = set(self._widths.values()) or told
            if widths and member.features not in widths:
                raise Refused(
                    f"its network gives {member.features} features, those of the others "
                    f"{max(widths)}: '{self.algorithm.registered_name}' needs one width"
                )

    # What identifies the run.

    def _header(self, kind: str, round: int) -> Header:
        return Header(kind, self.run, round, self.public)

    def _identity(self) -> str:
        if not (self._directory.path / FEDERATION).is_file():
            run = f"{self.experiment.name}-{uuid.uuid4().hex[:12]}"
            self._directory.write_json(FEDERATION, {"run": run, "public": self.public})
        recorded = self._directory.read_json(FEDERATION)
        if recorded["public"] != self.public:
            raise RunError(f"{self._directory.path} was begun with another public set")
        self._rollbacks = recorded.get("rollbacks", [])
        run_id: str = recorded["run"]
        return run_id

    def _is_released(self, client: int, name: str) -> bool:
        """Once."""
        path = self._directory.path / RELEASED / str(client)
        released = path.is_file() and path.read_text("utf-8") == name
        if released:
            path.unlink()
        return released

    def _write_members(self) -> None:
        members = self.membership.members
        clients = [
            dataclasses.asdict(members[client]) if client in members else None
            for client in self._everyone()
        ]
        self._directory.write_json("partition.json", {"clients": clients})


def missing(absent: Mapping[str, str]) -> str:
    """For a round's line."""
    shown = [f"client {client} ({why})" for client, why in list(absent.items())[:MOST_NAMED]]
    more = len(absent) - len(shown)
    return f"; missing: {', '.join(shown)}{f' and {more} more' if more else ''}" if absent else ""


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
            f"{report.traffic.bytes:,} bytes so far, {report.seconds:.1f} s{missing(report.absent)}"
        )

    def on_end(self, result: Result) -> None:
        self._say(result.table())


def release(path: Path, client: int, name: str) -> None:
    """The site of this name has the number when it comes; also while the coordinator runs."""
    options = read_coordinator(path)
    folder = path.absolute().parent / options.directory
    if not 0 <= client < options.experiment.clients:
        raise RunError(f"client {client}: the run's are 0 … {options.experiment.clients - 1}")
    if not (folder / FEDERATION).is_file():
        raise RunError(f"{folder} holds no run: nobody has a number yet")
    (folder / RELEASED).mkdir(exist_ok=True)
    write_atomically(folder / RELEASED / str(client), name.encode())


def coordinate(path: Path, transport: Transport, say: Say = print) -> Result:
    """Start the run of a coordinator's file, or go on with it where it was."""
    options = read_coordinator(path)
    with chdir(path.absolute().parent):
        folder = Path(options.directory).absolute()
        if not (folder / "config.yaml").is_file():
            if not (folder / FEDERATION).is_file():  # else killed before its first line
                RunDirectory.create(folder)
        elif changed := changes(read_experiment(folder), options.experiment):
            raise RunError(
                f"{folder} holds a run with other settings: {text_of(changed)}; choose another "
                "'directory'"
            )
        directory = RunDirectory(folder)
        if directory.finished:
            say(f"{folder} is finished")
            return Result(folder)
        with directory.locked():
            return FederatedRun(options, directory, transport, [Lines(say)], say).finish()


def _checked(task: Header, answer: Answer) -> Envelope:
    if isinstance(answer, str):
        raise Refused(answer)
    check_answer(task, answer)
    if not isinstance(answer.facts, Mapping):
        raise Refused("its answer has no facts")
    if "numbers" in answer.facts:  # a site whose messages are private keeps them
        checked_numbers(answer.facts)
    return answer
