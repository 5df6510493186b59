"""The code blocks of a Markdown page, and how to run them as a reader would, top to bottom.

``python`` blocks share one namespace, ``sh`` blocks one working directory, and a ``yaml`` block is
to be a configuration. A block whose first line names a file, as ``# mine.yaml``, is written to it.
What cannot run here says so before the block, with a reason::

    <!-- not run: needs a GPU -->             the whole block
    <!-- not run (bench): takes minutes -->   its lines in which 'bench' occurs
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from perfed.config import Experiment, parse
from perfed.flower.settings import SiteOptions
from perfed.runs.design import design
from tests import warm

MARK = r"<!-- not run(?: \(([^)]+)\))?: (.+?) -->\n"
FENCE = re.compile(rf"((?:{MARK})*)^```(\w*)\n(.*?)^```$", re.S | re.M)
NAMED = re.compile(r"# ([\w-]+\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    not_run: dict[str, str]
    """Reasons, by the text that the lines have which are not run; '' stands for all of them."""

    def runnable(self) -> str:
        """The code without what is not run."""
        if "" in self.not_run:
            return ""
        lines = self.code.splitlines(keepends=True)
        return "".join(line for line in lines if not any(text in line for text in self.not_run))


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = []
    for match in FENCE.finditer(text):
        marks = dict(re.findall(MARK, match[1]))
        line = text.count("\n", 0, match.start(5)) + 1
        found.append(Block(match[4], match[5], line, marks))
    return found


def play(page: Path, folder: Path) -> dict[str, Any]:
    """Run a page's blocks in ``folder``, which must be the working directory, and empty.
    Returns the names that its Python blocks have made."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shell = Shell(folder)
    for block in blocks(page):
        code, where = block.runnable(), f"{page.name}:{block.line}"
        if not code:
            continue
        if named := NAMED.match(code):
            (folder / named[1]).write_text(code, "utf-8")
        if block.language == "yaml":
            check_configuration(yaml.safe_load(code))
        elif block.language == "python" and not named:
            exec(compile("\n" * (block.line - 1) + code, str(page), "exec"), namespace)
        elif block.language == "sh":
            shell.run(code, where)
    return namespace


def check_configuration(values: dict[str, Any]) -> None:
    """An experiment, a comparison or a study; or else a site's, whose files are not here."""
    if "methods" in values:
        design(values)
    elif values.keys() <= {field.name for field in fields(Experiment)} | {"algorithms", "seeds"}:
        parse(values)
    else:
        assert values.keys() <= {field.name for field in fields(SiteOptions)}


class Shell:
    """A shell that stays where the last block went."""

    def __init__(self, folder: Path) -> None:
        self._home = self._folder = folder
        programs = Path(sys.executable).parent
        self._environment = os.environ | {
            "PATH": os.pathsep.join([str(warm.programs()), str(programs), os.environ["PATH"]]),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, code: str, where: str) -> None:
        remember = self._home / ".folder"
        script = f"set -euo pipefail\ntrap 'pwd > \"{remember}\"' EXIT\n{code}"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
        self._folder = Path(remember.read_text().strip())
