"""What is installed: whole without the source tree, and without what only POSIX systems have."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

BUILD = """
import setuptools.build_meta as backend, sys
folder = sys.argv[1]  # setuptools puts words of its own there
backend.build_sdist(folder)
backend.build_wheel(folder)
"""

# What Windows lacks is taken away from perfed's own modules; what torch and others use stays.
ELSEWHERE = """
import builtins, importlib, os, pkgutil, signal, sys
import flwr, matplotlib.pyplot, pandas, ray, rich, sklearn, torch, typer, yaml
POSIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
plain_import, plain_open = builtins.__import__, os.open

def importing(name, globals=None, *rest):
    asks = str((globals or {}).get("__name__"))
    if name.partition(".")[0] in POSIX and asks.startswith("perfed"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return plain_import(name, globals, *rest)

def opening(path, *rest, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return plain_open(path, *rest, **named)

builtins.__import__, os.open = importing, opening
for module, names in (
    (signal, "SIGHUP SIGKILL SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGPIPE alarm pause"),
    (os, "fork forkpty getuid geteuid getgid getpgid killpg setsid sysconf statvfs nice uname"
         " mkfifo sched_getaffinity sched_setaffinity register_at_fork chown fchmod O_NOFOLLOW"
         " O_DIRECTORY"),
):
    for name in names.split():
        delattr(module, name)
import perfed
from perfed import cli
assert perfed.__file__.startswith(sys.argv[1]), perfed.__file__
for module in pkgutil.walk_packages(perfed.__path__, "perfed."):
    if not module.name.endswith("__main__") and "triton" not in module.name:
        importlib.import_module(module.name)
for command in (
    ["compare", "-a", "local", "-a", "perfed-ckt", "--set", "rounds=2", "--set", "clients=6",
     "--set", "clients_per_round=3", "--out", "here"],
    ["run", "--resume", "here"],
    ["list"],
):
    sys.argv[1:] = command
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
print("version", perfed.__version__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel, without a network."""
    folder = tmp_path_factory.mktemp("built")
    own = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "tree" / "src", ignore=own)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / "tree")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, folder], cwd=folder / "tree", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_the_wheel_and_the_sdist_have_every_file(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    source = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/perfed").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as file:
        assert {name for name in file.namelist() if name.startswith("perfed/")} == source
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in source} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


@pytest.mark.long
def test_it_runs_from_the_wheel_alone_and_without_what_only_posix_has(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """Also where output cannot say λ, as a pipe on Windows."""
    with zipfile.ZipFile(built[1]) as file:
        file.extractall(tmp_path / "installed")
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", ELSEWHERE, str(tmp_path / "installed")],
        cwd=tmp_path / "work",
        env={
            "PATH": "",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(tmp_path / "installed"),
            "PYTHONIOENCODING": "cp1252",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        encoding="cp1252",
    )
    assert done.returncode == 0, done.stderr
    assert f"version {PROJECT['version']}" in done.stdout
    assert "perfed-ckt (c=3, ?=2)" in done.stdout
    assert (tmp_path / "work/here/report.html").is_file()


def test_the_citation_and_the_changelog_have_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1].strip("[]") in (PROJECT["version"], "Unreleased")
