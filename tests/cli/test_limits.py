"""Odd, broken and hostile configurations: one line, soon, and nothing on the disk."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfed.config import load_yaml
from perfed.core.errors import ConfigError
from tests.cli.test_cli import refusal

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.attack(51)
@pytest.mark.parametrize(
    "text",
    [
        BOMB + "about: *i\n",
        BOMB + "training: {steps: *i}\n",
        "".join(
            f"{n}: &{n} {{<<: [*{b}, *{b}, *{b}]}}\n"
            for b, n in zip("abcdefghijkl", "bcdefghijklm", strict=True)
        ).replace("b:", "a: &a {x: 1}\nb:", 1),
        "about: &a [*a]",
    ],
)
def test_aliases_count_as_what_they_stand_for(text: str, here: Path) -> None:
    """In a process of its own, which may have 16 GiB of addresses: the first version had no end."""
    (here / "bomb.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "perfed", "run", "bomb.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34)),
    )
    assert done.returncode == 2, done.stderr[-500:]
    assert done.stderr.startswith("perfed: bomb.yaml has ")
    assert done.stderr.count("\n") == 1


def test_aliases_may_be_used() -> None:
    assert load_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]", "it") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }


@pytest.mark.attack(52)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("about: 2001-99-99", "not valid YAML: '2001-99-99' cannot be read as timestamp"),
        ("seed: 0x_", "'0x_' cannot be read as int"),
        ("seed: " + "9" * 5000, "cannot be read as int"),
        ("seed: 0x" + "f" * 5000, "seed: <a number of 20000 bits> is out of range"),
        ("about: 0x" + "f" * 5000, "about: expected str, got int <a number of 20000 bits>"),
        ("seed: !!int abc", "'abc' cannot be read as int"),
        ("seed: !!int ''", "'' cannot be read as int"),
        ("about: !!bool maybe", "'maybe' cannot be read as bool"),
        ("about: !!timestamp soon", "'soon' cannot be read as timestamp"),
        ('about: "\\U00110000"', "there is no such character"),
        ("about: " + "[" * 3000, "has values more than 50 deep inside each other"),
        ("about: " + "{a: " * 3000, "has values more than 50 deep inside each other"),
        ('about: "\\ud800"', r"about: '\ud800' is half a character"),
        ("clients: 10000000000", "clients: 10000000000 is out of range: must be at most 1000000"),
        ("training: {batch_size: 1000000000}", "training.batch_size: 1000000000 is out of range"),
        ("training: {batch_size: 9223372036854775808}", "training.batch_size: 9223372036854775808"),
        ("training: {public_batch_size: 1000000000}", "training.public_batch_size: 1000000000 is"),
        ("rounds: 9223372036854775808", "is out of range: must be at most 9223372036854775807"),
        ("data: {name: npz, path: ~nosuchuser/x.npz}", "data.path: '~nosuchuser/x.npz': ~nosuch"),
        ("k" * 100_000 + "\n: 1", "is not valid YAML"),
        ("? " + "k" * 100_000 + "\n: 1", "unknown key"),
        ("algorithm: " + "k" * 100_000, "unknown algorithm"),
        ("name: " + "k" * 5_000, "cannot name a folder"),
        ("selection: " + "k" * 100_000, "is none of"),
        ("clients: " + "k" * 100_000, "expected a whole number, got str"),
    ],
)
def test_odd_values(
    text: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    here: Path,
) -> None:
    (here / "odd.yaml").write_text(text)
    error = refusal(monkeypatch, capsys, "run", "odd.yaml")
    assert message in error
    assert len(error) < 1000
    assert not (here / "runs").exists()


@pytest.mark.attack(53)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("about: " + "word " * 2_000_000, "has more than 1,000,000 characters"),
        ("about: " + "word " * 100_000, "about: 499,999 characters: must be at most 10,000"),
        ("{" + ", ".join(f"{n}: 1" for n in range(90_000)) + "}", "more than 100,000 keys and"),
        ("\n".join(f"k{n}: 1" for n in range(400_000)), "has more than 1,000,000 characters"),
    ],
    ids=["10 MB", "500 kB", "90,000 keys", "400,000 keys"],
)
def test_large_files_are_refused_soon(
    text: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    here: Path,
) -> None:
    (here / "large.yaml").write_text(text)
    began = time.process_time()
    assert message in refusal(monkeypatch, capsys, "run", "large.yaml")
    assert time.process_time() - began < 10


@pytest.mark.attack(52)
@pytest.mark.parametrize("seeds", ["0-99999999999", "0-9,10-99999", "1" * 5000])
def test_too_many_seeds(
    seeds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(monkeypatch, capsys, "compare", "--seeds", seeds)
    assert error.startswith("perfed: --seeds: ")
    assert len(error) < 1000


@pytest.mark.attack(52)
@pytest.mark.parametrize(
    "arguments",
    [
        ["init", "--yes", "--data", "~nosuchuser/x"],
        ["data", "list", "~nosuchuser/x"],
        ["data", "get", "cifar10", "--from", "~nosuchuser/x", "--to", "."],
        ["run", "--set", "data={name: npz, path: ~nosuchuser/x}"],
    ],
)
def test_a_home_of_nobody(
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    here: Path,
) -> None:
    said = "'~nosuchuser/x': ~nosuchuser is no user's home folder here"
    assert said in refusal(monkeypatch, capsys, *arguments)


def test_a_machine_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    monkeypatch.setattr("perfed.load", none_left)
    assert "not enough memory: fewer clients" in refusal(monkeypatch, capsys, "run")


def test_json_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    for text in ("[" * 100_000, "9" * 5000):
        with pytest.raises(ConfigError, match="is not JSON"):
            load_yaml(text, "it")


@pytest.mark.attack(54)
@pytest.mark.parametrize(
    "command", ["run", "compare", "tune", "reproduce costs", "report .", "export ."]
)
def test_no_path_is_not_the_working_directory(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    error = refusal(monkeypatch, capsys, *command.split(), "--out", "")
    assert error.startswith("perfed: --out: '' is no path: name one")
    assert not list(here.iterdir())
