"""What the coordinator's operator can do to a run from outside: look whether it lives, and take the
server back to an earlier state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from perfed.core.errors import RunError
from perfed.runs.checkpoint import Checkpoints
from perfed.runs.directory import FAILED, FEDERATION, RunDirectory
from perfed.runs.result import Result

START_AGAIN = "start it again with 'flwr run app --stream', or 'perfed federation start' with TLS"


def status(path: Path) -> tuple[list[str], bool]:
    """What there is to say of a run, and whether all is well: it is at work, or at its end. The
    process that works on it holds a lock, which goes with it however it ends."""
    directory, rounds = _federation(path), _rounds(path)
    done = directory.lines("rounds.jsonl")
    last: dict[str, Any] = done[-1] if done else {"round": -1}
    newest = max(file.stat().st_mtime for file in path.iterdir() if file.is_file())
    ago = max(0.0, time.time() - newest)
    lines = [f"{path}: {last['round'] + 1} of {rounds} rounds are done"]
    well = True
    if directory.finished:
        lines.append("finished")
    elif directory.failure:
        lines.append(f"ended: {directory.failure}")
        well = False
    elif directory.in_use():
        lines.append(f"at work; its newest line is {ago:.0f} s old")
    else:
        lines.append(f"NOT at work: no process has it, and its newest line is {ago:.0f} s old; ")
        lines[-1] += START_AGAIN
        well = False
    lines += [f"client {client} took no part: {why}" for client, why in _absent(last)]
    lines += [f"round {last['round']}: {sign}" for sign in last.get("suspect", ())]
    return lines, well


def roll_back(path: Path, round: int) -> list[str]:
    """The server goes on from the state that it had after ``round``.

    Rounds are not done again, and logs stay as they are: a site never does a round twice, its
    model is its own, and random numbers, among them those of privacy noise, belong to a round.
    """
    directory, rounds = _federation(path), _rounds(path)
    with directory.locked():
        if directory.finished:
            raise RunError(f"{path} is finished: there is no round left to go on with")
        # Sites have done the round in which a server fails: again, they would answer the same.
        following = Checkpoints(directory).roll_back(round, rounds, directory.failure)
        record = directory.read_json(FEDERATION)
        rollbacks = [*record.get("rollbacks", []), {"to": round, "before": following}]
        directory.write_json(FEDERATION, record | {"rollbacks": rollbacks})
        (path / FAILED).unlink(missing_ok=True)
    return [
        f"{path}: round {following} will begin with the server's state after round {round}; "
        + START_AGAIN
    ]


def _federation(path: Path) -> RunDirectory:
    directory = RunDirectory.open(path)
    if not (path / FEDERATION).is_file():
        raise RunError(f"{path} is not the run of a federation: it has no {FEDERATION}")
    return directory


def _rounds(path: Path) -> int:
    return Result(path).experiment.rounds


def _absent(line: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted(line.get("absent", {}).items())
