"""``perfed federation`` and ``perfed site``: parse, call, print."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from perfed.cli.options import JsonOption, print_json
from perfed.core.errors import ConfigError, printable
from perfed.flower import backup, initialise, upkeep
from perfed.flower.approval import SHORT, Approvals
from perfed.flower.kit import GATE, SITE, write_kits
from perfed.flower.ledger import NEWEST, Ledger
from perfed.flower.overview import look
from perfed.flower.settings import read_site

federation = typer.Typer(help="A real federation, on Flower.", no_args_is_help=True)
site = typer.Typer(help="One site of a real federation.", no_args_is_help=True)


@federation.command("init")
def federation_init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    sites: Annotated[int, typer.Option(min=1, help="How many sites.")] = 3,
    tls: Annotated[
        bool, typer.Option("--tls", help="Also make certificates and node keys, to try TLS.")
    ] = False,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address of the superlink, with --tls.")
    ] = None,
) -> None:
    """Write the Flower app, the coordinator's and the sites' configurations."""
    lines = initialise.initialise(folder, sites, tls, host or [])
    print("written; to try it here, each command in a terminal of its own, after the first line:")
    print("\n".join(f"  {line}" for line in lines))


@federation.command("try")
def federation_try(
    sites: Annotated[int, typer.Option(min=1, max=50, help="How many sites.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds.")] = 5,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep all files, in a new folder.")
    ] = None,
) -> None:
    """Run a whole federation on this machine, with digits: superlink, sites, a run, the table."""
    initialise.require_flower()
    from perfed.flower.services import Stopped
    from perfed.flower.trial import try_out

    try:
        try_out(sites, rounds, keep)
    except Stopped:
        print("stopped; nothing is left running", flush=True)
        raise typer.Exit(130) from None


@federation.command("serve")
def federation_serve(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder that 'init' wrote.")
    ] = Path(),
    host: Annotated[
        str,
        typer.Option(help="Address where sites come in; default: with TLS any, else 127.0.0.1."),
    ] = "",
    port: Annotated[int, typer.Option(help="Port where sites come in.")] = GATE,
) -> None:
    """Run the coordinator's superlink and gate until you stop them; register certificates/*.pub."""
    initialise.require_flower()
    from perfed.flower.services import serve

    serve(folder, host, port)


@federation.command("kits")
def federation_kits(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder that 'init' wrote.")
    ] = Path(),
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where sites find the federation.")
    ] = "",
) -> None:
    """Pack a start-up kit for every site-*.yaml: one archive, one command at the site."""
    for kit in write_kits(folder, address):
        print(kit)


@federation.command("gate")
def federation_gate(
    certificates: Annotated[
        Path, typer.Option(help="The folder with ca.crt, server.crt and server.key.")
    ] = Path("certificates"),
    superlink: Annotated[str, typer.Option(help="Address of the superlink.")] = "127.0.0.1:8000",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",  # noqa: S104 - sites come from outside
    port: Annotated[int, typer.Option(help="Port that sites connect to.")] = GATE,
    run: Annotated[
        Path, typer.Option(help="The run directory: sites that come later get a model of it.")
    ] = Path("run"),
) -> None:
    """Let sites, and nobody else, through to the superlink; 'serve' does this, too."""
    initialise.require_flower()
    from perfed.flower.gate import serve

    serve(superlink, certificates, run, host, port)


RUN = Annotated[Path, typer.Argument(metavar="[RUN]", help="The coordinator's run directory.")]


@federation.command("status")
def federation_status(run: RUN = Path("run"), as_json: JsonOption = False) -> None:
    """Show whether a process works on the run, and who is there; ends with 1 if no process does."""
    if as_json:
        state = look(run)
        print_json(state.to_mapping(), indent=1)
        raise typer.Exit(0 if state.well else 1)
    lines, well = upkeep.status(run)
    print("\n".join(lines))
    raise typer.Exit(0 if well else 1)


def _in_its_folder(file: Path) -> Path:
    """``site start`` takes the folder that a kit was unpacked to, so the others take it, too."""
    return inside if (inside := file / SITE).is_file() else file


