"""What a run leaves behind can be asked, and says what happened."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perfed
from perfed.core.errors import ConfigError, RunError
from perfed.runs.comparison import run_name
from perfed.runs.tables import quantity, spread
from tests.conftest import TINY, tiny


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> perfed.Result:
    return perfed.run(tiny(evaluate_every=2), tmp_path_factory.mktemp("result") / "run")


def test_the_directory_holds_what_is_needed_to_trust_it(result: perfed.Result) -> None:
    names = {path.name for path in result.path.iterdir() if not path.name.startswith(".")}
    assert names == {
        "config.yaml",
        "checksums.json",
        "environment.json",
        "partition.json",
        "rounds.jsonl",
        "clients.jsonl",
        "timing.jsonl",
        "models",
        "summary.json",
    }
    assert perfed.load(result.path / "config.yaml") == tiny(evaluate_every=2)
    environment = json.loads((result.path / "environment.json").read_text())
    assert environment["packages"]["torch"] == metadata.version("torch")


def test_frames_and_summary_agree(result: perfed.Result) -> None:
    rounds, clients = result.per_round(), result.per_client()
    assert rounds["round"].tolist() == [1, 2]  # every second round, and always the last
    assert len(clients) == 2 * 6
    last = clients[clients["round"] == 2]
    summary = result.summary["models"]["personal"]
    assert summary["last"]["test_accuracy"] == pytest.approx(last["test_accuracy"].mean())
    pooled = np.average(last["test_accuracy"], weights=last["test_size"])
    assert summary["last"]["test_accuracy_weighted"] == pytest.approx(pooled)
    assert summary["chosen"]["round"] in (1, 2)
    best = rounds["test_accuracy"].max()
    assert summary["best_test"]["test_accuracy"] == pytest.approx(best)


def test_the_chosen_round_is_chosen_on_validation(tmp_path: Path) -> None:
    run = perfed.run(tiny(rounds=6), tmp_path / "run")
    frame = run.per_round()
    chosen = run.summary["models"]["personal"]["chosen"]
    best = frame["validation_accuracy"].max()
    first = frame[frame["validation_accuracy"] == best].iloc[0]
    assert chosen["round"] == first["round"]
    assert chosen["test_accuracy"] == pytest.approx(first["test_accuracy"])


def test_traffic_adds_up_over_rounds(result: perfed.Result) -> None:
    lines = result.directory.lines("rounds.jsonl")
    for name in ("up_parameters", "down_parameters", "up_bytes", "down_bytes"):
        total = sum(line["traffic"][name] for line in lines)
        assert total == result.summary["traffic"][name] == lines[-1]["traffic_total"][name]


def test_a_clients_model_is_ready_for_inference(result: perfed.Result) -> None:
    """Loaded back, it has the accuracy that was recorded."""
    federation = perfed.data.build_federation(
        *(getattr(result.experiment, n) for n in ("data", "partition", "split", "clients", "seed"))
    )
    last = result.per_client().query("round == 2").set_index("client")
    for k, split in enumerate(federation.splits):
        x = torch.as_tensor(federation.samples.x[split.test])
        predicted = result.model(k)(x).argmax(1).numpy()
        accuracy = (predicted == federation.samples.y[split.test]).mean()
        assert accuracy == pytest.approx(last.loc[k, "test_accuracy"])
    with pytest.raises(RunError, match="no client 6"):
        result.model(6)
    with pytest.raises(RunError, match="no global model, only personal"):
        result.model(0, "global")


def test_a_shared_model_is_stored_once(tmp_path: Path) -> None:
    run = perfed.run(tiny(algorithm="fedavg", models={"architectures": ["mlp"]}), tmp_path / "run")
    assert len(list((run.path / "models").glob("*.safetensors"))) == 1
    assert torch.equal(run.model(0)[1].weight, run.model(5)[1].weight)


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(tmp_path: Path) -> None:
    runs = [perfed.run(tiny(seed=s), tmp_path / str(i)) for i, s in enumerate((4, 4, 5))]
    logs = [(run.path / "clients.jsonl").read_text() for run in runs]
    assert logs[0] == logs[1] != logs[2]


def test_a_run_can_be_read_while_it_goes_on(tmp_path: Path) -> None:
    class Reader(perfed.Callback):
        seen: list[int] = []  # noqa: RUF012

        def on_round(self, report: perfed.runs.RoundReport) -> None:
            now = perfed.Result(tmp_path / "run").summary
            assert now["finished"] is (report.round == 2)
            self.seen.append(now["rounds"])

    perfed.run(tiny(), tmp_path / "run", callbacks=[reader := Reader()])
    assert reader.seen == [1, 2, 3]


def test_no_public_set_for_an_algorithm_that_needs_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'perfed-ckt' needs a public set"):
        perfed.run(tiny(data={"name": "digits", "public": 0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    perfed.run(tiny(data={"name": "digits", "public": 0}, algorithm="local"), tmp_path / "local")


def test_the_table_has_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    values = TINY | {"algorithms": ["majority", "fedavg"], "seeds": [0, 1, 2]}
    del values["algorithm"]
    comparison = perfed.config.parse(values)
    done = perfed.compare(comparison, tmp_path / "run")  # type: ignore[arg-type]
    accuracies = [
        r.summary["models"]["global"]["last"]["test_accuracy"]
        for r in done.results
        if r.experiment.algorithm.label() == "fedavg"
    ]
    row = next(line for line in done.table().splitlines() if line.startswith("fedavg"))
    mean, deviation = 100 * np.mean(accuracies), 100 * np.std(accuracies, ddof=1)
    assert f"global {mean:.1f} ± {deviation:.1f}" in " ".join(row.split())
    assert done.plot().stat().st_size > 10_000
    assert {p.name for p in done.path.iterdir() if p.is_dir()} == {
        run_name(experiment) for experiment in comparison.experiments()
    }


def test_a_comparison_with_local_training_says_who_gains_and_who_loses(tmp_path: Path) -> None:
    done = compared(tmp_path / "run", ["majority", "local", "fedavg"], [0, 1])
    by_run = {
        (r.experiment.algorithm.label(), r.experiment.seed): r.per_client().query("round == 2")
        for r in done.results
    }
    table = done.tables()[1]
    assert [row[0] for row in table.rows] == ["majority", "fedavg"]
    for method, above, small, gaining, losing in table.rows:
        gains, means, of_small = [], [], []
        for seed in (0, 1):
            clients, alone = (by_run[name, seed].set_index("client") for name in (method, "local"))
            points = 100 * (clients["test_accuracy"] - alone["test_accuracy"])
            gains += points.tolist()
            means.append(points.mean())
            of_small += points[clients["train_size"] < 10].tolist()
        assert above == f"{np.mean(means):+.1f} ± {np.std(means, ddof=1):.1f}"
        assert small == (f"{np.mean(of_small):+.1f}" if of_small else "–")
        assert gaining == f"{100 * np.mean(np.array(gains) > 2):.0f}"
        assert losing == f"{100 * np.mean(np.array(gains) < -2):.0f}"
        found = done.record()["against_local"]["methods"][method]
        assert [found[seed]["above_local"] for seed in ("0", "1")] == pytest.approx(means, abs=0.01)
        losing_share = np.mean([found[seed]["losing"] for seed in ("0", "1")])
        assert losing == f"{100 * losing_share:.0f}"
    assert "Against local\n" in done.table()
    assert "participation=selected" in table.note  # in every round all train alone


def test_of_two_ways_to_train_alone_the_same_clients_at_the_same_times(tmp_path: Path) -> None:
    drawn = {"name": "local", "participation": "selected"}
    done = compared(tmp_path / "run", ["local", drawn, "fedavg"], [3])
    table = done.tables()[1]
    assert table.title == "Against local(participation=selected)"
    assert [row[0] for row in table.rows] == ["local", "fedavg"]
    assert "±" not in "".join(cell for row in table.rows for cell in row)  # one seed has no spread
    assert "participation=selected" not in table.note
    assert done.record()["against_local"]["local"] == "local(participation=selected)"
    without = compared(tmp_path / "without", ["fedavg"], [3])
    assert len(without.tables()) == 1
    assert without.record()["against_local"] is None
    assert len(compared(tmp_path / "alone", ["local"], [3]).tables()) == 1


def test_methods_that_differ_have_folders_that_differ(tmp_path: Path) -> None:
    near = [{"name": "fedprox", "proximal": mu} for mu in (1e-6, 1e6, 0.1, 0.10000001)]
    values = TINY | {"algorithms": near, "seeds": [0]}
    del values["algorithm"]
    experiments = perfed.config.parse(values).experiments()  # type: ignore[union-attr]
    assert len({run_name(experiment) for experiment in experiments}) == 4


def test_two_methods_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfed.runs.comparison.run_name", lambda experiment: "one")
    with pytest.raises(ConfigError, match="'majority' and 'local' would have one folder, 'one'"):
        compared(tmp_path / "run", ["majority", "local"], [0])
    assert not (tmp_path / "run").exists()


def test_what_is_not_an_experiment_is_refused_in_a_line() -> None:
    comparison = perfed.load("digits-groups")
    with pytest.raises(ConfigError, match=r"perfed.run: takes Experiment, .*perfed.compare takes"):
        perfed.run(comparison)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"perfed.compare: takes Comparison, not str: perfed.load"
    ):
        perfed.compare("digits-groups")  # type: ignore[arg-type]


def test_what_is_not_finished_says_so(tmp_path: Path) -> None:
    class Stop(perfed.Callback):
        def on_round(self, report: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perfed.run(tiny(), tmp_path / "run", callbacks=[Stop()])
    stopped = perfed.Result(tmp_path / "run")
    assert stopped.table().endswith("Not finished: after round 1 of 3.")
    with pytest.raises(RunError, match=r"has no models: .* perfed run --resume"):
        stopped.model(0)
    finished = perfed.resume(stopped.path, how=perfed.Execution(save_models=False))
    assert "Not finished" not in finished.table()
    with pytest.raises(RunError, match="has no models: it was told to keep none"):
        finished.model(0)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    result = perfed.run(tiny(), tmp_path / "run")
    with open(result.path / "rounds.jsonl", "a") as file:
        file.write("{broken\n")
    with pytest.raises(RunError, match=r"rounds.jsonl, line 5, is corrupt"):
        result.per_round()


def compared(folder: Path, algorithms: list[Any], seeds: list[int]) -> perfed.ComparisonResult:
    values = TINY | {"algorithms": algorithms, "seeds": seeds}
    del values["algorithm"]
    values["models"] = {"architectures": ["mlp"]}
    return perfed.compare(perfed.config.parse(values), folder)  # type: ignore[arg-type]


def test_numbers_for_people() -> None:
    assert [quantity(v, "B") for v in (0, 999, 1234, 5.2e7, 3.9e10)] == [
        "–",
        "999 B",
        "1.23 kB",
        "52 MB",
        "39 GB",
    ]
    assert (spread([0.5]), spread([0.5, 0.7])) == ("50.0", "60.0 ± 14.1")
