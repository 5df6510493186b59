"""``perfed federation`` and ``perfed site``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.flower import initialise, upkeep

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


@federation.command("gate")
def federation_gate(
    certificates: Annotated[
        Path, typer.Option(help="The folder with ca.crt, server.crt and server.key.")
    ] = Path("certificates"),
    superlink: Annotated[str, typer.Option(help="Address of the superlink.")] = "127.0.0.1:8000",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port that sites connect to.")] = 8443,
) -> None:
    """Let sites through to the superlink, and nobody else."""
    initialise.require_flower()
    from perfed.flower.gate import serve

    serve(superlink, certificates, host, port)


RUN = Annotated[Path, typer.Argument(metavar="[RUN]", help="The coordinator's run directory.")]


@federation.command("status")
def federation_status(run: RUN = Path("run")) -> None:
    """Is a process at work on the run? Who took no part? Ends with 1 where nobody is at work."""
    lines, well = upkeep.status(run)
    print("\n".join(lines))
    raise typer.Exit(0 if well else 1)


@federation.command("rollback")
def federation_rollback(
    to: Annotated[int, typer.Option(min=-1, help="The round after which the state was good.")],
    run: RUN = Path("run"),
) -> None:
    """Let the server go on from an earlier state; 'flwr run' then goes on with the next round."""
    print("\n".join(upkeep.roll_back(run, to)))


@federation.command("check")
def federation_check(
    file: Annotated[Path, typer.Argument(metavar="COORDINATOR.YAML")],
) -> None:
    """Check a coordinator's configuration; prints the hash of the public set."""
    print("\n".join(initialise.check_coordinator(file)))


@site.command("check")
def site_check(file: Annotated[Path, typer.Argument(metavar="SITE.YAML")]) -> None:
    """Before joining: is the data readable, does the model run, is the public set the right one?"""
    print("\n".join(initialise.check_site(file)))
