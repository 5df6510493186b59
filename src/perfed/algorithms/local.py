"""Local training: every client on its own, nothing crosses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perfed.core.algorithm import Algorithm, Client, algorithms, supervised
from perfed.core.declaration import Messages
from perfed.core.message import Message
from perfed.core.schema import option


@algorithms.register("local")
@dataclass(frozen=True)
class Local(Algorithm):
    """Local training: every client on its own, nothing crosses.

    The paper's local row is the same for every participation, so there every client trains.
    """

    sends = "nothing"
    learns_from_others = False
    reference = True

    participation: Literal["all", "selected"] = option(
        "all", "who trains in a round: all clients (as in the paper), or only those selected"
    )

    def trains_everyone(self) -> bool:
        return self.participation == "all"

    def messages(self) -> Messages:
        return Messages(up={}, down={}, evaluation={})

    def client_round(self, client: Client, message: Message) -> Message:
        client.weights = client.sgd(client.weights, supervised)
        return Message()
