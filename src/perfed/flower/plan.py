"""The plan: what the coordinator tells a site of the experiment when it invites it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from perfed.config import Training
from perfed.core.algorithm import Algorithm
from perfed.core.errors import ConfigError, RunError
from perfed.core.metrics import known_metric, metrics
from perfed.core.schema import Options, from_mapping, plain
from perfed.core.wire import Stage
from perfed.flower.protocol import Refused


def _needed(**bounds: int) -> Any:
    """A field that every plan has."""
    return dataclasses.field(metadata=bounds)


@dataclass(frozen=True)
class Plan(Options):
    """What a site must know of the experiment."""

    name: str = _needed()
    seed: int = _needed(ge=0)
    clients: int = _needed(ge=1)
    rounds: int = _needed(ge=1)
    classes: int = _needed(ge=2)
    initial: Literal["common", "own"] = _needed()
    training: Training = _needed()
    algorithm: Algorithm = _needed()
    metrics: tuple[str, ...] = ()
    wire: tuple[Stage, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in vars(self).items()}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Plan:
        """Imports what the plan names: a site asks its agreement first. Raises Refused."""
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in values:
                raise Refused(f"the plan has no '{field.name}'")
        try:
            plan = from_mapping(cls, values)
            for path in plan.metrics:
                if path not in metrics:
                    known_metric(path)
        except ConfigError as error:
            raise Refused(f"the plan: {error}") from None
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # Whatever an option can stumble over in a value that nobody thought of.
            raise Refused(f"the plan cannot be read: {type(error).__name__}") from error
        return plan


def plan_hash(values: Any) -> str:
    """Of a plan as JSON, whoever wrote it: what a site approves, and what its ledger names."""
    return sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """What a site has kept of plans."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is corrupt: {error}") from None
