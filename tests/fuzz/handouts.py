"""What crosses for a site that comes later: its question to the gate, and the handout."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from perfed.core.message import Message
from perfed.flower.asking import Question
from perfed.flower.certificates import write_node_key
from perfed.flower.handout import Handout
from perfed.flower.protocol import ROUND, Header
from tests.flower.test_site import PLAN
from tests.fuzz.target import ODD_JSON, Target
from tests.fuzz.tensor_files import with_length, with_zero


class Handouts(Target):
    """A question, which is JSON with a key 'network', or a handout, which is a tensor file."""

    tokens = (
        *ODD_JSON,
        *(b'"network"', b'"key"', b'"time"', b'"signature"', b"-----BEGIN PUBLIC KEY-----"),
        *(
            b'"plan"',
            b'"run"',
            b'"round"',
            b'"public"',
            b'"__metadata__"',
            b"down/",
            b"evaluation/",
        ),
    )

    def seeds(self) -> list[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            write_node_key(Path(folder) / "key")
            self._signed = Question.signed("mlp(hidden=8)", Path(folder) / "key")
        handout = Handout(
            Header(ROUND, "trial-1", 3, "aa"),
            PLAN.to_mapping(),
            Message(centroids=torch.full((2, 3), 0.5)),
            Message(),
        )
        return [self._signed.encode(), with_zero(handout.encode()), handout.encode()]

    def read(self, data: bytes) -> None:
        if b'"network"' in data and b"__metadata__" not in data:
            self._read_question(data)
        else:
            given = Handout.decode(with_length(data))
            json.dumps([given.plan, given.header.run])  # as the site keeps them

    def _read_question(self, data: bytes) -> None:
        question = Question.decode(data)
        question.check_signature()
        if question != self._signed:
            raise AssertionError("a question that nobody has signed")
