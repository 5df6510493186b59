"""Who is there: which node is which client, and what a client told on joining."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from perfed.core.errors import PerfedError
from perfed.flower.numbers import Numbers, checked_numbers
from perfed.flower.protocol import NOTICE, Envelope, Header, Refused, check_answer, new_task
from perfed.flower.settings import CoordinatorOptions
from perfed.flower.site import SPLIT_PARTS

Say = Callable[[str], None]
MOST = 10**12  # samples that a site may say it has
WIDEST = 10**7  # features that its network may give
SHORT = 8  # characters of a site's name: the rest is its secret
LONGEST_NAME = 200  # characters of its architecture's name, and of its own
INVITED_AGAIN = 10.0  # seconds after which a node that does not answer is first asked once more
LONGEST_PAUSE = 30.0  # and at most after which
MOST_REFUSED = 20  # nodes that may not join, and why, to be shown


class Unreadable(str):
    """Why an answer that came cannot be read."""


Answer = Envelope | str
"""Or why there is none: nobody knows whose fault that is, but where it is unreadable."""


def was_given(answer: Answer) -> bool:
    """Whether a site has answered, be it nonsense; and not said itself that it cannot."""
    return isinstance(answer, Unreadable) or (isinstance(answer, Envelope) and not answer.refusal)


class Transport(Protocol):
    """What carries envelopes."""

    def nodes(self) -> list[int]:
        """Who is connected."""

    def key(self, node: int) -> str:
        """The fingerprint of its key, as ``ssh-keygen -l`` prints it; empty where it has none."""

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        """Returns a name to ask for the answer with. It is awaited for so many seconds."""

    def receive(self, names: Iterable[str]) -> dict[str, Answer]:
        """What has arrived of these: an answer, or why there will be none."""


@dataclasses.dataclass
class Member:
    """What the coordinator knows of a client that has joined."""

    architecture: str
    sizes: dict[str, int]
    site: str
    """The folder it keeps its state in. Nobody but this site and the coordinator knows it."""
    features: int = 0
    """The width of its network's features, where the algorithm looks at them."""
    key: str = ""
    """Of its node, where sites have keys (``node_keys``)."""

    def is_same(self, other: Member) -> bool:
        """Another one under the same number is another site. A site with a key may lose its folder
        and keep its number; one without a key comes as a new node whenever it is started."""
        return self.key == other.key if self.key and other.key else self.site == other.site

    @property
    def name(self) -> str:
        """To tell it from another one."""
        return self.key or self.site[:SHORT]

    def __str__(self) -> str:
        return f"{'key' if self.key else 'site'} {self.name}"


@dataclasses.dataclass
class _Asked:
    """How a node was asked to join."""

    tasks: dict[str, Header]
    """The invitations that may still be answered, by what the transport calls them."""
    again: float
    """When it is asked again."""
    pause: float = INVITED_AGAIN
    """And how long after that once more."""


_NEVER = _Asked({}, -float("inf"))


