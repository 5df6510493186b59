"""A site: what it does with a task, and what it keeps on its own disk.

Every task may find another process here, so nothing lives in memory. The folder ``state`` has

    site.json                    who this is, so that two sites cannot go by one number
    approved.json, waiting.json  which plans somebody here has approved (:mod:`.approval`)
    ledger.jsonl, ledger.head    what was asked, what left, what was refused (:mod:`.ledger`)
    privacy.json                 what hides samples here, and what that has cost (:mod:`.purse`)
    <run>/plan.json              what the coordinator said when this site joined
    <run>/checkpoint.safetensors the model, the algorithm's state, the last round and its answer
    <run>/personal.safetensors   the model to use, as last evaluated (``perfed predict``)
    <run>/alone.safetensors      the one of the copy that trains without the federation
    <run>/report.jsonl           a line per evaluated round: with the federation, and alone

A checkpoint is one file, replaced atomically: killed at any moment, a site has done a round or has
not. A round that it has done is not trained again; it is answered from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from perfed.config import Training, check_private
from perfed.core import locks, tensorfile
from perfed.core.accounting import composed, epsilon
from perfed.core.algorithm import Algorithm, Client, reference_algorithm
from perfed.core.errors import ConfigError, Diverged, PerfedError, RunError
from perfed.core.message import Message
from perfed.core.threads import cpu_threads
from perfed.core.tree import flatten, unflatten
from perfed.core.wire import Link
from perfed.data import ClientSplit, Federation
from perfed.data.needs import needs_of
from perfed.engines import ClientRecord, Execution, Outcome, Population, SequentialEngine
from perfed.engines.base import Method
from perfed.engines.execution import fitting_threads
from perfed.engines.speaker import as_it_was_at_home
from perfed.flower.approval import Approvals
from perfed.flower.ledger import ASKED, LEFT, REFUSED, TOLD, Ledger, described
from perfed.flower.numbers import Numbers
from perfed.flower.plan import Plan, plan_hash, read_json
from perfed.flower.protocol import (
    EVALUATE,
    FIRST,
    JOIN,
    NOTICE,
    Envelope,
    Refused,
    check_kind,
    check_same_protocol,
    check_same_public_set,
    one_line,
    public_hash,
)
from perfed.flower.purse import Purse
from perfed.flower.saying import append
from perfed.flower.settings import SiteOptions, read_site
from perfed.models import Models, parameter_count
from perfed.runs.coordinator import check_finite, diverged
from perfed.runs.model_file import Blueprint
from perfed.runs.result import headline

SPLIT_PARTS = ("train", "validation", "test")
CHECKPOINT, REPORT, PLAN = "checkpoint.safetensors", "report.jsonl", "plan.json"
PERSONAL, ALONE = "personal.safetensors", "alone.safetensors"
IDLE_RUNS = 10
"""How many runs that it never trained in a site remembers."""
BEFORE_ALL = -2  # the last round of a site that has done none; the opening is −1


class Model(NamedTuple):
    """A model as a file holds it."""

    tensors: Mapping[str, Tensor]
    blueprint: Blueprint | None = None

    def write(self, path: Path) -> None:
        if self.blueprint is not None:
            content, _ = tensorfile.sealed(self.tensors, self.blueprint.text())
            tensorfile.write_atomically(path, content)


NO_MODEL = Model({})


@dataclass
class Checkpoint:
    """What a site has after its last round."""

    round: int = BEFORE_ALL
    record: ClientRecord | None = None
    alone: ClientRecord | None = None
    answer: Message = field(default_factory=Message)
    facts: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        tree: dict[str, Any] = {}
        for name, record in (("own", self.record), ("alone", self.alone)):
            if record is not None:
                tree[name] = record.tree()
        answer = {f"answer/{name}": tensor for name, tensor in self.answer.arrays.items()}
        about = json.dumps({"round": self.round, "facts": self.facts})
        content, _ = tensorfile.sealed(flatten(tree) | answer, about)
        tensorfile.write_atomically(path, content)

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Checkpoint:
        if not path.is_file():
            return cls()
        try:
            tensors, about = cls._read(path.read_bytes())
            round, facts = int(about["round"]), dict(about["facts"])
        except tensorfile.MALFORMED as error:
            raise RunError(
                f"{path} is corrupt: {error}; 'perfed site restore' puts a backup in its place, or "
                "move the file away, and this site begins the run anew"
            ) from None
        answer = {
            name.removeprefix("answer/"): tensor
            for name, tensor in tensors.items()
            if name.startswith("answer/")
        }
        tree = unflatten(
            {n: t.to(device) for n, t in tensors.items() if not n.startswith("answer/")}
        )
        records = {name: ClientRecord.from_tree(held) for name, held in tree.items()}
        own, alone = records.get("own"), records.get("alone")
        return cls(round, own, alone, Message.from_arrays(answer), facts)

    @staticmethod
    def _read(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Older ones have no checksum, and their words one by one."""
        tensors, text = tensorfile.unsealed(data)
        if text:
            about: dict[str, Any] = json.loads(text)
            return tensors, about
        _, words = tensorfile.decode(data)
        return tensors, words | {"facts": json.loads(words["facts"])}

    @staticmethod
    def trained(path: Path) -> bool:
        """Whether there is a round in it; the header says so. What cannot be read counts as one:
        it is not to be deleted."""
        if not path.is_file():
            return False
        try:
            with open(path, "rb") as file:
                length = min(int.from_bytes(file.read(8), "little"), tensorfile.FILE.header)
                words = json.loads(file.read(length))["__metadata__"]
            about = json.loads(words[tensorfile.ABOUT]) if tensorfile.ABOUT in words else words
            return int(about["round"]) >= 0
        except (OSError, *tensorfile.MALFORMED):
            return True


