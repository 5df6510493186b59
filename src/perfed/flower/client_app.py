"""What a Flower supernode starts for every task: open the site, answer, end."""

from __future__ import annotations

import traceback
from pathlib import Path

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from perfed.core.errors import PerfedError
from perfed.flower import codec
from perfed.flower.protocol import Envelope, Header, one_line
from perfed.flower.settings import read_site
from perfed.flower.site import Site

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
    task = Envelope(Header("?", "?", -1, "?"))
    try:
        path = Path(str(context.node_config.get("site", "site.yaml")))
        options = read_site(path)
        task = codec.decode(message.content, options.agrees.bytes_in)
        reply = Site(options, path.absolute().parent, _say).answer(task)
    except PerfedError as error:
        reason = one_line(str(error))
        _say(f"refused: {reason}")
        reply = task.refuse(reason)
    except Exception as error:  # the site's own model or data: the details stay at the site
        traceback.print_exc()
        reply = task.refuse(f"failed with {type(error).__name__}; its log says more")
    return FlowerMessage(codec.encode(reply), reply_to=message)


def _say(line: str) -> None:
    print(f"perfed: {line}", flush=True)
