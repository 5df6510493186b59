"""The wire: what happens to a message between who wrote it and who reads it.

A *link* is a list of stages. A stage has two halves: who sends runs ``send``, who receives runs
``receive``, in the opposite order. Simulation, Ray workers and sites run the same halves. A codec
is a stage::

    @stages.register("half")
    @dataclass(frozen=True)
    class Half(Stage):
        exact = False

        def send(self, message, at, state):
            return cast(message, torch.float16), state

        def receive(self, message, at, state):
            return cast(message, torch.float32), state

    def cast(message, dtype):
        arrays = message.arrays.items()
        return Message.from_arrays(
            {name: t.to(dtype) if t.is_floating_point() else t for name, t in arrays}
        )

An experiment names its stages, ``wire: [half]`` or ``wire: [my_file.py:Half]``.

What a stage may rely on, and what it must do:

* It sees whole messages (:class:`~perfed.core.message.Message`), never an empty one.
* Its random numbers come from ``at.random``: neither the order of execution nor the engine nor a
  resume moves them.
* Its state is a tree of tensors, one for each client, direction and end of the link. It is kept
  with the client, and with the run at the server, and it is in the checkpoint. The opening (round
  −1) and evaluations neither have state nor leave any.
* An answer can be lost on the way. Then the client's state has moved on and the server's has not.
  A stage that needs both to agree must find out by itself, and refuse or begin anew: the server
  can acknowledge what it has received last (``at.other``).
* What ``receive`` gives must again be what the algorithm has declared: names, shapes and types.
  Where the numbers are not those that were sent (noise, rounding), ``exact`` is False, and the link
  then brings them back to the nearest ones in their declared range. So ``merge`` gets probabilities
  where probabilities are declared, also from noisy ones. Admission then cannot refuse a row that
  sums to 1,000: it becomes the nearest probabilities, and is used.
* ``receive`` gets what somebody else has made. It checks every shape before it computes with it: a
  small message must not become a large one. It may raise
  :class:`~perfed.core.errors.Refused`; any other error in it counts as that. A refusal is final for
  a stage whose two ends must agree, unless the stage itself begins anew.

The server's half ends with admission: :func:`perfed.core.admission.refusals`.

Up to here each message is alone. A stage may also have a ``gather``: one step of the server over
all that was admitted in a round, before ``merge``. It sees replies, with what is known of each
client and how much it counts, and gives replies: fewer, or others. So a method that takes a mean
takes a robust one (``algorithms/robust.py``). Stages gather in the order of the list. The state of
a gathering is one tree for all clients, at the server. A stage that does nothing else has no
``directions``, and sites need not know of it. ``check`` refuses methods that a stage does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from torch import Tensor

from perfed.core.admission import nearest
from perfed.core.declaration import Entries, Known
from perfed.core.errors import PerfedError, Refused
from perfed.core.message import Message
from perfed.core.registry import Component, Registry
from perfed.core.streams import numpy_stream
from perfed.core.tree import Tree

if TYPE_CHECKING:
    from perfed.core.algorithm import Algorithm, Reply

Direction = Literal["up", "down", "evaluation"]
"""Up is to the server. What is sent for an evaluation takes the way down, with its own numbers."""
TOGETHER = "together"  # in the place of a client's name, where the server keeps states


@dataclass(frozen=True)
class At:
    """Where on the wire something happens."""

    seed: int
    client: int
    round: int
    direction: Direction
    stage: int
    """Which stage of the link, from 0."""
    declared: Entries | None = None
    """What the algorithm has declared of this message."""
    known: Known | None = None
    """What is known of the client at this end: how many public samples and classes there are, and
    what the client was sent in this round."""
    other: Tree = field(default_factory=dict)
    """The state that this end keeps of the same stage for the other direction: what was received
    last can so be acknowledged with what is sent."""

    def random(self, purpose: str = "") -> np.random.Generator:
        """A stream for this place alone, one for each purpose (an array's name, say)."""
        name = f"wire/{self.direction}/{self.stage}/{purpose}"
        return numpy_stream(self.seed, name, self.client, self.round)


@dataclass(frozen=True)
class Together:
    """Where all clients' messages of a round are gathered."""

    seed: int
    round: int
    stage: int
    """Which stage of the link, from 0."""
    declared: Entries | None
    """What clients send."""
    takes_mean: bool
    """Whether the method merges by a mean of messages."""

    def random(self, purpose: str = "") -> np.random.Generator:
        """A stream for this place alone, one for each purpose."""
        name = f"wire/together/{self.stage}/{purpose}"
        return numpy_stream(self.seed, name, round=self.round)


class Stage(Component):
    """One step between an algorithm and the network; see the module's docstring."""

    registry: ClassVar[Registry[Stage]]
    directions: ClassVar[tuple[Literal["up", "down"], ...]] = ("up",)
    exact: ClassVar[bool] = True
    """Whether ``receive`` gives back, to the bit, what ``send`` was given."""
    codes: ClassVar[bool] = False
    """Whether ``send`` leaves a code, of which nobody else can use the numbers: on a link only
    other codes come after it."""

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        """What goes on, and the state this end keeps."""
        return message, state

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        """What the other end's ``send`` was given, and the state this end keeps."""
        return message, state

    def gather(
        self, replies: Sequence[Reply], at: Together, state: Tree
    ) -> tuple[Sequence[Reply], Tree]:
        """What ``merge`` is given of all that was admitted in a round, and the state kept for the
        next. In the opening (round −1) there is no state, and none is kept."""
        return replies, state

    def check(self, algorithm: Algorithm) -> None:
        """Raise ConfigError where this stage makes no sense with an algorithm."""


stages: Registry[Stage] = Registry("stage")
Stage.registry = stages


@dataclass(frozen=True)
class Link:
    """The stages between the server and each client, as both ends run them.

    State, at either end, is a tree by direction and number of the stage.
    """

    stages: tuple[Stage, ...] = ()
    seed: int = 0

    def send(
        self,
        message: Message,
        client: int,
        round: int,
        direction: Direction,
        state: Tree,
        declared: Entries | None = None,
        known: Known | None = None,
    ) -> tuple[Message, Tree]:
        """What crosses, and the state of this end afterwards."""
        if not message.arrays:  # nothing is sent
            return message, state
        for number, stage in self._serving(direction):
            at = self._at(client, round, direction, number, declared, known, state)
            made, kept = stage.send(message, at, _state_of(state, at))
            message, state = _beside(message, made), _with_state(state, at, kept)
        return message, state

    def receive(
        self,
        message: Message,
        client: int,
        round: int,
        direction: Direction,
        state: Tree,
        declared: Entries | None,
        known: Known | None = None,
    ) -> tuple[Message, Tree]:
        """What was sent, and the state of this end afterwards; raises Refused."""
        serving = self._serving(direction)
        if not message.arrays or not serving:
            return message, state
        for number, stage in reversed(serving):
            at = self._at(client, round, direction, number, declared, known, state)
            try:
                made, kept = stage.receive(message, at, _state_of(state, at))
            except PerfedError as error:
                raise Refused(str(error)) from error
            except Exception as error:  # whatever a stage can stumble over in odd arrays
                what = f"{type(error).__name__}: {error}".partition("\n")[0]
                name = stage.registered_name or type(stage).__name__
                raise Refused(f"stage '{name}' cannot read it: {what[:200]!a}") from error
            message, state = _beside(message, made), _with_state(state, at, kept)
        if not all(stage.exact for _, stage in serving):
            message = nearest(message, declared)
        return message, state

    def gather(
        self,
        replies: Sequence[Reply],
        round: int,
        state: Tree,
        declared: Entries | None,
        takes_mean: bool = False,
    ) -> tuple[Sequence[Reply], Tree]:
        """What ``merge`` is given, and the state of all clients afterwards."""
        for number, stage in enumerate(self.stages):
            if type(stage).gather is Stage.gather:
                continue
            together: Tree = state.get(TOGETHER, {}) if round >= 0 else {}
            before = {id(reply.message) for reply in replies}
            at = Together(self.seed, round, number, declared, takes_mean)
            replies, kept = stage.gather(replies, at, together.get(str(number), {}))
            replies = [
                reply
                if id(reply.message) in before
                else replace(reply, message=nearest(reply.message, declared))
                for reply in replies
            ]
            if round >= 0 and kept:
                state = state | {TOGETHER: together | {str(number): kept}}
        return replies, state

    def _at(
        self,
        client: int,
        round: int,
        direction: Direction,
        stage: int,
        declared: Entries | None,
        known: Known | None,
        state: Tree,
    ) -> At:
        other = state.get("down" if direction == "up" else "up", {}).get(str(stage), {})
        return At(self.seed, client, round, direction, stage, declared, known, other)

    def _serving(self, direction: Direction) -> list[tuple[int, Stage]]:
        way = "up" if direction == "up" else "down"
        return [(n, stage) for n, stage in enumerate(self.stages) if way in stage.directions]


def _beside(given: Message, made: Message) -> Message:
    """What a stage made, on the device of what it was given: it may have computed elsewhere.
    Numbers stay where they are, for they may meet tensors of any device."""
    if not given.arrays:
        return made
    device = max(given.arrays.values(), key=Tensor.numel).device
    return Message.from_arrays({n: t.to(device) if t.dim() else t for n, t in made.arrays.items()})


def _state_of(state: Tree, at: At) -> Tree:
    if not _is_kept(at):
        return {}
    kept: Tree = state.get(at.direction, {}).get(str(at.stage), {})
    return kept


def _with_state(state: Tree, at: At, kept: Tree) -> Tree:
    """A new tree; the old one stays as it was, and is itself returned where nothing changes."""
    if not _is_kept(at) or (not kept and not _state_of(state, at)):
        return state
    return state | {at.direction: state.get(at.direction, {}) | {str(at.stage): kept}}


def _is_kept(at: At) -> bool:
    return at.direction != "evaluation" and at.round >= 0
