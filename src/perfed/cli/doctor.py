"""``perfed doctor``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from perfed import doctor as examination


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON only.")] = False,
) -> None:
    """Show what this machine and installation can do, and what is missing for what."""
    report = examination.examine()
    print(json.dumps(report, indent=1) if as_json else examination.render(report))
