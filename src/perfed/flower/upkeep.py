"""What the coordinator's operator can do to a run from outside: look whether it lives, and take the
server back to an earlier state."""

from __future__ import annotations

import time
from pathlib import Path

from perfed.core.errors import RunError
from perfed.flower.overview import AT_WORK, DEAD, FAILED, FINISHED, federation, look, table
from perfed.runs.checkpoint import Checkpoints
from perfed.runs.directory import FAILED as FAILED_FILE
from perfed.runs.directory import FEDERATION
from perfed.runs.result import Result

START_AGAIN = "start it again with 'perfed federation start' in the coordinator's folder"


def status(path: Path) -> tuple[list[str], bool]:
    """What there is to say of a run, and whether all is well: it is at work, or at its end."""
    run = look(path)
    ago = max(0.0, time.time() - run.newest)
    lines = [f"{path}: {run.rounds_done} of {run.rounds} rounds are done"]
    lines.append(
        {
            AT_WORK: f"at work; its newest line is {ago:.0f} s old",
            FINISHED: "finished",
            FAILED: f"ended: {run.failure}",
            DEAD: f"NOT at work: no process has it, and its newest line is {ago:.0f} s old; "
            + START_AGAIN,
        }[run.state]
    )
    facts = [f"{run.bytes:,} bytes in messages"]
    facts += [] if run.accuracy is None else [f"accuracy {100 * run.accuracy:.1f} %"]
    facts += [] if run.epsilon is None else [f"ε {run.epsilon:.2f}"]
    lines += [", ".join(facts), "", table(run), ""]
    lines += [f"round {run.rounds_done - 1}: {sign}" for sign in run.suspect]
    lines += [f"{who} may not join: {why}" for who, why in run.kept_out.items()]
    return (lines if lines[-1] else lines[:-1]), run.well


def roll_back(path: Path, round: int) -> list[str]:
    """The server goes on from the state that it had after ``round``.

    Rounds are not done again, and logs stay as they are: a site never does a round twice, its
    model is its own, and random numbers, among them those of privacy noise, belong to a round.
    """
    directory, rounds = federation(path), _rounds(path)
    with directory.locked():
        if directory.finished:
            raise RunError(f"{path} is finished: there is no round left to go on with")
        # Sites have done the round in which a server fails: again, they would answer the same.
        following = Checkpoints(directory).roll_back(round, rounds, directory.failure)
        record = directory.read_json(FEDERATION)
        rollbacks = [*record.get("rollbacks", []), {"to": round, "before": following}]
        directory.write_json(FEDERATION, record | {"rollbacks": rollbacks})
        (path / FAILED_FILE).unlink(missing_ok=True)
    return [
        f"{path}: round {following} will begin with the server's state after round {round}; "
        + START_AGAIN
    ]


def _rounds(path: Path) -> int:
    return Result(path).experiment.rounds
