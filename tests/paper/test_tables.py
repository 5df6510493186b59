"""Tables 1 and 2: what is printed, what is run, what is shown."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perfed.cli import app, paper
from perfed.core.layout import Table
from perfed.paper.published import GRID, TABLE_1, TABLE_2
from perfed.paper.reproduce import SINGLE
from perfed.paper.tables import (
    TableRun,
    findings,
    plot,
    table_run,
    tables,
    tuned_settings,
    with_options,
)
from perfed.runs.study import Study
from perfed.runs.tune import best
from tests.conftest import SEQUENTIAL

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_what_the_text_of_the_paper_says_of_its_tables() -> None:
    first, second = (
        {row.label: row.accuracy for row in table if row.accuracy} for table in (TABLE_1, TABLE_2)
    )
    clusters = [first[f"PerFed-CKT (c={c})"] for c in (1, 2, 3, 4)]
    for column in (0, 1):  # "For both C=0.1 and C=0.15, c=3 achieves the best"
        assert max(clusters, key=lambda row: row[column][0]) is first["PerFed-CKT (c=3)"]
        assert max(first.values(), key=lambda row: row[column][0]) is first["FedFomo"]
    assert second["PerFed-CKT (c=2)"][0][0] == 72.25
    assert [len(choices) for choices in GRID.values()] == [5, 3, 3, 3, 6]


@pytest.mark.parametrize("number", [1, 2])
def test_every_row_has_its_runs(number: Any) -> None:
    chosen = table_run(number, quick=True)
    study = chosen.study("unused")
    for row in chosen.rows:
        names = [chosen.name(row.algorithm, 1 / 3, seed) for seed in (0, 1, 2)]
        assert set(names) <= set(study.experiments)
    methods = {str(row.algorithm) for row in chosen.rows}
    assert len(study.experiments) == 3 * len(methods)
    assert next(iter(study.experiments)).startswith("paper-C0.333-majority")


def test_some_methods_are_run_and_all_are_shown(tmp_path: Path) -> None:
    command = ["reproduce", "table1", "--quick", "--rounds", "2", "--seeds", "0", "--out"]
    for method in ("majority", "local"):
        done = CliRunner().invoke(app, [*command, str(tmp_path), "--methods", method])
        assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "table1/records").iterdir()) == [
        "paper-C0.333-local-seed0.json",
        "paper-C0.333-majority-seed0.json",
    ]
    assert "local training" in done.output
    assert "majority label" in done.output


def test_the_papers_settings() -> None:
    whole = TableRun()
    experiment = whole.experiment({"name": "perfed-ckt", "clusters": 3}, 0.15, 2)
    training = experiment.training
    assert (training.learning_rate, training.batch_size) == (0.001, 64)
    assert (training.steps, training.public_batch_size) == (50, 128)
    assert experiment.algorithm.label() == "perfed-ckt (c=3, λ=2)"
    assert (experiment.clients, experiment.clients_per_round, experiment.rounds) == (100, 15, 500)
    assert (experiment.seed, experiment.evaluate_every) == (2, 10)
    local = whole.experiment({"name": "local"}, 0.1, 0)
    assert local.rounds == 50  # everyone trains, as often as a client is drawn in 500 rounds
    assert experiment.partition.label() == "dirichlet"
    assert whole.experiment({"name": "feddf"}, 0.1, 0).algorithm.steps == 400


def test_the_tuned_settings_are_what_tuning_found() -> None:
    settings = tuned_settings()
    for name, chosen in settings.items():
        result = json.loads((RESULTS / "tune" / f"{name}.json").read_text())
        assert chosen == best(result), name
        assert all(seed >= 1000 for seed in result["seeds"])
    experiment = TableRun(settings="tuned").experiment(
        {"name": "perfed-ckt", "clusters": 1}, 0.1, 0
    )
    assert experiment.training.learning_rate == settings["perfed-ckt"]["training.learning_rate"]
    assert experiment.algorithm.weight == settings["perfed-ckt"]["algorithm.weight"]


def fake(seed: int, accuracy: list[float], kind: str = "personal") -> dict[str, Any]:
    mean = sum(accuracy) / len(accuracy)
    at = {"test_accuracy": mean, "validation_accuracy": 0.5}
    return {
        "config": {"seed": seed, "clients": 4},
        "curve": {kind: [[4, mean - 0.2, 0.5], [7, mean - 0.02, 0.5], [9, mean, 0.5]]},
        "summary": {
            "rounds": 10,
            "models": {kind: dict.fromkeys(("last", "chosen", "best_test"), at)},
            "traffic": {"up_parameters": 3_500_000, "down_parameters": 2_000_000},
        },
        "opening": {"up_parameters": 500_000},
        "clients": {
            "train_size": [2, 5, 50, 500],
            "train_labels": [1, 2, 3, 5],
            "test_accuracy": {kind: accuracy},
        },
    }


def test_gains_are_counted_client_by_client() -> None:
    chosen = TableRun(fractions=(0.1,), seeds=(0, 1))
    records = {
        "paper-C0.1-local-seed0": fake(0, [0.5, 0.5, 0.5, 0.5]),
        "paper-C0.1-local-seed1": fake(1, [0.4, 0.4, 0.4, 0.4]),
        "paper-C0.1-perfed-ckt-1-seed0": fake(0, [0.7, 0.5, 0.49, 0.4]),
        "paper-C0.1-perfed-ckt-1-seed1": fake(1, [0.4, 0.5, 0.4, 0.4]),
    }
    accuracy, gains, left_out = tables(chosen, records)
    header = list(gains.header)
    row = dict(zip(header, next(r for r in gains.rows if "c=1" in r[0]), strict=True))
    assert row["all"] == f"{(20 + 0 - 1 - 10 + 0 + 10 + 0 + 0) / 8:+.1f}"
    assert row["n 1-9"] == f"{(20 + 0 + 0 + 10) / 4:+.1f}"
    assert row["n 10-99"] == "-0.5"
    assert row["n 100-999"] == row["4+ labels"] == "-5.0"
    assert row["1 label"] == "+10.0"
    assert row["harmed %"] == f"{100 / 8:.0f}"
    shown = dict(zip(accuracy.header, accuracy.rows[1], strict=True))
    assert shown["last"] == "47.4 ± 6.9"
    assert shown["of late"] == "+2.0"
    assert shown["paper"] == "70.7 ± 0.5"
    assert shown["difference"] == f"{47.375 - 70.70:+.1f}"
    assert shown["cost"] == "10"  # 5 million in 10 rounds, over 200 rounds
    assert ["FedFomo", "not run"] in [list(row) for row in left_out.rows]
    assert len(plot(chosen, records).axes) == 1


def test_natural_and_repaired_clients_have_columns_of_their_own() -> None:
    chosen = TableRun(fractions=(0.1,), seeds=(0, 1))
    records = {
        "paper-C0.1-local-seed0": fake(0, [0.5, 0.5, 0.5, 0.5]),
        "paper-C0.1-local-seed1": fake(1, [0.4, 0.4, 0.4, 0.4]),
        "paper-C0.1-perfed-ckt-1-seed0": fake(0, [0.7, 0.5, 0.4, 0.4]),
        "paper-C0.1-perfed-ckt-1-seed1": fake(1, [0.4, 0.6, 0.4, 0.4]),
    }
    without, gains_without, _ = tables(chosen, records)
    assert cell(without, "c=1", "natural") == cell(gains_without, "c=1", "repaired") == "–"
    repaired = {0: [True, True, False, False], 1: [False, True, False, False]}
    for record in records.values():
        record["clients"]["repaired"] = repaired[record["config"]["seed"]]
    accuracy, gains, _ = tables(chosen, records)
    assert cell(accuracy, "c=1", "natural") == "40.0 ± 0.0"
    assert cell(accuracy, "c=1", "repaired") == "60.0 ± 0.0"
    assert cell(accuracy, "local", "repaired") == "45.0 ± 7.1"
    assert cell(gains, "c=1", "natural") == f"{(-10 - 10 + 0 + 0 + 0) / 5:+.1f}"
    assert cell(gains, "c=1", "repaired") == f"{(20 + 0 + 20) / 3:+.1f}"


def cell(table: Table, row: str, column: str) -> str:
    (found,) = [cells for cells in table.rows if row in cells[0]]
    return found[list(table.header).index(column)]


def test_methods_that_use_validation_samples_have_a_chosen_round_only_with_a_second_half() -> None:
    once, twice = (
        TableRun(fractions=(0.1,), seeds=(0,), second_validation=second) for second in (False, True)
    )
    assert (once.title, twice.title) == ("table1-paper", "table1-paper-second-validation")
    same = {"name": "ditto"}
    assert once.name(same, 0.1, 0) == twice.name(same, 0.1, 0)
    assert once.experiment(same, 0.1, 0) == twice.experiment(same, 0.1, 0)
    fedfomo = next(row.algorithm for row in TABLE_1 if row.label == "FedFomo")
    assert once.name(fedfomo, 0.1, 0) == "paper-C0.1-fedfomo-seed0"
    assert twice.name(fedfomo, 0.1, 0) == "paper-C0.1-fedfomo-second-validation-seed0"
    assert not once.experiment(fedfomo, 0.1, 0).split.second_validation
    assert twice.experiment(fedfomo, 0.1, 0).split.second_validation
    record = fake(0, [0.5, 0.5, 0.5, 0.5])
    accuracy, *_ = tables(once, {once.name(fedfomo, 0.1, 0): record})
    assert cell(accuracy, "FedFomo", "chosen") == "–"
    record["config"]["split"] = {"second_validation": True}
    accuracy, *_ = tables(twice, {twice.name(fedfomo, 0.1, 0): record})
    assert cell(accuracy, "FedFomo", "chosen") == "50.0"


def test_the_table_without_repair(tmp_path: Path) -> None:
    """Clients that the partition leaves too few samples are left out, and nobody is repaired."""
    command = ["reproduce", "table1", "--quick", "--rounds", "1", "--seeds", "0"]
    options = ["--without-repair", "--methods", "local,fedavg", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, *options])
    assert done.exit_code == 0, done.output
    records = json.loads((tmp_path / "table1-paper-without-repair.json").read_text())
    assert set(records) == {
        f"paper-without-repair-C0.333-{name}-seed0" for name in ("local", "fedavg")
    }
    clients = records["paper-without-repair-C0.333-local-seed0"]["clients"]
    count = len(clients["train_size"])
    assert count < 30
    assert not any(clients.get("repaired", ()))
    assert f"CIFAR-10, {count} clients" in done.output
    left = TableRun(repair=False)
    local, others = (left.experiment({"name": name}, 0.1, 0) for name in ("local", "fedavg"))
    assert not local.partition.repair
    assert local.algorithm.participation == "selected"  # as many steps as the others make
    assert local.rounds == others.rounds == 500


def test_the_committed_list_of_repaired_clients_is_the_partitions() -> None:
    """Its samples are not here, but figure 2 has the labels of seed 0 and sums of other seeds."""
    known = json.loads((RESULTS / "repaired.json").read_text())
    figure2 = json.loads((RESULTS / "figure2.json").read_text())
    sizes = [sum(labels) for labels in figure2["example"]["labels"]]
    assert all(sizes[client] == 20 for client in known["clients"]["0"])
    for seed, clients in known["clients"].items():
        at_the_minimum, moved = figure2["at_the_minimum"][int(seed)], figure2["moved"][int(seed)]
        assert len(clients) <= at_the_minimum  # some were drawn just 20, or gave until 20 were left
        assert 20 * len(clients) >= moved


def test_the_whole_table_by_its_command(tmp_path: Path) -> None:
    command = ["reproduce", "table2", "--quick", "--rounds", "2", "--seeds", "0", "--out"]
    done = CliRunner().invoke(app, [*command, str(tmp_path), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    for ending in ("json", "md", "tex", "png", "pdf"):
        assert (tmp_path / f"table2-paper.{ending}").stat().st_size > 500
    for ending in ("png", "pdf"):
        assert (tmp_path / f"table2-paper-communication-C0.333.{ending}").stat().st_size > 500
    records = json.loads((tmp_path / "table2-paper.json").read_text())
    assert len(records) == 8
    assert "PerFed-CKT (c=4)" in done.output
    clients = next(iter(records.values()))["clients"]
    assert set(clients["repaired"]) == {True, False}  # each has a column
    assert len(set(clients["architecture"])) == 3
    again = CliRunner().invoke(app, [*command, str(tmp_path), "--seconds", "0"])
    assert again.stdout == done.stdout  # nothing is run again


def test_all_of_the_paper_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is left here of what there is, for time's sake."""
    monkeypatch.setattr(paper, "SINGLE", {"figure1": SINGLE["figure1"]})
    monkeypatch.setattr(paper, "STUDIES", {"table2": 2})
    command = ["reproduce", "all", "--quick", "--rounds", "1", "--seeds", "0", "--methods", "local"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.glob("*.md")} == {"figure1.md", "table2-paper.md"}
    again = CliRunner().invoke(app, [*command, "--out", str(tmp_path), "--json"])
    found = json.loads(again.stdout)
    assert set(found) == {"figure1", "table2"}
    assert list(found["table2"]) == ["paper-C0.333-local-seed0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--settings", "mine"], "--settings: 'mine' is none of paper, tuned"),
        (["--selection", "mine"], "--selection: 'mine' is none of uniform, by-size"),
        (["--fractions", "a"], "--fractions: 'a' is not a list of numbers"),
        (["--fractions", "nan"], "--fractions: 'nan' is not a list of numbers"),
        (["--seeds", "5-3"], "--seeds: there is no seed in 5-3: the lower one comes first"),
        (["--fractions", "0.1,0.1"], "--fractions: a number is there twice"),
        (["--seeds", "0,1,0"], "--seeds: a seed is there twice"),
        (["--methods", "local,fedfoma"], "--methods: 'fedfoma' is none of majority, local, "),
        (["--shard", "5/4"], "--shard: '5/4' is not a shard"),
        (["--seconds", "0"], "has no finished run yet"),
    ],
)
def test_bad_options(options: list[str], message: str, tmp_path: Path) -> None:
    from perfed.core.errors import PerfedError

    command = ["reproduce", "table1", "--quick", "--out", str(tmp_path), *options]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, PerfedError)
    assert message in str(done.exception)


