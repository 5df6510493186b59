"""Envelopes as Flower records: header and facts in a ConfigRecord, the message's tensors as one
Array, in the wire encoding that the channel counts (:mod:`perfed.core.tensorfile`)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from perfed.core import tensorfile
from perfed.core.message import Message
from perfed.flower.protocol import Envelope, Header, Refused

ENCODING = "perfed.safetensors"


def encode(envelope: Envelope) -> RecordDict:
    about: dict[str, Any] = dataclasses.asdict(envelope.header)
    about |= {"facts": json.dumps(envelope.facts), "refusal": envelope.refusal}
    records = RecordDict({"about": ConfigRecord(about)})  # every record is a request more
    arrays = envelope.message.arrays
    if arrays:
        data = tensorfile.encode(arrays)
        records["message"] = ArrayRecord({"": Array("uint8", (len(data),), ENCODING, data)})
    return records


def decode(records: RecordDict) -> Envelope:
    """Raises Refused where the records are not an envelope."""
    try:
        about = cast(dict[str, Any], dict(records.config_records["about"]))
        facts, refusal = json.loads(about.pop("facts")), about.pop("refusal")
        header = Header(**about)
        message = Message()
        if "message" in records:
            array = records.array_records["message"][""]
            if array.stype != ENCODING:
                raise ValueError(f"arrays encoded as {array.stype}")
            message = Message.from_arrays(tensorfile.decode(array.data, tensorfile.MESSAGE)[0])
    except tensorfile.MALFORMED as error:
        raise Refused(f"not an envelope of perfed: {type(error).__name__}: {error}") from None
    return Envelope(header, message, facts, refusal)
