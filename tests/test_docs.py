"""What the documentation shows works as shown."""

import configparser
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import perfed
from perfed.algorithms.perfed_ckt import PerFedCKT
from perfed.config import Comparison, parse
from perfed.core.schema import to_mapping
from perfed.flower import initialise
from perfed.flower.agreement import Agreement
from perfed.flower.settings import SiteOptions
from tests import warm
from tests.pages import blocks, play

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
RUN = ("python", "sh", "yaml")
NOT_RUN = {
    "README.md": 3,
    "docs/benchmark.md": 1,
    "docs/engines.md": 2,
    "docs/federation.md": 13,
    "docs/guide.md": 3,
    "docs/hostile.md": 1,
    "docs/index.md": 2,
    "docs/install.md": 3,
    "docs/one-table.md": 1,
    "docs/operating.md": 4,
    "docs/reports.md": 2,
    "docs/reproduction.md": 3,
    "docs/use.md": 3,
}
"""Marks in a page that something in it is not run: each has a reason, and they are few."""


def code(file: str, language: str) -> list[str]:
    return [block.code for block in blocks(ROOT / file) if block.language == language]


@pytest.mark.long
@pytest.mark.parametrize(
    "file", [f for f in PAGES if {b.language for b in blocks(ROOT / f)} & {*RUN}]
)
def test_every_block_of_a_page_runs(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = play(ROOT / file, tmp_path)
    if file == "README.md":
        assert_that_it_works(made["result"])


def test_home_has_the_example_of_the_readme() -> None:
    assert code("docs/index.md", "python") == code("README.md", "python")[:1]


def test_the_example_is_what_validation_chose() -> None:
    """Its rate is the best one for local training, its clients a round the best for PerFed-CKT."""

    def best(method: str, **fixed: float) -> dict[str, float]:
        record = json.loads((RESULTS / f"first_example_{method}.json").read_text("utf-8"))
        assert min(record["seeds"]) >= 1000  # none that results are shown of
        trials = [t for t in record["trials"] if fixed.items() <= t["choice"].items()]
        chosen: dict[str, float] = max(trials, key=lambda t: sum(t["validation_accuracy"]))[
            "choice"
        ]
        return chosen

    shown = parse(yaml.safe_load(code("README.md", "yaml")[0]))
    assert isinstance(shown, Comparison)
    example = shown.experiment
    rate = example.training.learning_rate
    assert best("local")["training.learning_rate"] == rate
    default = {"training.learning_rate": rate, "algorithm.weight": PerFedCKT().weight}
    assert best("perfed-ckt", **default)["clients_per_round"] == example.clients_per_round


def assert_that_it_works(result: perfed.ComparisonResult) -> None:
    """What a newcomer is shown first gains over local training, and not by a hair."""
    local, *others = (run.summary["models"]["personal"]["last"] for run in result.results)
    assert len(others) == 2
    for other in others:
        assert other["test_accuracy"] > local["test_accuracy"] + 0.02


@pytest.mark.parametrize("file", PAGES)
def test_what_is_not_run_is_little_and_says_why(file: str) -> None:
    reasons = [reason for block in blocks(ROOT / file) for reason in block.not_run.values()]
    assert len(reasons) == NOT_RUN.get(file, 0), reasons
    assert len(reasons) == (ROOT / file).read_text("utf-8").count("<!-- not run")
    for block in blocks(ROOT / file):
        for text in block.not_run:
            assert text in block.code  # a mark that marks nothing hides something


@pytest.mark.parametrize("file", PAGES)
def test_no_command_hides_in_a_block_without_a_language(file: str) -> None:
    for block in blocks(ROOT / file):
        if block.language not in (*RUN, "ini"):
            assert block.language == ""
            assert not re.search(r"^\s*(perfed|pip|python|flwr|import) ", block.code, re.M)


def test_a_page_is_played_as_a_reader_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The player itself: order, one namespace, one folder, files by name, and what is left out."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    play(page, folder)
    assert (folder / "inner" / "seen").read_text() == "rounds: 2\n1\n"
    assert (folder / "named.py").is_file()
    for wrong in (
        "```sh\nfalse\ntrue\n```\n",
        "```python\n1 / 0\n```\n",
        "```yaml\nroundz: 1\n```\n",
    ):
        page.write_text(wrong)
        with pytest.raises((AssertionError, ZeroDivisionError)):
            play(page, folder)


PAGE = """
```yaml
# one.yaml
rounds: 2
```
```python
number = 1
```
```python
# named.py
raise SystemError("written, not run")
```
```sh
mkdir inner
cd inner
```
<!-- not run: it would fail -->
```sh
false
```
<!-- not run (wrong): it would fail -->
```sh
tail -n 1 ../one.yaml > seen
wrong
```
```python
with open("inner/seen", "a") as file:
    print(number, file=file)
```
"""


def test_the_algorithm_in_contributing_is_complete_short_and_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = code("CONTRIBUTING.md", "python")
    assert len(source.splitlines()) < 40
    (tmp_path / "half_way.py").write_text(source)
    command = ["compare", "-a", "local,participation=selected"]
    command += ["-a", "half_way:HalfWay,distance=0", "-a", "half_way:HalfWay,distance=0.3"]
    command += ["--set", "rounds=3", "--set", "evaluate_every=3", "--out", "out"]
    done = warm.perform(command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    results = perfed.ComparisonResult("out").results
    local, nothing, third = (r.per_client()["test_loss"].tolist() for r in results)
    assert nothing == local  # distance 0 is local training
    assert third != local


def test_the_reference_has_all_that_the_package_offers() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert not [name for name in perfed.__all__ if not re.search(rf"perfed\.{name}\b", page)]


@pytest.mark.parametrize(
    "file",
    ["CONTRIBUTING.md", "SECURITY.md", *PAGES],
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


@pytest.mark.parametrize("family", ["digits", "cifar", "vgg"])
def test_presets_have_the_weights_that_were_found(family: str) -> None:
    """For the partition they have: Dir(α), by its name in the results."""
    comparison = perfed.load(f"successor-{family}")
    found = json.loads((ROOT / f"benchmarks/results/successor_tune_{family}.json").read_text())
    chosen = found["chosen"][f"Dir({comparison.experiment.partition.alpha:g})"]  # type: ignore[union-attr]
    weights = {
        (a.registered_name, a.weight)  # type: ignore[attr-defined]
        for a in comparison.algorithms  # type: ignore[union-attr]
        if a.registered_name in chosen
    }
    assert weights == set(chosen.items())


@pytest.mark.parametrize("tls", [False, True])
def test_the_guide_starts_a_federation_as_init_says(tls: bool, tmp_path: Path) -> None:
    """What 'perfed federation init' prints and what the guide shows are the same commands."""
    guide = "\n".join(code("docs/federation.md", "sh"))
    _, *commands = initialise.initialise(tmp_path / "trial", 3, tls, [])
    for command in commands:
        assert command in guide, command


def test_the_guides_yaml_and_units_are_what_is_read() -> None:
    text, agreed = code("docs/federation.md", "yaml")
    written = yaml.safe_load(text)
    assert set(written) <= {field.name for field in fields(SiteOptions)}
    assert yaml.safe_load(agreed) == {"agrees": to_mapping(Agreement())}  # "without this section"
    for unit in code("docs/federation.md", "ini"):
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.read_string(unit)
        assert parser["Service"]["Restart"] == "always"
        assert "--insecure" not in parser["Service"]["ExecStart"]
