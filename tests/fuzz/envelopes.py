"""Envelopes between a site and the coordinator: encoding, invitation, introduction, evaluation."""

from __future__ import annotations

import json
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from perfed.core import tensorfile
from perfed.core.errors import PerfedError, Refused
from perfed.core.message import Message
from perfed.flower import codec
from perfed.flower.agreement import Agreement
from perfed.flower.membership import introduction
from perfed.flower.numbers import NEEDED, checked_numbers
from perfed.flower.protocol import (
    EVALUATE,
    JOIN,
    ROUND,
    Envelope,
    Header,
    check_answer,
    check_kind,
    one_line,
)
from tests.flower.test_site import PLAN
from tests.fuzz.target import ODD_JSON, Target
from tests.fuzz.tensor_files import with_length, with_zero

CLIENTS = 3


class Envelopes(Target):
    """JSON of what an envelope says of itself, a zero byte, and a tensor file."""

    tokens = (
        *ODD_JSON,
        *(b'"round"', b'"plan"', b'"algorithm"', b'"fedavg"', b'"x.py:X"', b'"this:s"', b'"name"'),
        *(
            b'"sizes"',
            b'"numbers"',
            b'"client"',
            b'"training"',
            b'"steps"',
            b'"wire"',
            b'"metrics"',
        ),
        *(b'"facts"', b'"refusal"', b'"protocol"', b"../", b"\\n\\u001b[2J", b'"personal"'),
    )

    def seeds(self) -> list[bytes]:
        told = dict.fromkeys(NEEDED, 0.5)
        sizes = {"train": 5, "validation": 2, "test": 2}
        who = {"client": 1, "sizes": sizes, "architecture": "mlp", "site": "a"}
        soft = Message(soft_decisions=torch.full((3, 2), 0.5))
        envelopes = [
            Envelope(Header(JOIN, "trial-1", -1, "aa"), facts={"plan": PLAN.to_mapping()}),
            Envelope(
                Header(JOIN, "trial-1", -1, "aa"), facts=who | {"numbers": {"personal": told}}
            ),
            Envelope(Header(ROUND, "trial-1", 3, "aa"), soft, {"numbers": {"personal": told}}),
            Envelope(Header(EVALUATE, "trial-1", 3, "aa"), refusal="no time"),
        ]
        return [self._written(envelope) for envelope in envelopes]

    def _written(self, envelope: Envelope) -> bytes:
        about: dict[str, Any] = dict(codec.encode(envelope).config_records["about"])
        about["facts"] = json.loads(about["facts"])
        message = envelope.message.arrays
        return json.dumps(about).encode() + (
            b"\0" + with_zero(tensorfile.encode(message)) if message else b""
        )

    def read(self, data: bytes) -> None:
        envelope = codec.decode(_records(data), most=1 << 20)
        again = codec.decode(codec.encode(envelope))
        assert again.header == envelope.header
        assert again.message.arrays.keys() == envelope.message.arrays.keys()
        assert len(one_line(envelope.refusal)) < 600
        ways = (
            lambda: check_kind(envelope.header),
            lambda: check_answer(Header(ROUND, "trial-1", 3, "aa"), envelope),
            lambda: self._invited(envelope.facts.get("plan")),
            lambda: self._introduced(envelope.facts),
            lambda: checked_numbers(envelope.facts),
        )
        accepted = 0
        for way in ways:
            try:
                way()
                accepted += 1
            except PerfedError as error:
                last = error
        if not accepted:
            raise Refused(one_line(str(last)))

    def _invited(self, values: Any) -> None:
        plan = Agreement().plan(values, 50)
        limits = Agreement()
        assert plan.algorithm.registered_name in (
            "perfed-ckt",
            "perfed-evidence",
            "perfed-kin",
            "local",
            "majority",
        )
        assert not plan.algorithm.import_path
        assert 1 <= plan.training.steps_of(50) <= limits.steps
        assert plan.training.batch_size <= limits.batch_size
        assert 0 < plan.training.learning_rate <= limits.learning_rate
        assert plan.rounds <= limits.rounds
        assert plan.clients <= limits.clients

    def _introduced(self, facts: Any) -> None:
        client, member, numbers = introduction(facts, CLIENTS)
        assert 0 <= client < CLIENTS
        assert all(1 <= size <= 10**12 for size in member.sizes.values())
        for told in numbers.values():
            assert all(0 <= told[name] <= 1 for name in told if name.endswith("accuracy"))


def _records(data: bytes) -> RecordDict:
    """As Flower would give them; what Flower itself would not carry is refused here."""
    text, _, message = data.partition(b"\0")
    try:
        about = json.loads(text)
        if isinstance(about, dict) and not isinstance(about.get("facts"), str):
            about["facts"] = json.dumps(about.get("facts"))
        records = RecordDict({"about": ConfigRecord(about)})
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Refused("Flower does not carry it") from error
    if message:
        content = with_length(message)
        array = Array("uint8", (len(content),), codec.ENCODING, content)
        records["message"] = ArrayRecord({"": array})
    return records
