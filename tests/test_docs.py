"""What the documentation shows works as shown."""

import configparser
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import perfed
from perfed.config import parse
from perfed.flower import initialise
from perfed.flower.settings import SiteOptions

ROOT = Path(__file__).parents[1]


def blocks(file: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text("utf-8"), re.S)


def test_the_readmes_python_runs(tmp_path: Path) -> None:
    (code,) = blocks("README.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "perfed-ckt (c=3, λ=1)" in done.stdout


def test_the_readmes_yaml_is_an_experiment(tmp_path: Path) -> None:
    (text,) = blocks("README.md", "yaml")
    comparison = parse(yaml.safe_load(text))
    assert isinstance(comparison, perfed.Comparison)
    assert len(comparison.experiments()) == 12


def test_the_algorithm_in_contributing_is_complete_short_and_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = blocks("CONTRIBUTING.md", "python")
    assert len(code.splitlines()) < 40
    (tmp_path / "half_way.py").write_text(code)
    command = [sys.executable, "-m", "perfed", "compare", "-a", "local,participation=drawn"]
    command += ["-a", "half_way:HalfWay,distance=0", "-a", "half_way:HalfWay,distance=0.3"]
    command += ["--set", "rounds=3", "--set", "evaluate_every=3", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    results = perfed.ComparisonResult("out").results
    local, nothing, third = (r.per_client()["test_loss"].tolist() for r in results)
    assert nothing == local  # distance 0 is local training
    assert third != local


@pytest.mark.parametrize(
    "file",
    [
        "README.md",
        "CONTRIBUTING.md",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    ],
)
def test_links_lead_somewhere(file: str) -> None:
    text = (ROOT / file).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert ((ROOT / file).parent / target).exists(), target


def test_tables_in_the_documentation_are_what_the_results_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "render.py", "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tls", [False, True])
def test_the_guide_starts_a_federation_as_init_says(tls: bool, tmp_path: Path) -> None:
    """What 'perfed federation init' prints and what the guide shows are the same commands."""
    guide = "\n".join(blocks("docs/federation.md", "sh"))
    _, *commands = initialise.initialise(tmp_path / "trial", 3, tls, [])
    shown = [line for line in commands if not tls or "superlink --disable" in line]
    for command in shown:
        assert command in guide, command


def test_the_guides_yaml_and_units_are_what_is_read() -> None:
    (text,) = blocks("docs/federation.md", "yaml")
    written = yaml.safe_load(text)
    assert set(written) <= {field.name for field in fields(SiteOptions)}
    for unit in blocks("docs/federation.md", "ini"):
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.read_string(unit)
        assert parser["Service"]["Restart"] == "always"
        assert "--insecure" not in parser["Service"]["ExecStart"]
