"""What a site agrees to: its own word on a coordinator's plan, before anything of it is used.

A plan is text from another machine. First its names are compared with those that are perfed's own
and those in the site's file; nothing else is ever imported. Then it is read, and its numbers are
compared with the site's limits. Only then is anything made from it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from perfed.core.algorithm import Algorithm, algorithms
from perfed.core.declaration import networks
from perfed.core.errors import ConfigError, did_you_mean
from perfed.core.message import Message
from perfed.core.metrics import metrics
from perfed.core.optimizer import optimizers
from perfed.core.registry import Registry
from perfed.core.schedule import schedules
from perfed.core.schema import Options, option
from perfed.core.tensorfile import encoded_size
from perfed.core.wire import stages
from perfed.flower.plan import Plan
from perfed.flower.protocol import Refused
from perfed.models import architectures

REGISTRIES: dict[str, Registry[Any]] = {
    "algorithms": algorithms,
    "stages": stages,
    "optimizers": optimizers,
    "schedules": schedules,
    "networks": architectures,
}
KINDS = (*REGISTRIES, "metrics")
LARGEST_SHOWN = 10**18


@dataclass(frozen=True)
class Agreement(Options):
    """What a coordinator may ask of this site. What is perfed's own need not be listed, but for
    algorithms that send weights."""

    algorithms: tuple[str, ...] = option(
        (), "algorithms that may run here beside those that send no weights: [fedavg, my.py:Own]"
    )
    stages: tuple[str, ...] = option((), "stages of the wire that are not perfed's: [my.py:Half]")
    optimizers: tuple[str, ...] = option((), "optimizers that are not perfed's")
    schedules: tuple[str, ...] = option((), "schedules that are not perfed's")
    metrics: tuple[str, ...] = option((), "metrics that are not perfed's")
    networks: tuple[str, ...] = option((), "networks in an algorithm that are not perfed's")
    steps: int = option(10_000, "most training steps in a round, also where it counts epochs", ge=1)
    batch_size: int = option(1024, "most samples in a step, private or public", ge=1)
    least_samples: int = option(
        16, "fewest samples that a round is trained on: steps × batch_size", ge=1
    )
    rounds: int = option(10_000, "most rounds", ge=1)
    clients: int = option(10_000, "most clients in the run", ge=1)
    learning_rate: float = option(1.0, "largest learning rate", gt=0)
    seconds: float = option(3600.0, "most seconds of training in a round", gt=0)
    bytes_in: int = option(2**26, "most bytes of a message that comes", ge=1)
    bytes_out: int = option(2**26, "most bytes of a message that leaves", ge=1)

    def validate(self) -> None:
        """A name that is mistyped would allow nothing, and nobody would know why."""
        for kind in KINDS:
            known = built_in_names(kind)
            for number, name in enumerate(getattr(self, kind)):
                if not is_path(name) and name not in known:
                    hint = f"{did_you_mean(name, known)}; your own goes by file.py:Name"
                    raise ConfigError(f"unknown '{name}'{hint}", f"{kind}[{number}]")

    def plan(self, values: Any, samples: int) -> Plan:
        """The plan, read, if a site with so many training samples agrees to it; else Refused."""
        if values is None:
            raise Refused("there is no plan in the invitation")
        if not isinstance(values, Mapping):
            raise Refused(f"the plan is a {type(values).__name__}, must be keys and values")
        self._check_names(values)
        plan = Plan.from_mapping(values)
        for check in self._checks(plan, samples):
            check()
        return plan

    def refusals(self, values: Any, samples: int) -> list[str]:
        """Every reason not to agree, where :meth:`plan` stops at the first."""
        try:
            self.plan(values, samples)
            return []
        except Refused as error:
            first = str(error)
        try:
            self._check_names(values)
            plan = Plan.from_mapping(values)
        except (Refused, AttributeError):
            return [first]  # it cannot be read any further
        reasons = []
        for check in self._checks(plan, samples):
            try:
                check()
            except Refused as error:
                reasons.append(str(error))
        return reasons

    def check_size(self, message: Message, way: str) -> None:
        """``way`` is ``in`` or ``out``."""
        self._check_limit(f"bytes_{way}", encoded_size(message.arrays), "bytes in a message")

    def timer(self) -> Callable[[], None]:
        """To be called now and then: raises Refused once more than ``seconds`` are over."""
        end = time.monotonic() + self.seconds

        def check() -> None:
            if time.monotonic() > end:
                raise Refused(
                    f"this site does not train for more than {self.seconds:g} seconds in a round; "
                    f"{_line('seconds', f'{2 * self.seconds:g}')}"
                )

        return check

    def _check_names(self, plan: Mapping[str, Any]) -> None:
        """Before anything is imported: a registry imports a name that has a colon."""
        for kind, name in _components(plan):
            if name in getattr(self, kind) or name in built_in_names(kind):
                continue
            if not is_path(name):
                raise Refused(f"the perfed here has no '{name}' among its {kind}")
            raise self._not_imported(kind, name)
        listed = {path for kind in KINDS for path in getattr(self, kind)}
        for text in _texts({key: value for key, value in plan.items() if key != "name"}):
            if is_path(text) and text not in listed:  # a network, in an algorithm's options
                raise self._not_imported("networks", text)

    def _check_algorithm(self, algorithm: Algorithm) -> None:
        name = algorithm.import_path or algorithm.registered_name
        if name in self.algorithms or sends_no_weights(algorithm):
            return
        what = "sends weights" if algorithm.messages().up else "does not declare what it sends"
        raise Refused(f"this site does not agree to '{name}', which {what}; {self._listing(name)}")

    def _checks(self, plan: Plan, samples: int) -> Iterator[Callable[[], None]]:
        """One for each thing that a site may not agree to in a plan that it can read."""
        training, algorithm = plan.training, plan.algorithm
        yield partial(self._check_algorithm, algorithm)
        options = vars(algorithm).items()
        own = [n for key, n in options if key.endswith("steps") and isinstance(n, int)]
        steps = training.steps_of(samples)
        yield partial(self._check_limit, "steps", max([steps, *own]), "steps a round")
        yield partial(self._check_least, steps * training.batch_size)
        largest = max(training.batch_size, training.public_batch_size)
        yield partial(self._check_limit, "batch_size", largest, "samples a step")
        yield partial(self._check_limit, "rounds", plan.rounds, "rounds")
        yield partial(self._check_limit, "clients", plan.clients, "clients")
        rate = training.learning_rate
        yield partial(self._check_limit, "learning_rate", rate, "as a learning rate")

    def _check_least(self, drawn: int) -> None:
        if drawn < self.least_samples:  # an answer would tell of these few alone
            raise Refused(
                f"this site does not agree to {drawn} samples a round, at least "
                f"{self.least_samples}; {_line('least_samples', str(drawn))}"
            )

    def _check_limit(self, key: str, value: float, what: str) -> None:
        if value > getattr(self, key):
            shown = min(value, LARGEST_SHOWN)  # no number of a thousand digits in a log
            raise Refused(
                f"this site does not agree to {shown} {what}, at most {getattr(self, key)}; "
                f"{_line(key, str(shown))}"
            )

    def _not_imported(self, kind: str, path: str) -> Refused:
        return Refused(
            f"this site does not import '{path}' because a coordinator says so; "
            f"{self._listing(path, kind)}"
        )

    def _listing(self, name: str, kind: str = "algorithms") -> str:
        return _line(kind, f"[{', '.join(map(_in_yaml, (*getattr(self, kind), name)))}]")


def sends_no_weights(algorithm: Algorithm) -> bool:
    """By its own declaration: a client's messages are declared, and hold nothing by parameter."""
    up = algorithm.messages().up
    return up is not None and not networks(up)


