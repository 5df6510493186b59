"""A site that comes when the federation is over: it asks the gate for a handout, and trains with it
as in rounds of the federation. The answers of these rounds stay at the site."""

from __future__ import annotations

import dataclasses
import ssl
from contextlib import chdir
from pathlib import Path

import httpx

from perfed.core.errors import ConfigError, RunError
from perfed.core.message import Message
from perfed.flower.approval import Approvals
from perfed.flower.asking import PATH, Question
from perfed.flower.gate import REFUSED, SPEAKS_TLS
from perfed.flower.handout import Handout
from perfed.flower.kit import AUTHORITY, KEY, Link, make_key, read_link
from perfed.flower.ledger import LEFT, TOLD, described
from perfed.flower.plan import plan_hash
from perfed.flower.protocol import (
    EVALUATE,
    ROUND,
    Envelope,
    Header,
    check_same_protocol,
    check_same_public_set,
    one_line,
)
from perfed.flower.site import PERSONAL, Site

LEARN = "learn"  # in the ledger
SUFFIX = "+later"  # of the folder at the site: it may have been there earlier
PATIENCE = 60.0  # seconds
BESIDE = 2**24  # bytes of a handout that are no message: the plan, names


def fetch(site: Site) -> Handout:
    """From the coordinator's gate, whose address is beside the site's file."""
    link = read_link(site.folder)
    network = site.options.model.label()
    if link.tls:
        if made := make_key(site.folder, site.options.client):
            raise RunError(made)
        question = Question.signed(network, site.folder / KEY)
    else:
        question = Question(network)
    facts = [name for name, value in dataclasses.asdict(question).items() if value]
    nothing = described(Message(), dict.fromkeys(facts))
    site.ledger.add(LEFT, kind=LEARN, run=site.options.run, round=-1, **nothing)
    most = 2 * site.options.agrees.bytes_in + BESIDE  # a message to train with, one to evaluate
    return Handout.decode(_asked(link, site.folder, question, most))


def _asked(link: Link, folder: Path, question: Question, most: int) -> bytes:
    scheme = "https" if link.tls else "http"
    with httpx.Client(verify=_trusted(link, folder), timeout=PATIENCE) as client:
        url = f"{scheme}://{link.superlink}{PATH}"
        try:
            with client.stream("POST", url, content=question.encode()) as answer:
                content = bytearray()
                for piece in answer.iter_raw():
                    content += piece
                    if len(content) > most:
                        raise RunError(f"{link.superlink} sends more than {most} bytes")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise RunError(_no_answer(link, error)) from None
    if answer.status_code == REFUSED:
        said = one_line(content.decode("utf-8", "replace"))
        raise RunError(f"the coordinator gives no model: {said}")
    if answer.status_code == SPEAKS_TLS and not link.tls:
        raise RunError(f"{link.superlink} speaks TLS, and link.yaml says 'tls: false'")
    if answer.status_code != httpx.codes.OK:
        raise RunError(
            f"no gate of perfed's is at {link.superlink} (it answers {answer.status_code}): is "
            "'superlink' in link.yaml right?"
        )
    return bytes(content)


def _trusted(link: Link, folder: Path) -> ssl.SSLContext | bool:
    if not link.tls:
        return False
    try:
        return ssl.create_default_context(cafile=str(folder / AUTHORITY))
    except (OSError, ssl.SSLError):
        raise ConfigError(f"no certificate in {folder / AUTHORITY}: the kit has it") from None


def _no_answer(link: Link, error: Exception) -> str:
    why = one_line(str(error))
    if "CERTIFICATE_VERIFY_FAILED" in why:
        return f"{link.superlink} shows a certificate that {AUTHORITY} does not vouch for ({why})"
    if "WRONG_VERSION_NUMBER" in why:
        return f"{link.superlink} speaks no TLS, and link.yaml says 'tls: true'"
    return (
        f"no answer from {link.superlink} ({why}): is 'superlink' in link.yaml right, and does "
        "'perfed federation serve' run there?"
    )


def learn(site: Site, given: Handout, rounds: int | None) -> None:
    """Train this site's model with what a server knew at the end. Killed, it goes on where it
    was."""
    with chdir(site.folder), site.alone_here():
        check_same_protocol(given.header, "the coordinator")
        check_same_public_set(given.header, site.public, "the coordinator")
        for message in (given.down, given.evaluation):
            site.options.agrees.check_size(message, "in")
        plan = site.agreed(given.plan)
        # A newcomer's number is no number of the run's.
        clients = max(plan.clients, site.options.client + 1)
        widened = dataclasses.replace(plan, clients=clients)
        for fault in site.options.plan_faults(widened, len(site.samples.public_x) > 0):
            raise RunError(fault)
        rounds = plan.rounds if rounds is None else rounds
        if rounds > plan.rounds:
            raise ConfigError(f"{rounds} rounds, the plan has {plan.rounds}", "--rounds")
        Approvals(site.state, site.ledger).check(plan, site.agreed)
        run = given.header.run + SUFFIX
        why = f"a handout, plan {plan_hash(given.plan)[:12]}; no answer leaves"
        site.ledger.add(TOLD, kind=LEARN, run=run, round=rounds - 1, why=why)
        site.write_plan(Envelope(Header(ROUND, run, -1, site.public)), widened)
        plan = dataclasses.replace(widened, wire=())  # a handout is not coded
        _tell_what_there_is(site, given.header.run, rounds)
        for round in range(rounds):
            site.train_round(Envelope(Header(ROUND, run, round, site.public), given.down), plan)
        if plan.algorithm.evaluated_with_server:  # else each round was evaluated
            header = Header(EVALUATE, run, rounds - 1, site.public)
            site.evaluate_round(Envelope(header, given.evaluation), plan)


def _tell_what_there_is(site: Site, run: str, rounds: int) -> None:
    """Of models that this site has already: another one would be used from now on, or none made."""
    done = site.rounds_done(Envelope(Header(ROUND, run + SUFFIX, 0, site.public)))
    if done >= rounds:
        site.say(f"this site has learned for {done} rounds already: nothing more is trained")
    elif (there := site.state / run / PERSONAL).is_file():
        site.say(
            f"this site took part in the run: its model of then stays in {there}, and is not used "
            "from now on, because the new one is newer"
        )
