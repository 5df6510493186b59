"""The tests with the oldest and the newest packages that pyproject.toml admits.

    python benchmarks/versions.py oldest --python python3.11
    python benchmarks/versions.py newest --python python3.14

Each makes an environment in build/versions (several gigabytes, where torch comes with CUDA), runs
the tests of what needs no large extra (a quarter of an hour on two cores), and writes its line of
benchmarks/results/versions.json. The line of another Python stays as it is. With --again it runs
only what did not pass, in the same environment, and adds that to the line.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from committed import RESULTS, ROOT
from packaging.requirements import Requirement

RECORD = RESULTS / "versions.json"
FOLDERS = [
    "algorithms",
    "cli",
    "core",
    "data",
    "engines",
    "models",
    "plugins",
    "report",
    "runs",
    "use",
]
EXTRAS = ("parquet", "tensorboard", "tune")
"""Small ones; their tests are in the folders."""
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "safetensors", "websockets"]
COUNTED = ("passed", "failed", "skipped", "errors")

NAME = "import sys; print('%d.%d' % sys.version_info[:2])"
ASK = """
import importlib.metadata, json, platform, sys
found = {name: importlib.metadata.version(name) for name in sys.argv[1:]}
print(json.dumps({"python": platform.python_version(), "packages": found}))
"""


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [text for name in EXTRAS for text in project["optional-dependencies"][name]]
    return [Requirement(text) for text in [*project["dependencies"], *extras]]


def lowest(requirement: Requirement) -> str:
    """The same package, in the first version that is admitted."""
    (least,) = (one.version for one in requirement.specifier if one.operator == ">=")
    return f"{requirement.name}=={least}"


def environment(packages: str, python: str, folder: Path) -> None:
    """A new one, with perfed in it."""
    shutil.rmtree(folder, ignore_errors=True)
    # The pip at hand installs into it: some distributions' Pythons have none.
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    install = [sys.executable, "-m", "pip", "--python", folder, "install", "--quiet"]
    if packages == "oldest":
        limits = folder / "limits.txt"
        limits.write_text("\n".join(map(lowest, requirements())) + "\n", "utf-8")
        install += ["--constraint", limits]
    subprocess.run([*install, "--editable", f"{ROOT}[{','.join(EXTRAS)}]", *TOOLS], check=True)


def tests(packages: str, folder: Path, *which: str) -> dict[str, Any]:
    command = [folder / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", *which]
    if packages == "oldest":  # packages of different years warn of each other
        command += ["-W", "default"]
    log = folder / "tests.log"
    print(f"tests: {log}")
    with open(log, "w", encoding="utf-8") as file:
        subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    return outcome(log.read_text("utf-8"))


def outcome(said: str) -> dict[str, Any]:
    """How many tests passed and so on, and the names of those that did not."""
    *_, last = said.strip().splitlines()
    counts = {word.rstrip("s"): int(n) for n, word in re.findall(r"(\d+) (\w+)", last)}
    bad = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", said, re.MULTILINE)
    return {word: counts.get(word.rstrip("s"), 0) for word in COUNTED} | {"not_passed": bad}


def whole(packages: str, folder: Path) -> dict[str, Any]:
    names = [requirement.name for requirement in requirements()]
    ask = [folder / "bin" / "python", "-c", ASK, *names]
    answer = subprocess.run(ask, check=True, capture_output=True, text=True).stdout
    folders = [f"tests/{name}" for name in FOLDERS]
    found = tests(packages, folder, "-n", "2", "--dist", "worksteal", *folders)
    return {"which": packages, **json.loads(answer), "folders": FOLDERS, **found}


def again(line: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What did not pass, once more and alone: on a busy machine a test may wait too long."""
    second = tests(line["which"], folder, *line["not_passed"])
    passed = sorted(set(line["not_passed"]) - set(second["not_passed"]))
    for word in ("passed", "skipped"):
        second[word] += line[word]
    return line | second | {"second_try": passed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", choices=("oldest", "newest"))
    parser.add_argument("--python", default=sys.executable, help="the interpreter to use")
    parser.add_argument("--again", action="store_true", help="only what did not pass last time")
    given = parser.parse_args()
    named = subprocess.run([given.python, "-c", NAME], check=True, capture_output=True, text=True)
    name = f"{given.packages}, Python {named.stdout.strip()}"
    folder = ROOT / "build" / "versions" / f"{given.packages}-python{named.stdout.strip()}"
    if given.again:
        line = again(json.loads(RECORD.read_text("utf-8"))[name], folder)
    else:
        environment(given.packages, given.python, folder)
        line = whole(given.packages, folder)
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    record[name] = line | {"date": datetime.now(UTC).date().isoformat()}
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