def sending_weights() -> list[str]:
    """Those of perfed's own algorithms that a site must list."""
    own = sorted(built_in_names("algorithms"))
    return [name for name in own if not sends_no_weights(algorithms.build(name))]


def built_in_names(kind: str) -> set[str]:
    """Not those that a file has added which was imported in this process."""
    if kind == "metrics":
        return {name for name, one in metrics.items() if _is_own(one.measure)}
    return set(REGISTRIES[kind].built_in())


def is_path(text: str) -> bool:
    """Whether it would be imported."""
    return ":" in text or text.endswith(".py")


def _is_own(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] == "perfed"


def _components(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a plan names, and the key of ``agrees`` that could list it. What has another type is
    left to who reads the plan: nothing is imported by a name that is no text."""
    training = plan.get("training")
    training = training if isinstance(training, Mapping) else {}
    named = [
        ("algorithms", [plan.get("algorithm")]),
        ("stages", plan.get("wire")),
        ("metrics", plan.get("metrics")),
        ("optimizers", [training.get("optimizer")]),
        ("schedules", [training.get("schedule")]),
    ]
    for kind, values in named:
        for value in values if isinstance(values, list | tuple) else ():
            name = value.get("name") if isinstance(value, Mapping) else value
            if isinstance(name, str):
                yield kind, name


def _texts(value: Any) -> Iterator[str]:
    """All that is in it, however deep."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, str):
            yield one


def _line(key: str, value: str) -> str:
    return f"agrees: {{{key}: {value}}} in site.yaml would allow it"


def _in_yaml(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]+", name) else json.dumps(name)
