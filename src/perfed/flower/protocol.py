"""What crosses between the coordinator and a site, and the checks that both sides make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from hmac import compare_digest
from secrets import token_hex
from typing import Any

import numpy as np

from perfed.core.errors import Refused as Refused
from perfed.core.errors import one_line as one_line
from perfed.core.message import Message

PROTOCOL = 5
"""Raised whenever the two sides would no longer understand each other."""

JOIN, FIRST, ROUND, EVALUATE = "join", "first", "round", "evaluate"
NOTICE = "notice"  # not a task: why a site may not join


@dataclass(frozen=True)
class Header:
    """What every task and every answer says about itself."""

    kind: str
    run: str
    """The run's id: its name and a part that no other run has."""
    round: int
    public: str
    """The hash of the public set."""
    protocol: int = PROTOCOL
    task: str = ""
    """A secret between the coordinator and the node that was asked: Flower lets any site write an
    answer in the name of another one whose message it can guess."""


@dataclass(frozen=True)
class Envelope:
    """A task, or the answer to one: an algorithm's message, and small facts about it."""

    header: Header
    message: Message = field(default_factory=Message)
    facts: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""
    """Why there is no answer."""

    def answer(self, message: Message, facts: Mapping[str, Any]) -> Envelope:
        return Envelope(self.header, message, facts)

    def refuse(self, reason: str) -> Envelope:
        return Envelope(self.header, refusal=reason)


def check_same_protocol(theirs: Header, who: str) -> None:
    if theirs.protocol != PROTOCOL:
        raise Refused(
            f"{who} speaks version {theirs.protocol} of the protocol, this side {PROTOCOL}: "
            "install the same version of perfed on both"
        )


def check_same_public_set(theirs: Header, ours: str, who: str) -> None:
    if theirs.public != ours:
        raise Refused(f"the public set of {who} is {theirs.public}, the one here is {ours}")


def check_kind(task: Header) -> None:
    """That it is a task, in a round that there can be."""
    first = {JOIN: -1, NOTICE: -1, FIRST: -1, ROUND: 0, EVALUATE: -1}
    last = {JOIN: -1, NOTICE: -1, FIRST: -1}
    if task.kind not in first:
        raise Refused(f"'{task.kind}' is no task")
    if task.round < first[task.kind] or task.round > last.get(task.kind, task.round):
        raise Refused(f"there is no '{task.kind}' in round {task.round}")


def check_answer(task: Header, answer: Envelope) -> None:
    """That an answer is the one to this task; raises Refused."""
    check_same_protocol(answer.header, "the site")
    if answer.refusal:
        raise Refused(answer.refusal)
    check_same_public_set(answer.header, task.public, "the site")
    if replace(answer.header, task=task.task) != task:
        got, asked = answer.header, task
        raise Refused(
            f"an answer to '{got.kind}' of round {got.round} of {got.run}, "
            f"not to '{asked.kind}' of round {asked.round} of {asked.run}"
        )
    if not compare_digest(answer.header.task.encode("utf-8", "replace"), task.task.encode()):
        raise Refused("an answer that does not know the task's secret: another site's")


def new_task(header: Header) -> Header:
    """The same, for one node alone."""
    return replace(header, task=token_hex(16))


def public_hash(public_x: np.ndarray) -> str:
    """What two sites compare instead of their public sets: shape, type and every byte."""
    content = blake2b(f"{public_x.dtype.str}{public_x.shape}".encode(), digest_size=16)
    content.update(np.ascontiguousarray(public_x).tobytes())
    return content.hexdigest()
