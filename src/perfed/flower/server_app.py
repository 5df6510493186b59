"""What ``flwr run`` starts at the coordinator."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from flwr.app import Context, MessageType
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid, ServerApp

from perfed.core.errors import PerfedError, RunError
from perfed.flower import codec
from perfed.flower.certificates import fingerprint
from perfed.flower.coordinator import coordinate
from perfed.flower.membership import Answer, Say, Unreadable
from perfed.flower.protocol import EVALUATE, JOIN, NOTICE, Envelope
from perfed.flower.saying import logging_to, say
from perfed.flower.settings import read_coordinator

app = ServerApp()
CLOCKS = 60.0  # seconds by which the clocks of two machines may differ


@app.main()
def main(grid: Grid, context: Context) -> None:
    path = Path(str(context.run_config["coordinator"]))
    tell: Say = say
    try:
        tell = logging_to(path.absolute().parent / read_coordinator(path).directory)
        coordinate(path, FlowerTransport(grid), tell)
    except PerfedError as error:
        tell(str(error))
        logging.getLogger("flwr").addFilter(_without_traceback)
        raise


def _without_traceback(record: logging.LogRecord) -> bool:
    """Flower logs whatever ends its app with a traceback. What a user can mend is one line."""
    if record.exc_info and isinstance(record.exc_info[1], PerfedError):
        record.exc_info = None
    return True


class FlowerTransport:
    """Envelopes through Flower's grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._keys: dict[int, bytes] = {}

    def nodes(self) -> list[int]:
        nodes = {info.node_id: info.public_key for info in self._grid.get_nodes()}
        self._keys |= nodes
        return list(nodes)

    def key(self, node: int) -> str:
        return fingerprint(self._keys.get(node, b""))

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        kinds = {
            JOIN: MessageType.QUERY,
            NOTICE: MessageType.QUERY,
            EVALUATE: MessageType.EVALUATE,
        }
        kind = kinds.get(task.header.kind, MessageType.TRAIN)
        message = FlowerMessage(
            codec.encode(task),
            node,
            kind,
            ttl=seconds + CLOCKS,
            group_id=str(task.header.round),
        )
        names = list(self._grid.push_messages([message]))
        if len(names) != 1 or not names[0]:  # too large, or the node is registered no more
            raise RunError("Flower does not take the message")
        return names[0]

    def receive(self, names: Iterable[str]) -> dict[str, Answer]:
        arrived: dict[str, Answer] = {}
        for reply in self._grid.pull_messages(list(names)):
            name = reply.metadata.reply_to_message_id
            try:
                arrived[name] = (
                    codec.decode(reply.content) if reply.has_content() else str(reply.error.reason)
                )
            except PerfedError as error:
                arrived[name] = Unreadable(error)
        return arrived
