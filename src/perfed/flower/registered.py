"""Whose keys the superlink knows: asked before the gate lets in what costs memory.

The superlink takes a whole body into memory before it looks who sends it. So the gate hands on a
large one only for a key that is registered, from somebody who has its private part.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections.abc import Mapping

import httpx

from perfed.flower.protocol import Refused

KEY, SIGNATURE, SIGNED_AT = "flwr-public-key", "flwr-signature", "flwr-timestamp"
NODES = "/v1/control/list-nodes"
PROTOBUF = "application/protobuf"
AGAIN = 1.0  # seconds until the superlink is asked anew about a key that it did not know
ANEW = 30.0  # and about one that it knew: it may not be registered any more


class Registered:
    """The keys of all sites that a superlink would let in."""

    def __init__(self, superlink: httpx.AsyncClient) -> None:
        self._superlink = superlink
        self._keys: set[bytes] = set()
        """As they were when it was last asked."""
        self._asked = -float("inf")
        self._one_asks = asyncio.Lock()

    async def keys(self) -> set[bytes]:
        """As they are now."""
        from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse
        from flwr.supercore.constant import NodeStatus

        words = {"content-type": PROTOBUF, "accept": PROTOBUF}
        try:
            answer = await self._superlink.post(
                NODES, headers=words, content=ListNodesRequest().SerializeToString()
            )
            answer.raise_for_status()
        except httpx.HTTPError:
            raise Refused("its superlink does not answer; ask again in a minute") from None
        nodes = ListNodesResponse.FromString(answer.content).nodes_info
        return {node.public_key for node in nodes if node.status != NodeStatus.UNREGISTERED}

    async def has_sent(self, headers: Mapping[str, str]) -> bool:
        """Whether these are the headers of a request by one of those sites, signed as Flower signs.
        When, the superlink looks at itself."""
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

        try:
            key = b64decode(headers.get(KEY, ""), validate=True)
            signature = b64decode(headers.get(SIGNATURE, ""), validate=True)
            signed = headers.get(SIGNED_AT, "").encode("ascii")
        except ValueError:
            return False
        return await self._knows(key) and verify_signature(
            bytes_to_public_key(key), signed, signature
        )

    async def _knows(self, key: bytes) -> bool:
        """Strangers do not make it ask more than once a second, nor sites wait for them."""
        if not self._is_old(key):
            return key in self._keys
        async with self._one_asks:
            if self._is_old(key):  # nobody asked meanwhile
                self._keys, self._asked = await self.keys(), time.monotonic()
        return key in self._keys

    def _is_old(self, key: bytes) -> bool:
        """What was said of this key."""
        return time.monotonic() - self._asked >= (ANEW if key in self._keys else AGAIN)
