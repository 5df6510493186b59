"""What engines have in common whose clients live in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from perfed.core.message import Message
from perfed.core.tree import find_not_finite
from perfed.engines.base import Call, ClientRecord, Job, Outcome
from perfed.engines.population import Population, changed_records
from perfed.engines.precision import FLOAT32, Precision

EVALUATED_AT_ONCE = 256
"""Clients whose logits are in memory at once."""


class LocalEngine:
    """Turns calls into jobs; a subclass says how those are performed."""

    name = "local"

    def __init__(self, precision: Precision = FLOAT32) -> None:
        self.precision = precision

    def expect(self, population: Population, clients_a_round: int) -> None:
        """Make ready for a population of which so many clients train in a round."""

    def perform_jobs(self, jobs: Sequence[Job]) -> list[Any]:
        """What each job's work returned."""
        raise NotImplementedError

    def perform(self, calls: Sequence[Call]) -> list[Any]:
        """What each call gives. Evaluations hold the logits of all their clients at once, so they
        come in parts where these are many."""
        if any(c.method == "evaluate" and len(c.messages) > EVALUATED_AT_ONCE for c in calls):
            return [self._performed_alone(call) for call in calls]
        return self._perform_at_once(calls)

    def _performed_alone(self, call: Call) -> Any:
        if call.method == "evaluate":
            return self._evaluated_in_parts(call)
        (given,) = self._perform_at_once([call])
        return given

    def _evaluated_in_parts(self, call: Call) -> Any:
        clients = list(call.messages)
        parts = []
        for start in range(0, len(clients), EVALUATED_AT_ONCE):
            few = {k: call.messages[k] for k in clients[start : start + EVALUATED_AT_ONCE]}
            parts += self._perform_at_once([dataclasses.replace(call, messages=few)])
        return {
            kind: {name: np.concatenate([part[kind][name] for part in parts]) for name in columns}
            for kind, columns in parts[0].items()
        }

    def _perform_at_once(self, calls: Sequence[Call]) -> list[Any]:
        """The jobs of all calls as one, and what each call gives."""
        jobs = [call.population.jobs(call) for call in calls]
        returned = iter(self.perform_jobs([job for each in jobs for job in each]))
        return [
            _finished(call, each, [next(returned) for _ in each])
            for call, each in zip(calls, jobs, strict=True)
        ]

    def commit(self, population: Population) -> None:
        population.commit(population.pending)
        population.pending = {}

    def collect(self, population: Population) -> None:
        """They are there already."""

    def facts(self) -> dict[str, Any]:
        return {"engine": self.name, "precision": self.precision.name}

    def close(self) -> None:
        """Nothing to give back."""


def _finished(call: Call, jobs: Sequence[Job], returned: list[Any]) -> Any:
    if call.method == "evaluate":
        return call.population.measured(call.messages, returned)
    if call.method == "models":
        return dict(zip(call.messages, returned, strict=True))
    records = changed_records(jobs)
    if call.method == "client_round":
        call.population.pending = records
    return outcomes(jobs, records, returned)


def outcomes(
    jobs: Sequence[Job], records: Mapping[int, ClientRecord], replies: Sequence[Message | None]
) -> dict[int, Outcome]:
    made: dict[tuple[int, str], list[tuple[str, Tensor]]] = {}
    for job, reply in zip(jobs, replies, strict=True):
        client = job.client.id
        kept = records[client].weights if client in records else ()
        made[client, "model"] = [named for part in kept for named in part.items()]
        made[client, "reply"] = [*reply.arrays.items()] if reply else []
    broken = _broken(made)
    return {
        job.client.id: Outcome(
            reply,
            job.client.id in records,
            job.client.facts(),
            broken.get((job.client.id, "model")),
            broken.get((job.client.id, "reply")),
        )
        for job, reply in zip(jobs, replies, strict=True)
    }


def _broken(
    made: Mapping[tuple[int, str], Sequence[tuple[str, Tensor]]],
) -> dict[tuple[int, str], str]:
    """Of each that is not finite, the name of its first such tensor. Mostly none is, which a
    single look at all of them tells."""
    if find_not_finite(made) is None:
        return {}
    found = (find_not_finite({owner: tensors}) for owner, tensors in made.items())
    return {one[0]: one[1] for one in found if one is not None}
