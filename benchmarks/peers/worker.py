"""One peer in a process of its own: waits for "round", does one, says how long it took.

    python worker.py ADAPTER VARIANT SOURCE FOLDER

started by ``benchmarks/peers.py``. Speaks lines of JSON that begin with ``@`` on what was standard
output; whatever the peer prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from processes import others_cpu_seconds
from stand_ins import SAID
from work import Work


def private_output() -> TextIO:
    """Standard output for this file alone."""
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def save_models(peer: Any, folder: Path) -> dict[str, int]:
    """Files ``<kind>_<client>.npz``, and how many of each kind there are."""
    folder.mkdir()
    counts = {}
    for kind, models in peer.models().items():
        counts[kind] = len(models)
        for number, model in enumerate(models):
            np.savez(folder / f"{kind}_{number}.npz", **model)
    return counts


def timed(peer: Any) -> dict[str, float]:
    """Seconds and CPU-seconds of one round; looking for other processes is not in them."""
    others, own, began = others_cpu_seconds(os.getpid()), time.process_time(), time.perf_counter()
    peer.round()
    seconds, own = time.perf_counter() - began, time.process_time() - own
    return {"seconds": seconds, "cpu_seconds": own + others_cpu_seconds(os.getpid()) - others}


def serve(adapter: str, variant: str, source: str, folder: str, answers: TextIO) -> None:
    def tell(value: Any) -> None:
        answers.write("@" + json.dumps(value) + "\n")
        answers.flush()

    module = importlib.import_module(f"drive_{adapter}")
    work = Work.read(Path(folder))
    peer = module.Peer(work, variant, source)
    packages = {name: version(name) for name in module.PACKAGES}
    facts = {"python": platform.python_version(), "packages": packages}
    tell(facts | {"stood_in": module.STOOD_IN + SAID})
    for line in sys.stdin:
        match line.split():
            case ["round"]:
                tell(timed(peer))
            case ["first", "round"]:
                tell({"steps": peer.counted_round()})
            case ["models", where]:
                tell(save_models(peer, Path(where)))
            case ["memory"]:
                tell({"device_peak_bytes": module.device_memory(work)})
            case _:
                break
    peer.close()


if __name__ == "__main__":
    output = private_output()
    try:
        serve(*sys.argv[1:5], output)
    except BaseException as error:  # whatever it is belongs in the record
        traceback.print_exc()
        text = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {text[0] if text else ''}"
        output.write("@" + json.dumps({"error": message}) + "\n")
        output.flush()
    os._exit(0)  # some peers leave threads behind that never end
