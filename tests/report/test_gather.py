"""What a report reads is what the runs wrote."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import perfed
from perfed.core.errors import RunError
from perfed.report import gather, page
from perfed.runs.directory import RunDirectory
from tests.conftest import TINY, tiny, without_checksums


def test_series_agree_with_the_runs_frames(comparison: perfed.ComparisonResult) -> None:
    curves = gather.series(gather.read([comparison.path]))
    assert [curve.label for curve in curves] == [
        "local",
        "fedavg",
        "perfed-ckt (c=2, λ=1)",
        "hypcluster (c=2)",
    ]
    for place, curve in enumerate(curves):
        results = comparison.results[3 * place : 3 * place + 3]
        rounds = [r.per_round().set_index("round").loc[4] for r in results]
        clients = [r.per_client().query("round == 4") for r in results]
        assert curve.means(4) == pytest.approx([frame["test_accuracy"] for frame in rounds])
        sent = [row["total_up_bytes"] + row["total_down_bytes"] for row in rounds]
        assert curve.cost(4, "bytes") == pytest.approx(np.mean(sent))
        pooled = np.concatenate([frame["test_accuracy"] for frame in clients])
        assert curve.pooled(4).tolist() == pooled.tolist()
        last = [r.summary["models"][curve.kind]["last"] for r in results]
        assert curve.last() == pytest.approx(np.mean([one["test_accuracy"] for one in last]))
        worst = [one["test_accuracy_worst_decile"] for one in last]
        assert curve.worst_tenth() == pytest.approx(np.mean(worst))


def test_runs_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    slow = tiny(rounds=1, algorithm="local")
    fast = tiny(rounds=1, algorithm="local", training=TINY["training"] | {"steps": 4})
    paths = [perfed.run(e, tmp_path / str(n)).path for n, e in enumerate((slow, fast, fast))]
    labels = [run.label for run in gather.read(paths[:2])]
    assert all(label.startswith("local · ") for label in labels)
    assert "training.steps=2" in labels[0]
    assert "training.steps=4" in labels[1]
    assert "rounds" not in labels[0]  # is the same in both
    twice = [run.label for run in gather.read(paths[1:])]
    assert twice == ["local · 1", "local · 2"]  # the same experiment: only the folder differs


def test_the_seeds_of_a_method_in_one_folder_have_one_label(tmp_path: Path) -> None:
    base = tiny(rounds=1, algorithm="local")
    mine, compared = tmp_path / "mine", tmp_path / "compared"
    perfed.run(base, mine)
    methods = tuple(tiny(algorithm=name).algorithm for name in ("local", "majority"))
    perfed.compare(perfed.Comparison(base, methods, (0, 1)), compared)
    runs = gather.read([mine, compared])
    assert [run.label for run in runs] == [
        "local · mine",
        *["local · compared"] * 2,
        *["majority"] * 2,
    ]
    assert len({run.method for run in runs}) == 2
    assert ": 2 methods compared</h1>" in page.html(page.draw([mine, compared]))


def test_runs_that_differ_in_much_go_by_their_folders(tmp_path: Path) -> None:
    one = tiny(rounds=1, algorithm="local")
    other = tiny(rounds=2, algorithm="local", training={"steps": 1, "batch_size": 3})
    paths = [tmp_path / "a" / "x", tmp_path / "b" / "x"]
    for experiment, path in zip((one, other), paths, strict=True):
        perfed.compare(perfed.Comparison(experiment, (experiment.algorithm,)), path)
    assert [run.label for run in gather.read(paths)] == [f"local · {path}" for path in paths]
    paths[1].rename(tmp_path / "y")
    labels = [run.label for run in gather.read([paths[0], tmp_path / "y"])]
    assert labels == ["local · x", "local · y"]


def test_a_method_is_compared_with_local_training_of_the_same_clients(tmp_path: Path) -> None:
    data = {"name": "digits", "public": 100}
    experiments = [
        tiny(rounds=1, algorithm="local", seed=1, data=data),
        tiny(rounds=1, algorithm="local", seed=1, training={"steps": 1}),
        tiny(rounds=1, algorithm="local", seed=1),
        tiny(rounds=1, algorithm="fedavg", seed=1),
        tiny(rounds=1, algorithm="fedavg", seed=1, partition="iid"),
    ]
    paths = [perfed.run(e, tmp_path / str(n)).path for n, e in enumerate(experiments)]
    curves = gather.series(gather.read(paths))
    assert gather.alone(curves[3], curves) is curves[2]
    assert gather.alone(curves[3], curves[:2]) is curves[1]  # the same clients, trained otherwise
    assert gather.alone(curves[3], curves[:1]) is None
    assert gather.alone(curves[4], curves) is None


def test_a_mix_of_labels_that_nobody_asks_for_sets_no_runs_apart(tmp_path: Path) -> None:
    runs = {
        "one": tiny(algorithm="local", rounds=1),
        "other": tiny(rounds=1, fresh_mix="held"),
        "third": tiny(rounds=1, shared_test=True),
        "fourth": tiny(rounds=1, shared_test=True, fresh_mix="held"),
    }
    for name, experiment in runs.items():
        perfed.run(experiment, tmp_path / name)

    def alike(*names: str) -> bool:
        return gather.same_data(gather.series(gather.read([tmp_path / name for name in names])))

    assert alike("one", "other")
    assert not alike("one", "third")
    assert not alike("third", "fourth")


def test_of_two_ways_to_train_alone_the_page_takes_that_of_the_table(tmp_path: Path) -> None:
    drawn = {"name": "local", "participation": "selected"}
    experiments = [tiny(rounds=1, algorithm=a, seed=1) for a in ("local", drawn, "fedavg")]
    paths = [perfed.run(e, tmp_path / str(n)).path for n, e in enumerate(experiments)]
    curves = gather.series(gather.read(paths))
    assert gather.alone(curves[2], curves) is curves[1]


def test_a_run_in_the_making_is_read_as_far_as_it_goes(
    tmp_path: Path, comparison: perfed.ComparisonResult
) -> None:
    path = tmp_path / "comparison"
    shutil.copytree(comparison.path, path)
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    begun, going, failed, *_ = folders
    for folder in (begun, going, failed):
        without_checksums(folder)
    for name in ("rounds.jsonl", "clients.jsonl", "timing.jsonl", "summary.json", "partition.json"):
        (begun / name).unlink()
    (going / "summary.json").unlink()
    lines = (going / "rounds.jsonl").read_text().splitlines(keepends=True)
    (going / "rounds.jsonl").write_text("".join(lines[:3]) + lines[3][:50])  # a line half written
    (failed / "summary.json").unlink()
    (failed / "failed.json").write_text(json.dumps({"error": "round 3: not finite"}))
    shutil.rmtree(folders[-1])
    runs = {run.path: run for run in gather.read([path])}
    assert len(runs) == 11
    assert gather.planned([path]) == 12
    assert (runs[begun].kinds, runs[begun].clients, runs[begun].over) == ([], [], False)
    assert set(runs[going].client_numbers) == set(runs[going].evaluated) == {0, 1, 2}
    assert not runs[going].over
    assert runs[failed].over
    assert runs[failed].failure == "round 3: not finite"


def test_a_run_goes_on_while_a_process_has_its_lock(
    tmp_path: Path, comparison: perfed.ComparisonResult
) -> None:
    path = tmp_path / "run"
    shutil.copytree(comparison.results[0].path, path)
    (path / "summary.json").unlink()
    (run,) = gather.read([path])
    with RunDirectory(path).locked():
        assert not run.stopped
        going_on = gather.written([path])
    assert run.stopped
    assert gather.written([path]) != going_on  # a page that is watched must be made again
    (path / ".lock").unlink()  # as in a copy that leaves hidden files behind
    assert run.stopped


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="neither a run directory nor a comparison"):
        gather.read([tmp_path])