def test_options_replace_the_plans_own() -> None:
    chosen = with_options(table_run(1, quick=False), "tuned", 50, "by-size", [0.1], [7])
    assert (chosen.settings, chosen.rounds, chosen.selection) == ("tuned", 50, "by-size")
    assert (chosen.fractions, chosen.seeds) == ((0.1,), (7,))
    assert with_options(table_run(1, quick=True)) == table_run(1, quick=True)


@pytest.mark.parametrize("name", ["figure1", "figure2", "theorem2"])
def test_every_single_result_comes_in_every_form(name: str, tmp_path: Path) -> None:
    assert in_every_form(name, tmp_path)


def in_every_form(name: str, folder: Path) -> Any:
    """What the command has found, which it has also written as tables and figures."""
    done = CliRunner().invoke(app, ["reproduce", name, "--quick", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    for ending in ("json", "md", "tex", "png", "pdf"):
        assert (folder / f"{name}.{ending}").stat().st_size > 200
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / f"{name}.json").read_text())


def test_a_shard_without_a_common_seed_is_shown_all_the_same() -> None:
    chosen = TableRun(fractions=(0.1,), seeds=(0, 1))
    records = {
        "paper-C0.1-local-seed0": fake(0, [0.5, 0.5, 0.5, 0.5]),
        "paper-C0.1-perfed-ckt-1-seed1": fake(1, [0.4, 0.5, 0.4, 0.4]),
    }
    accuracy, gains, _ = tables(chosen, records)
    assert len(accuracy.rows) == 2
    assert not gains.rows


def test_nothing_but_failures() -> None:
    chosen = TableRun(fractions=(0.1,), seeds=(0,))
    records = {"paper-C0.1-local-seed0": {"config": {}, "failed": "round 3: not finite"}}
    (without,) = tables(chosen, records)
    assert ["paper-C0.1-local-seed0", "round 3: not finite"] in [list(r) for r in without.rows]
    assert plot(chosen, records) is None


def test_the_cost_does_not_depend_on_how_many_rounds_were_run(tmp_path: Path) -> None:
    costs_seen = set()
    for rounds in (2, 4):
        chosen = TableRun(fractions=(1 / 3,), seeds=(0,), rounds=rounds, quick=True)
        whole = chosen.study(tmp_path / str(rounds))
        name = chosen.name({"name": "perfed-ckt", "clusters": 1}, 1 / 3, 0)
        study = Study(whole.folder, {name: whole.experiments[name]})
        study.run(SEQUENTIAL)
        (finding,) = findings(chosen, study.records())
        costs_seen.add(finding.cost())
    assert costs_seen == {200 * (10 + 1) * 400 * 10}
