"""How a site asks the coordinator's gate for a handout, and proves which key it has."""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_private_key,
)

from perfed.core.errors import ConfigError
from perfed.flower.protocol import Refused

PATH = "/v1/perfed/handout"
LONGEST_QUESTION = 2**14  # bytes
CLOCKS = 300.0  # seconds by which the clocks of two machines may differ
ECDSA = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True)
class Question:
    """All that leaves a site when it asks."""

    network: str
    key: str = ""
    """The site's public key, in PEM; empty where the federation has no keys."""
    time: float = 0.0
    signature: str = ""

    @classmethod
    def signed(cls, network: str, path: Path) -> Question:
        private = private_key(path)
        public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        question = cls(network, public.decode(), time.time())
        signature = b64encode(private.sign(question._signed_text(), ECDSA)).decode()
        return cls(network, question.key, question.time, signature)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Question:
        """From anybody."""
        try:
            question = cls(**json.loads(data))
        except (TypeError, ValueError, RecursionError):
            raise Refused("this is no question for a handout") from None
        texts = (question.network, question.key, question.signature)
        if not all(isinstance(text, str) for text in texts) or type(question.time) is not float:
            raise Refused("this is no question for a handout")
        return question

    def check_signature(self) -> None:
        """That whoever asks has the private part of the key, now."""
        if not abs(time.time() - self.time) < CLOCKS:
            raise Refused("the clocks of the site and the coordinator differ by minutes")
        try:
            key = load_pem_public_key(self.key.encode())
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError("Flower registers no others")
            key.verify(b64decode(self.signature, validate=True), self._signed_text(), ECDSA)
        except (InvalidSignature, UnsupportedAlgorithm, ValueError):
            raise Refused("the signature is not one by this key") from None

    def _signed_text(self) -> bytes:
        # It says what for: no other question that is signed with this key is one for a handout.
        return json.dumps(["perfed handout", self.network, self.time]).encode()


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"{path} is no key of a site: ECDSA, in OpenSSH's format, no password. To have another "
            "one made, move it away"
        )
    return key
