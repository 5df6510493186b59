"""What a Flower supernode starts for every task: open the site, answer, end."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from perfed.core.errors import PerfedError
from perfed.flower import codec
from perfed.flower.ledger import Ledger
from perfed.flower.protocol import Envelope, Header, one_line
from perfed.flower.saying import logging_to, say
from perfed.flower.settings import read_site
from perfed.flower.site import Site, refuse

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
    return FlowerMessage(codec.encode(_answer(message, context)), reply_to=message)


def _answer(message: FlowerMessage, context: Context) -> Envelope:
    task = Envelope(Header("?", "?", -1, "?"))
    path = Path(str(context.node_config.get("site", "site.yaml")))
    try:
        options = read_site(path)
    except PerfedError as error:  # then nobody knows where the ledger is
        reason = one_line(str(error))
        say(f"refused: {reason}")
        return task.refuse(reason)
    folder = path.absolute().parent
    ledger = Ledger(folder / options.state)
    tell = logging_to(folder / options.state)
    try:
        task = codec.decode(message.content, options.agrees.bytes_in)
        return Site(options, folder, tell).answer(task)
    except PerfedError as error:
        return refuse(task, str(error), ledger, tell)
    except Exception as error:  # the site's own model or data: the details stay at the site
        traceback.print_exc()
        reason = f"failed with {_named(error)}; its log says more"
        return refuse(task, reason, ledger, tell)


def _named(error: Exception) -> str:
    """And what the system says of it, in the system's words: a disk that is full, say."""
    if isinstance(error, OSError) and error.errno:
        return f"{type(error).__name__} ({os.strerror(error.errno)})"
    return type(error).__name__
