"""Majority: predict the client's most frequent training label, without looking at the input.

Under label skew this scores high. It is the floor that tells how much of an accuracy is learning.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfed.core.algorithm import Algorithm, ClassPrior, Client, Predictor, algorithms
from perfed.core.declaration import Messages
from perfed.core.message import Message


@algorithms.register("majority")
@dataclass(frozen=True)
class Majority(Algorithm):
    sends = "nothing"
    learns_from_others = False

    def messages(self) -> Messages:
        return Messages(up={}, down={}, evaluation={})

    def client_round(self, client: Client, message: Message) -> Message:
        return Message()

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        # Laplace's rule keeps the log-loss finite and does not move the argmax.
        return {"personal": ClassPrior((client.label_counts() + 1.0).log())}
