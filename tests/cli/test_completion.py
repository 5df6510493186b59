"""Shell completion through the shell's own protocol: environment variables of a real process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import perfed
from perfed.cli import completion
from tests import warm

PROGRAM = Path(sys.executable).with_name("perfed")


def offered(typed: str, shell: str = "bash") -> list[str]:
    """What is offered after ``typed`` and TAB."""
    asked = {
        "bash": {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)},
        "fish": {"_TYPER_COMPLETE_ARGS": typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    variables = {"_PERFED_COMPLETE": f"complete_{shell}"} | asked[shell]
    done = warm.perform([], env=os.environ | variables)
    assert done.stderr == ""
    return [line.split("\t")[0] for line in done.stdout.split("\n") if line]


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("perfed compare -a feda", ["fedavg", "fedavg-ft"]),
        ("perfed run digits-", ["digits-dirichlet", "digits-groups", "digits-permuted"]),
        ("perfed run mine", []),  # then the shell offers files
        ("perfed data get ", ["cifar10", "cifar100"]),
        ("perfed run --precision b", ["bf16"]),
    ],
)
def test_names_are_completed(typed: str, names: list[str]) -> None:
    assert offered(typed) == names


def test_every_name_there_is_and_none_else() -> None:
    assert completion.algorithms("") == sorted(perfed.algorithms)
    assert completion.engines("s") == ["sequential", "stacked"]
    assert completion.image_sets("x") == []


def test_another_shell_is_told_the_same() -> None:
    assert offered("perfed compare -a perfed", "fish") == [
        "perfed-ckt",
        "perfed-evidence",
        "perfed-kin",
    ]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_itself_completes_with_the_script_it_is_given(tmp_path: Path) -> None:
    script = subprocess.run(
        [PROGRAM],
        env=os.environ | {"_PERFED_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    (tmp_path / "completion.sh").write_text(script)
    lines = f"""
        source {tmp_path}/completion.sh
        COMP_WORDS=(perfed reproduce theo); COMP_CWORD=2
        $(complete -p perfed | sed -E 's/.*-F ([^ ]+).*/\\1/') {PROGRAM}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", lines], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.stdout.split() == ["theorem1", "theorem2"], done.stderr