class Membership:
    """Which node is which client. A node is asked to join when it is first seen, and again after
    it was left out of a round. Where it does not answer, which it cannot when it is just being
    started again, it is asked once more after ten seconds, and then at least every half minute,
    whatever the round is doing: a site that was away is soon there. What it did not fetch is
    forgotten meanwhile, so one that is slow is not buried in invitations."""

    def __init__(
        self, transport: Transport, invitation: Envelope, options: CoordinatorOptions, say: Say
    ) -> None:
        self.members: dict[int, Member] = {}
        self.numbers: dict[int, Numbers] = {}
        """The newest evaluation of each client that told its own."""
        self.admit: Callable[[Member], None] = lambda member: None
        """Raises PerfedError where the server cannot serve a client."""
        self.has_trained: Callable[[int], bool] = lambda client: False
        self.is_released: Callable[[int, str], bool] = lambda client, name: False
        """Whether somebody has said that this number is for the site of that name from now on."""
        self.changed: Callable[[], None] = lambda: None
        self.seen: dict[int, float] = {}
        """When each client was last connected, in seconds since 1970."""
        self.kept_out: dict[str, str] = {}
        """Who may not join, and why."""
        self._transport = transport
        self._invitation = invitation
        self._options = options
        self._say = say
        self._node_of: dict[int, int] = {}
        self._asked: dict[int, _Asked] = {}
        self._was: dict[int, int] = {}  # node → the client that it was when it was last there
        self._connected: set[int] = set()

    def look(self) -> None:
        """See who is connected, take in who has answered, and invite whoever has not joined."""
        self._connected = set(self._transport.nodes())
        self._node_of = {c: n for c, n in self._node_of.items() if n in self._connected}
        self.seen |= dict.fromkeys(self._node_of, time.time())
        waiting = {name: node for node, asked in self._asked.items() for name in asked.tasks}
        for name, answer in self._transport.receive(waiting).items() if waiting else ():
            node = waiting[name]
            task = self._asked.get(node, _NEVER).tasks.get(name)
            if task is None:  # several invitations were answered at once
                continue
            self._asked[node] = _Asked({}, time.monotonic() + self._options.deadline)
            try:
                self._take_in(node, task, answer)
            except PerfedError as error:
                self._say(f"{self._name(node)} may not join: {error}")
                self.kept_out[self._name(node)] = str(error)
                for name in list(self.kept_out)[:-MOST_REFUSED]:
                    del self.kept_out[name]
                if was_given(answer):
                    self._tell(node, str(error))
        for node in self._connected - set(self._node_of.values()):
            if time.monotonic() >= self._asked.get(node, _NEVER).again:
                self._invite(node)

    def _invite(self, node: int) -> None:
        deadline = self._options.deadline
        asked = self._asked.setdefault(node, _Asked({}, 0.0))
        invitation = dataclasses.replace(self._invitation, header=new_task(self._invitation.header))
        asked.pause = min(asked.pause, deadline)
        try:
            name = self._transport.send(node, invitation, asked.pause)
            asked.tasks[name] = invitation.header
        except PerfedError as error:
            self._say(f"{self._name(node)} cannot be asked to join: {error}")
        # One that was fetched may be answered for as long as a round takes.
        for old in list(asked.tasks)[: -1 - math.ceil(deadline / asked.pause)]:
            del asked.tasks[old]
        asked.again = time.monotonic() + asked.pause
        asked.pause = min(2 * asked.pause, LONGEST_PAUSE)

    def _tell(self, node: int, reason: str) -> None:
        """A site would not know why nothing comes. What it says to that does not matter."""
        header = new_task(dataclasses.replace(self._invitation.header, kind=NOTICE))
        with contextlib.suppress(PerfedError):
            notice = Envelope(header, facts={"reason": reason})
            self._transport.send(node, notice, self._options.deadline)

    def _name(self, node: int) -> str:
        """A node's number is Flower's alone: with keys, the key's name is said, too."""
        client = self._was.get(node)
        if client is not None:
            return f"client {client} (node {node})"
        key = self._transport.key(node) if self._options.node_keys else ""
        return f"node {node}{f' with the key {key}' if key else ''}"

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

    def _take_in(self, node: int, task: Header, answer: Answer) -> None:
        if isinstance(answer, str):
            raise Refused(answer)
        check_answer(task, answer)
        client, member, numbers = introduction(answer.facts, self._options.experiment.clients)
        if self._options.node_keys:
            member = dataclasses.replace(member, key=self._transport.key(node))
        self._forget_other_numbers(member, client)
        before = self.members.get(client)
        if before is not None and not before.is_same(member):
            if not self.is_released(client, member.name):
                raise Refused(
                    f"client {client} is another site already, {before}: give this one, {member}, "
                    f"its own number, or this one's with 'perfed federation release "
                    f"COORDINATOR.YAML {client} {member.name}'"
                )
            self._say(f"client {client} was {before}, and is {member} from now on")
            self._forget(client)
            before = None
        if before is not None and before.architecture != member.architecture:
            raise Refused(
                f"client {client} came with '{before.architecture}' before, "
                f"now with '{member.architecture}'"
            )
        if before is not None and before.sizes != member.sizes and self.has_trained(client):
            raise Refused(
                f"client {client} has trained with {before.sizes} samples, "
                f"and comes with {member.sizes}: what it told first counts"
            )
        self.admit(member)
        self.members[client] = member
        self._node_of[client] = node
        self.kept_out.pop(self._name(node), None)
        self._was[node] = client
        self.kept_out.pop(self._name(node), None)
        self.seen[client] = time.time()
        self._asked.pop(node, None)
        if numbers:
            self.numbers[client] = numbers
        self._say(
            f"client {client} is there: {member.architecture}, {member.sizes['train']} samples"
        )
        self.changed()

    def _forget_other_numbers(self, member: Member, client: int) -> None:
        """A site that came with a wrong number, and has done nothing under it, gives it back. One
        that has trained keeps its number: it cannot have two."""
        for other, known in list(self.members.items()):
            if other != client and known.is_same(member):
                if self.has_trained(other):
                    raise Refused(f"{member} has trained as client {other}: it keeps that number")
                self._forget(other)

    def _forget(self, client: int) -> None:
        del self.members[client]
        self._node_of.pop(client, None)
        self.numbers.pop(client, None)


def introduction(facts: Mapping[str, Any], clients: int) -> tuple[int, Member, Numbers]:
    """What a site says of itself on joining. It may run other code than this: nothing is taken
    for granted."""
    try:
        client, sizes = int(facts["client"]), {p: int(facts["sizes"][p]) for p in SPLIT_PARTS}
        features = int(facts.get("features", 0))
        member = Member(str(facts["architecture"]), sizes, str(facts["site"]), features)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Refused("it does not say who it is") from None
    for what, name in (("architecture's name", member.architecture), ("name", member.site)):
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise Refused(f"its {what}, {name[:LONGEST_NAME]!a}, is no short text")
    if not 0 <= client < clients or not 1 <= min(sizes.values()) <= max(sizes.values()) <= MOST:
        raise Refused(f"client {client} with {sizes} samples: there is no such client")
    if not 0 <= member.features <= WIDEST:
        raise Refused(f"{member.features} features: no network gives so many")
    return client, member, checked_numbers(facts) if "numbers" in facts else {}
