"""What a site gets that comes when the federation is over.

At its end a run writes *handouts*: what its server would send to a client that it has never heard
of, as the algorithm's messages declare it, and the plan. Nothing else of the server's state is in
them. In the run directory,

    handouts/index.json     the networks that have a handout of their own; none: one fits all
    handouts/0.safetensors  the handout of the first, and so on

The gate gives one of these files to a site (:mod:`.gate`), or somebody copies it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfed.core import tensorfile
from perfed.core.errors import ConfigError, RunError
from perfed.core.message import Message
from perfed.flower.protocol import Header, Refused
from perfed.runs.directory import RunDirectory

HANDOUTS, INDEX = "handouts", "index.json"
DOWN, EVALUATION = "down/", "evaluation/"


@dataclass(frozen=True)
class Handout:
    """What a later site gets."""

    header: Header
    plan: Mapping[str, Any]
    down: Message
    evaluation: Message

    def encode(self) -> bytes:
        arrays = {DOWN + name: tensor for name, tensor in self.down.arrays.items()}
        arrays |= {EVALUATION + name: t for name, t in self.evaluation.arrays.items()}
        about = dataclasses.asdict(self.header) | {"plan": self.plan}
        return tensorfile.sealed(arrays, json.dumps(about))[0]

    @classmethod
    def decode(cls, data: bytes) -> Handout:
        try:
            arrays, about = tensorfile.unsealed(data)
            values = json.loads(about)
            plan = values.pop("plan")
            header = Header(**values)
            if not isinstance(header.run, str) or type(header.round) is not int:
                raise ValueError("it names no run")
            if not isinstance(header.public, str) or not isinstance(plan, dict):
                raise ValueError("it has no plan, or names no public set")
            down, evaluation = (
                Message.from_arrays({n.removeprefix(p): t for n, t in arrays.items() if _is(n, p)})
                for p in (DOWN, EVALUATION)
            )
        except (AttributeError, RecursionError, *tensorfile.MALFORMED) as error:
            raise Refused(f"this is no handout: {type(error).__name__}") from None
        return cls(header, plan, down, evaluation)

    @classmethod
    def load(cls, path: Path) -> Handout:
        try:
            return cls.decode(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", "--handout") from None
        except Refused as error:
            raise ConfigError(f"{path}: {error}", "--handout") from None


def _is(name: str, part: str) -> bool:
    return name.startswith(part)


def write_handouts(run: Path, networks: Sequence[str], handouts: Sequence[Handout]) -> None:
    """One for each of these networks, or one for all of them."""
    folder = run / HANDOUTS
    folder.mkdir(exist_ok=True)
    for number, handout in enumerate(handouts):
        tensorfile.write_atomically(folder / f"{number}.safetensors", handout.encode())
    # The last: with it, all of them are there.
    index = json.dumps({"networks": [*networks]}).encode()
    tensorfile.write_atomically(folder / INDEX, index)


def find_handout(run: Path, network: str) -> Path:
    """For a site with this network; raises Refused, in words for the site."""
    index = run / HANDOUTS / INDEX
    if not index.is_file():
        raise Refused(_why_there_is_none(RunDirectory(run)))
    networks = json.loads(index.read_text("utf-8"))["networks"]
    if networks and network not in networks:
        raise Refused(f"this run has models of {', '.join(networks)}, and none of '{network}'")
    number = networks.index(network) if networks else 0
    path: Path = index.with_name(f"{number}.safetensors")
    return path


def _why_there_is_none(run: RunDirectory) -> str:
    if run.finished:
        return "the federation is over, and has nothing for later sites: its log says why"
    try:
        done = sum(line["round"] >= 0 for line in run.lines("rounds.jsonl"))
    except RunError:
        done = 0
    if not done:
        return "the federation has not finished a round: 'perfed site start' takes part in it"
    return (
        f"the federation is not over, {done} rounds are done: take part with 'perfed site start', "
        "or ask again later"
    )