SITE_FILE = Annotated[
    Path,
    typer.Argument(metavar="SITE.YAML", callback=_in_its_folder, help="Or the folder it is in."),
]
HOST = Annotated[str, typer.Option(help="Address to listen on.")]
METRICS_PORT = Annotated[int, typer.Option(help="Port to listen on; 0: any.")]


@federation.command("metrics")
def federation_metrics(
    run: RUN = Path("run"), host: HOST = "127.0.0.1", port: METRICS_PORT = 9464
) -> None:
    """Serve health and numbers of a run over HTTP, for Prometheus: /health and /metrics."""
    metrics = _metrics()
    numbers, health = partial(metrics.of_run, run), partial(metrics.health_of_run, run)
    metrics.serve(metrics.application(numbers, health, "client"), host, port)


@federation.command("rollback")
def federation_rollback(
    to: Annotated[int, typer.Option(min=-1, help="The round after which the state was good.")],
    run: RUN = Path("run"),
) -> None:
    """Put the server back to an earlier state; 'start' then goes on with the round after it."""
    print("\n".join(upkeep.roll_back(run, to)))


@federation.command("check")
def federation_check(
    file: Annotated[Path, typer.Argument(metavar="COORDINATOR.YAML")],
    plan: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.JSON", help="Also write the plan that sites would get."),
    ] = None,
) -> None:
    """Check a coordinator's configuration, and print the hash of the public set."""
    print("\n".join(initialise.check_coordinator(file, plan)))


@federation.command("start")
def federation_start(
    app: Annotated[
        Path | None,
        typer.Argument(
            metavar="[APP]", help="A signed app.fab, or a folder; default: the one that is here."
        ),
    ] = None,
    database: Annotated[Path, typer.Option(help="The superlink's.")] = Path("superlink.db"),
    stream: Annotated[bool, typer.Option(help="Show what the run says.")] = True,
) -> None:
    """Start the run, or continue a stopped one, and show what it says."""
    initialise.require_flower()
    from perfed.flower.signing import start

    os.environ.setdefault("FLWR_HOME", str(Path("flwr-home").absolute()))
    signed = Path(initialise.SIGNED)
    start(app or (signed if signed.is_file() else Path("app")), database, stream)


@federation.command("unregister")
def federation_unregister(
    key: Annotated[
        Path, typer.Argument(metavar="KEY.PUB", help="Its file: certificates/site-1.pub, say.")
    ],
) -> None:
    """Let a site come in no more: it left, or its key was stolen. While 'serve' runs."""
    initialise.require_flower()
    from perfed.flower.unregistering import unregister

    os.environ.setdefault("FLWR_HOME", str(Path("flwr-home").absolute()))
    print(f"this key is registered no more; its file is now {unregister(key)}")


@federation.command("release")
def federation_release(
    file: Annotated[Path, typer.Argument(metavar="COORDINATOR.YAML")],
    client: Annotated[int, typer.Argument(metavar="CLIENT", help="The number.")],
    name: Annotated[
        str, typer.Argument(metavar="SITE", help="The site's key, SHA256:…, or its name.")
    ],
) -> None:
    """Give a client's number to another site, or to a site with a new key."""
    initialise.require_flower()
    from perfed.flower.coordinator import release

    release(file, client, name)
    print(f"{name} has number {client} when it comes")


@site.command("learn")
def site_learn(
    kit: Annotated[
        Path,
        typer.Argument(metavar="KIT", help="A kit, its folder, or the .yaml file in it."),
    ],
    handout: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file of the coordinator's 'run/handouts', instead of asking the coordinator.",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of training; default: as the federation had.")
    ] = None,
) -> None:
    """Get a model from a federation that is over, and train it with this site's own data."""
    initialise.require_flower()
    from perfed.flower.handout import Handout
    from perfed.flower.kit import open_kit
    from perfed.flower.later import fetch, learn
    from perfed.flower.site import Site

    file = kit if kit.suffix in (".yaml", ".yml") else open_kit(kit) / SITE
    opened = Site.open(file, partial(print, flush=True))
    learn(opened, fetch(opened) if handout is None else Handout.load(handout), rounds)
    print(f"the model: perfed predict {file} PATH, or perfed serve {file}")


