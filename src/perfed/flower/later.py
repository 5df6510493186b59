"""A site that comes when the federation is over.

The coordinator writes a *handout*: what its server would send to a client that it has never heard
of, as the algorithm's broadcast declares it, and the plan. Nothing else of the server's state is in
it. The site trains with it as in rounds of the federation. Nothing leaves the site.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfed.core import tensorfile
from perfed.core.algorithm import ClientInfo
from perfed.core.declaration import networks
from perfed.core.errors import ConfigError, RunError
from perfed.core.message import Message
from perfed.core.own_code import running
from perfed.core.tree import unflatten
from perfed.flower.coordinator import SERVER, FederatedRun
from perfed.flower.ledger import TOLD
from perfed.flower.plan import plan_hash
from perfed.flower.protocol import (
    EVALUATE,
    ROUND,
    Envelope,
    Header,
    check_same_protocol,
    check_same_public_set,
)
from perfed.flower.settings import read_coordinator
from perfed.flower.site import Site
from perfed.runs.directory import RunDirectory

DOWN, EVALUATION = "down/", "evaluation/"
SUFFIX = "+later"  # of the folder at the site: it may have been there earlier


@dataclass(frozen=True)
class Handout:
    """What a later site gets."""

    header: Header
    client: int
    """By whose number what crosses was encoded: one that no client had."""
    plan: Mapping[str, Any]
    down: Message
    evaluation: Message

    def save(self, path: Path) -> None:
        arrays = {DOWN + name: tensor for name, tensor in self.down.arrays.items()}
        arrays |= {EVALUATION + name: t for name, t in self.evaluation.arrays.items()}
        about = dataclasses.asdict(self.header) | {"client": self.client, "plan": self.plan}
        tensorfile.write_atomically(path, tensorfile.sealed(arrays, json.dumps(about))[0])

    @classmethod
    def load(cls, path: Path) -> Handout:
        arrays, about = tensorfile.load_described(path)
        try:
            values = json.loads(about)
            client, plan = int(values.pop("client")), values.pop("plan")
            header = Header(**values)
            if not isinstance(header.run, str) or type(header.round) is not int or client < 0:
                raise ValueError("it names no run")
            down, evaluation = (
                Message.from_arrays({n.removeprefix(p): t for n, t in arrays.items() if _is(n, p)})
                for p in (DOWN, EVALUATION)
            )
        except (AttributeError, RecursionError, *tensorfile.MALFORMED) as error:
            raise RunError(
                f"{path} is no handout ('perfed federation handout' writes one): {error}"
            ) from None
        return cls(header, client, plan, down, evaluation)


def _is(name: str, part: str) -> bool:
    return name.startswith(part)


class _Nobody:
    """The sites of a federation that is over."""

    def nodes(self) -> list[int]:
        return []

    def key(self, node: int) -> str:
        return ""

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        raise RunError("the federation is over")

    def receive(self, names: Any) -> dict[str, Any]:
        return {}


def handout(path: Path, architecture: str, samples: int) -> Handout:
    """What the server of a coordinator's finished run would send to a newcomer."""
    options = read_coordinator(path)
    folder = path.absolute().parent / options.directory
    directory = RunDirectory.open(folder)
    if not (folder / SERVER).is_file():
        why = "an earlier version did not keep it" if directory.finished else "it is not finished"
        raise RunError(f"{folder} has no {SERVER}, what the server knows at the end: {why}")
    with chdir(path.absolute().parent):
        run = FederatedRun(options, directory, _Nobody(), say=lambda line: None)
    run._open(directory)
    state = unflatten(tensorfile.load(folder / SERVER))
    algorithm, client, round = run.algorithm, options.experiment.clients, options.experiment.rounds
    known = [*run.server(round).architectures]
    sent = algorithm.messages()
    if networks(sent.down or {}) or networks(sent.evaluation or {}):
        if not architecture and len(known) > 1:
            raise ConfigError(
                f"missing: '{algorithm.registered_name}' sends weights, and there are several "
                f"networks: {', '.join(known)}",
                "--architecture",
            )
        architecture = architecture or known[0]
        if architecture not in known:
            raise ConfigError(f"'{architecture}' is none of {', '.join(known)}", "--architecture")
    info = ClientInfo(client, architecture or known[0], samples)
    with running(algorithm, "broadcast"):
        down = algorithm.broadcast(run.server(round), state, info)
    with running(algorithm, "evaluation_message"):
        evaluation = algorithm.evaluation_message(run.server(round), state, info)
    header = Header(ROUND, run.run, round, run.public)
    plan = dataclasses.replace(options.plan(), clients=client + 1).to_mapping()
    return Handout(header, client, plan, down, evaluation)


def learn(site: Site, given: Handout, rounds: int | None) -> None:
    """Train this site's model with what a server knew at the end. Killed, it goes on where it
    was."""
    with chdir(site.folder), site.alone_here():
        check_same_protocol(given.header, "the coordinator")
        check_same_public_set(given.header, site.public, "the coordinator")
        for message in (given.down, given.evaluation):
            site.options.agrees.check_size(message, "in")
        plan = site.agreed(given.plan)
        for fault in site.options.plan_faults(plan, len(site.samples.public_x) > 0):
            raise RunError(fault)
        rounds = plan.rounds if rounds is None else rounds
        if rounds > plan.rounds:
            raise ConfigError(f"{rounds} rounds, the plan has {plan.rounds}", "--rounds")
        run = given.header.run + SUFFIX
        why = f"a handout, plan {plan_hash(given.plan)[:12]}; nothing leaves"
        site.ledger.add(TOLD, kind=ROUND, run=run, round=rounds - 1, why=why)
        site.write_plan(Envelope(Header(ROUND, run, -1, site.public)), plan)
        plan = dataclasses.replace(plan, wire=())  # a handout is a file, which needs no codes
        for round in range(rounds):
            site.train_round(Envelope(Header(ROUND, run, round, site.public), given.down), plan)
        header = Header(EVALUATE, run, rounds - 1, site.public)
        site.evaluate_round(Envelope(header, given.evaluation), plan)