def is_run_id(text: str) -> bool:
    """Whether it can name a folder of this site's."""
    return re.fullmatch(r"[\w+=-][\w.+=-]{0,139}", text) is not None


def may_go_on(begun: Plan, plan: Plan) -> bool:
    """Whether a run can go on with this plan, once it is approved: all that its checkpoint depends
    on, which holds a model, the algorithm's state and the optimizer's, is as it was."""
    then, now = begun.training, plan.training
    if (then.optimizer, then.optimizer_state) != (now.optimizer, now.optimizer_state):
        return False
    begun = dataclasses.replace(begun, rounds=plan.rounds, training=now, metrics=plan.metrics)
    return begun == plan


def named(task: Envelope) -> dict[str, Any]:
    """A task, for the ledger."""
    kind, run = one_line(task.header.kind), one_line(task.header.run)
    return {"kind": kind, "run": run, "round": task.header.round}


def refuse(task: Envelope, reason: str, ledger: Ledger, say: Callable[[str], None]) -> Envelope:
    """Tells both sides why there is no answer, and the ledger. A refusal needs no ledger that can
    be written: there is nothing else in it."""
    reason = one_line(reason)
    say(f"refused: {reason}")
    try:
        ledger.add(REFUSED, **named(task), why=reason)
    except PerfedError as error:
        say(str(error))
    return task.refuse(reason)


class _Speaks(Algorithm):
    """What a client says about the public set, before any training."""

    def client_round(self, client: Client, message: Message) -> Message:
        return Message(soft_decisions=client.soft_decisions())