@site.command("check")
def site_check(
    file: SITE_FILE,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.JSON",
            help="The coordinator's plan ('perfed federation check --plan'): would it be refused?",
        ),
    ] = None,
) -> None:
    """Find all faults before joining: data, splits, model, public set, and the site's terms."""
    found = initialise.check_site(file, plan)
    for line in (*found.lines, *(f"notice: {line}" for line in found.notices)):
        print(printable(line))
    for line in found.faults:
        print(f"perfed: {printable(line)}", file=sys.stderr)
    if found.faults:
        raise typer.Exit(2)


@site.command("start")
def site_start(
    kit: Annotated[
        Path, typer.Argument(metavar="KIT", help="A kit, or the folder that it was unpacked to.")
    ],
) -> None:
    """Take part in a federation until you stop it. A kit is first unpacked beside itself."""
    initialise.require_flower()
    from perfed.flower.kit import open_kit
    from perfed.flower.services import start_site

    start_site(open_kit(kit))


@site.command("sign")
def site_sign(
    app: Annotated[Path, typer.Argument(metavar="APP.FAB", help="The coordinator's app.")],
    key: Annotated[Path, typer.Option(help="Your Ed25519 key (ssh-keygen -t ed25519).")],
) -> None:
    """Sign the coordinator's app if it has no code; your supernode then runs it and no other."""
    initialise.require_flower()
    from perfed.flower.signing import sign

    print("\n".join(sign(app, key)))


@site.command("ledger")
def site_ledger(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="SITE.YAML",
            callback=_in_its_folder,
            help="Or the folder it is in, or the site's state folder.",
        ),
    ],
    everything: Annotated[
        bool, typer.Option("--all", help=f"All lines, not the newest {NEWEST} alone.")
    ] = False,
) -> None:
    """Show what this site was asked, sent and refused, and whether the record was changed."""
    ledger = Ledger(file if file.is_dir() else _state(file))
    contents = ledger.read()
    print(contents.table(None if everything else NEWEST).text())
    contents.check(ledger.path)
    print(f"\n{contents.lines} lines, none changed or missing; the last has {contents.hash}")


@site.command("metrics")
def site_metrics(file: SITE_FILE, host: HOST = "127.0.0.1", port: METRICS_PORT = 9465) -> None:
    """Serve health and numbers of a site over HTTP, for Prometheus: /health and /metrics."""
    metrics = _metrics()
    numbers, health = partial(metrics.of_site, file), partial(metrics.health_of_site, file)
    metrics.serve(metrics.application(numbers, health, "event"), host, port)


@site.command("backup")
def site_backup(
    file: SITE_FILE, out: Annotated[Path, typer.Argument(metavar="FILE", help="A new .tar.gz.")]
) -> None:
    """Save a site's state in one file, also while it runs: models, progress, approvals, ledger."""
    print(f"{out}: {backup.backup(file, out)} files; it holds the site's models: keep it safe")


@site.command("restore")
def site_restore(
    file: SITE_FILE, backed_up: Annotated[Path, typer.Argument(metavar="FILE")]
) -> None:
    """Put a backup in the place of the site's state, which is kept under another name."""
    replaced = backup.restore(file, backed_up)
    print(f"restored{f'; what was here is now {replaced}' if replaced else ''}")


@site.command("approve")
def site_approve(
    file: SITE_FILE,
    plan: Annotated[
        str, typer.Argument(metavar="[HASH]", help="Of the plan to approve; without: show it.")
    ] = "",
) -> None:
    """Approve a plan other than the one this site joined with before."""
    state = _state(file)
    approvals = Approvals(state, Ledger(state))
    if plan:
        print("\n".join(["approved:", *approvals.approve(plan)]))
        return
    waiting = approvals.waiting()
    if waiting is None:
        print("no plan waits here")
        return
    hash, changes = waiting
    print("\n".join(["a plan waits, in which", *changes]))
    print(f"to approve it: perfed site approve {file} {hash[:SHORT]}")


def _metrics() -> ModuleType:
    try:
        return importlib.import_module("perfed.flower.metrics")
    except ModuleNotFoundError as error:
        raise ConfigError(f"needs {error.name}: pip install 'perfed[metrics]'") from None


def _state(file: Path) -> Path:
    return file.absolute().parent / read_site(file).state
