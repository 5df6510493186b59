"""Envelopes as Flower records: header and facts in a ConfigRecord, the message's tensors as one
Array, in the wire encoding that the channel counts (:mod:`perfed.core.tensorfile`)."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from perfed.core import tensorfile
from perfed.core.message import Message
from perfed.flower.protocol import Envelope, Header, Refused, one_line

ENCODING = "perfed.safetensors"
LONGEST_FACTS = 2**20  # characters; a plan has a thousand
TYPES = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(Header)}


def encode(envelope: Envelope) -> RecordDict:
    about: dict[str, Any] = asdict(envelope.header)
    about |= {"facts": json.dumps(envelope.facts), "refusal": envelope.refusal}
    records = RecordDict({"about": ConfigRecord(about)})  # every record is a request more
    arrays = envelope.message.arrays
    if arrays:
        data = tensorfile.encode_message(arrays)
        records["message"] = ArrayRecord({"": Array("uint8", (len(data),), ENCODING, data)})
    return records


def decode(records: RecordDict, most: int | None = None) -> Envelope:
    """Raises Refused where the records are not an envelope, or have a message of more than
    ``most`` bytes: before a tensor is made of it."""
    try:
        about = cast(dict[str, Any], dict(records.config_records["about"]))
        facts, refusal = _facts(about.pop("facts")), about.pop("refusal")
        header = Header(**about)
        _check_types(about | {"refusal": refusal})
        message = Message()
        if "message" in records:
            array = records.array_records["message"][""]
            if array.stype != ENCODING:
                raise ValueError(f"arrays encoded as {array.stype}")
            if most is not None and len(array.data) > most:
                raise ValueError(f"a message of {len(array.data)} bytes: must be at most {most}")
            message = Message.from_arrays(tensorfile.decode_message(array.data))
    except tensorfile.MALFORMED as error:
        reason = one_line(f"not an envelope of perfed: {type(error).__name__}: {error}")
        raise Refused(reason) from None
    return Envelope(header, message, facts, refusal)


def _facts(text: str) -> dict[str, Any]:
    if len(text) > LONGEST_FACTS:
        raise ValueError(f"{len(text)} characters of facts: must be at most {LONGEST_FACTS}")
    facts = json.loads(text)
    if not isinstance(facts, dict):
        raise ValueError(f"the facts are a {type(facts).__name__}")
    return facts


def _check_types(about: dict[str, Any]) -> None:
    for name, value in about.items():
        if type(value) is not TYPES.get(name, str):
            raise ValueError(f"{name} is a {type(value).__name__}")