class Site:
    """One site of a federation."""

    def __init__(
        self, options: SiteOptions, folder: Path, say: Callable[[str], None] = print
    ) -> None:
        self.options = options
        self.folder = folder
        """Where relative paths start."""
        self.say = say
        with chdir(folder):
            self.device = Execution(device=options.device).torch_device()
            self.samples, self.split = options.load()
        self.public = public_hash(self.samples.public_x)
        self.state = folder / options.state
        self.ledger = Ledger(self.state)

    @classmethod
    def open(cls, path: Path, say: Callable[[str], None] = print) -> Site:
        return cls(read_site(path), path.absolute().parent, say)

    def answer(self, task: Envelope) -> Envelope:
        """What goes back for a task: the answer, or why there is none."""
        try:
            with chdir(self.folder), self.alone_here():
                self.ledger.add(ASKED, **self._asked(task))
                self._check(task)
                if task.header.kind == NOTICE:
                    return self._hear(task)
                reply = self._join(task) if task.header.kind == JOIN else self._work(task)
                self.options.agrees.check_size(reply.message, "out")
                # Written first: nothing leaves that is not in the ledger.
                self.ledger.add(LEFT, **named(task), **described(reply.message, reply.facts))
                return reply
        except PerfedError as error:
            return refuse(task, str(error), self.ledger, self.say)

    def _hear(self, task: Envelope) -> Envelope:
        reason = one_line(str(task.facts.get("reason", "")))
        self.say(f"the coordinator does not let this site join: {reason}")
        self.ledger.add(TOLD, **named(task), why=reason)
        return task.answer(Message(), {})

    def _asked(self, task: Envelope) -> dict[str, Any]:
        plan = task.facts.get("plan")
        path = self.state / task.header.run / PLAN
        if plan is None and is_run_id(task.header.run) and path.is_file():
            plan = read_json(path)
        what = {"bytes": tensorfile.encoded_size(task.message.arrays)} if task.message else {}
        return named(task) | what | ({} if plan is None else {"plan": plan_hash(plan)})

    # Joining.

    def _join(self, task: Envelope) -> Envelope:
        plan = self.agreed(task.facts.get("plan"))
        options = self.options
        for fault in options.plan_faults(plan, len(self.samples.public_x) > 0):
            raise Refused(fault)
        Approvals(self.state, self.ledger).check(plan, self.agreed)
        self.write_plan(task, plan)
        checkpoint = self._checkpoint(task)
        population = self._population(plan, plan.algorithm, checkpoint.record)
        sizes = {part: len(getattr(self.split, part)) for part in SPLIT_PARTS}
        if options.privacy is not None:  # nobody needs to know the others: one stands for them
            sizes = dict.fromkeys(sizes, 1) | {"train": self._purse().told}
        facts: dict[str, Any] = {
            "client": options.client,
            "site": self._identity(),
            "architecture": population.architectures[options.client],
            "sizes": sizes,
            "features": population.width(population.architectures[options.client]),
            "round": checkpoint.round,
        }
        if not plan.algorithm.evaluated_with_server and options.privacy is None:
            round = max(checkpoint.round, 0)
            facts["numbers"] = self._evaluate(population, round, Message())[0]
        self.say(f"asks to join {task.header.run} as client {options.client}")
        return task.answer(Message(), facts)

    def write_plan(self, task: Envelope, plan: Plan) -> None:
        path = self._run_folder(task) / PLAN
        content = json.dumps(plan.to_mapping(), indent=1)
        # Parsed, so that options that were not there then have their defaults; a plan of perfed's
        # first version did not say how many rounds there are.
        if path.is_file():
            begun = self._read_plan(path, {"rounds": plan.rounds})
            if not may_go_on(begun, plan):
                raise Refused(f"{task.header.run} was begun with another configuration")
        path.parent.mkdir(parents=True, exist_ok=True)
        tensorfile.write_atomically(path, f"{content}\n".encode())
        self._forget_invitations(path)

    def _read_plan(self, path: Path, missing: Mapping[str, Any] | None = None) -> Plan:
        """Measured again by what this site agrees to, which may have become less."""
        values = read_json(path)
        if isinstance(values, dict):
            values = {**(missing or {}), **values}
        return self.agreed(values)

    def agreed(self, plan: Any) -> Plan:
        # Its refusals may name how many steps an epoch has.
        samples = len(self.split.train) if self.options.privacy is None else self._purse().told
        agreed = self.options.agrees.plan(plan, samples)
        if self.options.privacy is not None:
            try:
                check_private(agreed.algorithm, agreed.training)
            except ConfigError as error:
                raise Refused(f"what leaves this site is private: {error}") from None
        return agreed

    def _forget_invitations(self, newest: Path) -> None:
        """Of runs that this site has never trained in, few are kept: whoever invites it a
        thousand times must not fill its disk."""
        idle = [
            plan
            for plan in self.state.glob(f"*/{PLAN}")
            if plan != newest and not Checkpoint.trained(plan.with_name(CHECKPOINT))
        ]
        idle.sort(key=lambda plan: plan.stat().st_mtime_ns)
        for plan in idle[: -(IDLE_RUNS - 1)]:
            for name in (CHECKPOINT, PERSONAL, ALONE, REPORT, plan.name):
                plan.with_name(name).unlink(missing_ok=True)
            with suppress(OSError):  # somebody keeps something else there
                plan.parent.rmdir()

    def _identity(self) -> str:
        """A name of its own for this folder; a copied configuration does not have it."""
        path = self.state / "site.json"
        if not path.is_file():
            tensorfile.write_atomically(path, json.dumps({"site": uuid.uuid4().hex}).encode())
        identity: str = json.loads(path.read_text("utf-8"))["site"]
        return identity

    # Rounds.

    def _work(self, task: Envelope) -> Envelope:
        header, client = task.header, self.options.client
        path = self._run_folder(task) / PLAN
        if not path.is_file():
            raise Refused(f"this site has not joined {header.run}")
        plan = self._read_plan(path)
        if header.round >= plan.rounds:
            raise Refused(f"round {header.round}: this run has {plan.rounds}, from 0")
        before = self._checkpoint(task)
        if header.kind == EVALUATE:
            numbers = self.evaluate_round(task, plan)
            return task.answer(Message(), self._told({"numbers": numbers}))
        population = self._population(plan, plan.algorithm, before.record)
        if before.round == header.round:
            self.say(f"round {header.round} is done already: answered from the checkpoint")
            return task.answer(before.answer, self._told(before.facts))
        if before.round > header.round:
            raise Refused(f"this site has done round {before.round}: round {header.round} is over")
        after = self._train(task, plan, population, before)
        self._save(task, plan, population, after)
        did = "answers the opening" if header.kind == FIRST else "has trained and answers"
        self.say(f"round {header.round}: client {client} {did}")
        return task.answer(after.answer, self._told(after.facts))

    def _told(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What leaves beside a message: how good a model is tells of the samples it is tried on."""
        kept = () if self.options.privacy is None else ("numbers",)
        return {name: fact for name, fact in facts.items() if name not in kept}

    def _purse(self) -> Purse:
        assert self.options.privacy is not None
        return Purse.open(self.state, self.options.privacy, len(self.split.train))

    def rounds_done(self, task: Envelope) -> int:
        """Of the run that a task is of."""
        return self._checkpoint(task).round + 1

    def train_round(self, task: Envelope, plan: Plan) -> None:
        """One round, unless it is done; nobody waits for the answer, and it is not kept."""
        before = self._checkpoint(task)
        if before.round >= task.header.round:
            return
        population = self._population(plan, plan.algorithm, before.record, speaks=False)
        after = self._train(task, plan, population, before)
        after.answer = Message()
        self._save(task, plan, population, after)

    def evaluate_round(self, task: Envelope, plan: Plan) -> Numbers:
        """With what the server sends for it; the report and the model are written."""
        before = self._checkpoint(task)
        population = self._population(plan, plan.algorithm, before.record)
        numbers, model = self._tried(population, task.header.round, task.message)
        self._report(task, plan, before, numbers, model)
        return numbers

    def _train(
        self, task: Envelope, plan: Plan, population: Population, before: Checkpoint
    ) -> Checkpoint:
        header, client = task.header, self.options.client
        first = header.kind == FIRST
        method: Method = "first_message" if first else "client_round"
        with cpu_threads(fitting_threads(population)):
            call = population.call(method, {client: self._here(task.message)}, header.round)
            outcome: Outcome = population.engine.perform([call])[0][client]
            alone = before.alone
            if self.options.alone and not first:
                alone = self._train_alone(plan, alone, header.round)
        if outcome.reply is None:
            raise Refused(
                f"'{plan.algorithm.registered_name}' has nothing to say before its first round"
            )
        record = before.record if first else population.pending.get(client, before.record)
        broken = outcome.broken_model
        if broken is not None and record is not None and self.options.privacy is not None:
            # A refusal would tell of samples: a server can send what only one of them breaks on.
            self.say(f"{diverged(header.round, broken, 'this client')}; it stays as it was")
            record, broken = as_it_was_at_home(population.record(client), record), None
        broken = broken or outcome.broken_reply
        if broken is not None:
            raise diverged(header.round, broken, "this client")
        return Checkpoint(header.round, record, alone, outcome.reply)

    def _train_alone(self, plan: Plan, record: ClientRecord | None, round: int) -> ClientRecord:
        """The same steps on the same mini-batches, without the federation."""
        population = self._population(plan, reference_algorithm(), record)
        client = self.options.client
        population.engine.perform([population.call("client_round", {client: Message()}, round)])
        return population.pending[client]

    def _save(self, task: Envelope, plan: Plan, population: Population, after: Checkpoint) -> None:
        model = NO_MODEL
        evaluates = not plan.algorithm.evaluated_with_server and task.header.kind != FIRST
        if evaluates:
            if after.record is not None:
                population.commit({self.options.client: after.record})
            after.facts["numbers"], model = self._tried(population, after.round, Message())
        after.save(self._run_folder(task) / CHECKPOINT)
        if evaluates:
            self._report(task, plan, after, after.facts["numbers"], model)

    # Evaluation.

    def _tried(self, population: Population, round: int, message: Message) -> tuple[Numbers, Model]:
        """Nothing, of a model that breaks where messages are private: a refusal would tell of the
        samples that it is tried on."""
        try:
            return self._evaluate(population, round, message)
        except Diverged as error:
            if self.options.privacy is None:
                raise
            self.say(str(error))
            return {}, NO_MODEL

    def _evaluate(
        self, population: Population, round: int, message: Message
    ) -> tuple[Numbers, Model]:
        """Accuracy and loss by model kind, and the model one would use."""
        client = self.options.client
        with cpu_threads(fitting_threads(population)):
            message = self._here(message)
            columns = population.evaluate({client: message}, round)
            models = population.models(client, message, round)
        numbers = {
            kind: {name: float(values[0]) for name, values in column.items()}
            for kind, column in columns.items()
        }
        if not all(torch.isfinite(torch.tensor([*n.values()])).all() for n in numbers.values()):
            raise Diverged(f"round {round}: the loss here is not finite")
        needs = needs_of(population.federation, population.inputs)
        blueprint = Blueprint.of(population, client, needs, self.options.run)
        return numbers, Model(headline(models).tensors(), blueprint)

    def _report(
        self,
        task: Envelope,
        plan: Plan,
        checkpoint: Checkpoint,
        numbers: Numbers,
        model: Model,
    ) -> None:
        """For the people at this site: what they have, and what they would have alone."""
        if not numbers:
            return
        folder = self._run_folder(task)
        model.write(folder / PERSONAL)
        line: dict[str, Any] = {"round": task.header.round, **headline(numbers)}
        text = f"round {task.header.round}: accuracy {100 * line['test_accuracy']:.1f} %"
        if self.options.privacy is not None:
            line["epsilon"] = self._epsilon()
            text += f", ε {line['epsilon']:.2f} spent so far"
        if checkpoint.alone is not None:
            line |= self._alone(task, plan, checkpoint.alone)
        if "alone_test_accuracy" in line:
            line["gain"] = line["test_accuracy"] - line["alone_test_accuracy"]
            text += (
                f" with the federation, {100 * line['alone_test_accuracy']:.1f} % alone "
                f"({100 * line['gain']:+.1f})"
            )
        append(folder / REPORT, line)
        self.say(text)

    def _epsilon(self) -> float:
        """What this site has spent, in all runs."""
        privacy = self.options.privacy
        assert privacy is not None
        purse = self._purse()
        return epsilon(composed([purse.telling, *purse.spent]), privacy.delta)

    def _alone(self, task: Envelope, plan: Plan, record: ClientRecord) -> dict[str, float]:
        """The numbers of the copy; none where it has diverged, which is nobody else's matter."""
        population = self._population(plan, reference_algorithm(), record)
        try:
            numbers, model = self._evaluate(population, task.header.round, Message())
        except Diverged:
            return {}
        model.write(self._run_folder(task) / ALONE)
        return {f"alone_{name}": number for name, number in numbers["personal"].items()}

    # Before joining.

    def check(self) -> list[str]:
        """What is there, if nothing is wrong that can be found without a coordinator."""
        options, split = self.options, self.split
        training = Training(steps=1, batch_size=min(32, len(split.train)))
        plan = Plan(
            options.run,
            0,
            options.client + 1,
            1,
            options.classes,
            "common",
            training,
            reference_algorithm(),
        )
        with chdir(self.folder):
            self._lock_file()
            population = self._population(plan, reference_algorithm(), None)
            client = options.client
            speaking = self._population(plan, _Speaks(), None)
            (outcomes,) = speaking.engine.perform(
                [speaking.call("client_round", {client: Message()}, 0)]
            )
            said = outcomes[client].reply
            if not said["soft_decisions"].isfinite().all():
                raise ConfigError("gives values on the public set that are not finite", "model")
            check_finite(
                0, {"the model": [*self._train_alone(plan, None, 0).weights.params.items()]}
            )
        architecture = population.architectures[client]
        parameters = parameter_count(population.modules[architecture])
        seen = torch.bincount(
            torch.as_tensor(self.samples.y[split.train]), minlength=options.classes
        )
        return [
            f"data: {len(split.train)} samples to train, {len(split.validation)} to validate, "
            f"{len(split.test)} to test, each {population.inputs}; "
            f"{int((seen > 0).sum())} of {options.classes} classes in the training data: "
            + ", ".join(f"{label} ({count})" for label, count in enumerate(seen) if count),
            f"model: {architecture}, {parameters} parameters; takes a "
            f"training step, gives {options.classes} classes on {len(said['soft_decisions'])} "
            "public samples",
            f"public set: {self.public}"
            + (
                ", as the coordinator's"
                if options.public.hash
                else "; the coordinator's is not "
                "in the file (public.hash), so it will be compared on joining"
            ),
        ]

    # Shared.

    def _here(self, message: Message) -> Message:
        """What came over the network, on this site's device, as messages are in a simulation.
        Numbers may meet tensors of any device."""
        arrays = message.arrays.items()
        return Message.from_arrays({n: t.to(self.device) if t.dim() else t for n, t in arrays})

    def _check(self, task: Envelope) -> None:
        check_same_protocol(task.header, "the coordinator")
        check_same_public_set(task.header, self.public, "the coordinator")
        check_kind(task.header)
        self.options.agrees.check_size(task.message, "in")

    def _population(
        self, plan: Plan, algorithm: Algorithm, record: ClientRecord | None, speaks: bool = True
    ) -> Population:
        """This one client, as in a simulation of them all; the others have no data here. Who does
        not speak spends nothing on being private."""
        privacy = self.options.privacy if speaks else None
        none = np.zeros(0, dtype=np.int64)
        splits = [ClientSplit(none, none, none, none)] * plan.clients
        splits[self.options.client] = self.split
        models = Models(
            architectures=(self.options.model,),
            assign="list",
            per_client=(0,) * plan.clients,
            initial=plan.initial,
        )
        population = Population(
            algorithm,
            Federation(
                self.samples,
                splits,
                {},
                second_validation=self.options.split.second_validation,
            ),
            models,
            plan.training,
            plan.rounds,
            plan.seed,
            self.device,
            link=Link(plan.wire if algorithm is plan.algorithm else (), plan.seed),
            trusts_server=False,
            privacy=privacy,
            purse=None if privacy is None else self._purse(),
        )
        engine = SequentialEngine()
        engine.before_step = self.options.agrees.timer()
        population.engine = engine
        if record is not None:
            population.commit({self.options.client: record})
        return population

    def _checkpoint(self, task: Envelope) -> Checkpoint:
        return Checkpoint.load(self._run_folder(task) / CHECKPOINT, self.device)

    def _run_folder(self, task: Envelope) -> Path:
        if not is_run_id(task.header.run):
            raise Refused(f"{task.header.run!r} is no run's id")
        return self.state / task.header.run

    @contextmanager
    def alone_here(self) -> Iterator[None]:
        """One process at a time; another waits, and then finds the round done."""
        with locks.locked(self._lock_file(), patience=None):
            yield

    def _lock_file(self) -> Path:
        """In the folder of all that is kept, which can be written if this can."""
        path = self.state / ".lock"
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            reason = f"cannot write in {self.state}: {error.strerror}"
            raise ConfigError(reason, "state") from None
        return path
