"""Study files: what they say, what is run of them, and what is found."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import perfed
from perfed.algorithms.local import Local
from perfed.config import STUDIES, preset_names, read_mapping
from perfed.core.declaration import Maybe, Messages, Model, PerParameter, sends_own_weights
from perfed.core.errors import ConfigError, RunError
from perfed.runs.design import Conduct, Design, design
from perfed.runs.study import Shard
from perfed.runs.study_tables import Outcome, Row
from tests.conftest import SEQUENTIAL, TINY

SHARED: dict[str, Any] = {key: TINY[key] for key in TINY if key not in ("algorithm", "models")} | {
    "name": "tiny",
    "rounds": 2,
    "evaluate_every": 2,
    "models": {"architectures": [{"name": "mlp", "hidden": [8]}]},
}
STUDY: dict[str, Any] = SHARED | {
    "methods": [
        {"name": "local", "participation": "selected"},
        {"name": "fedavg"},
        {"name": "perfed-ckt", "clusters": 2, "grid": {"weight": [0.5, 1.0]}},
    ],
    "settings": {
        "groups": {"partition": {"name": "groups", "groups": 2}},
        "IID": {"partition": "iid", "training.learning_rate": 0.05},
    },
    "seeds": [0, 1],
    "tuning": {"trials": 2, "rounds": 1},
}
RATES = {"training.learning_rate": [0.1, 0.01, 0.05]}


def study(**changes: Any) -> Design:
    return design(copy.deepcopy(STUDY | changes))


class Stop(perfed.Callback):
    """Interrupts a run, the first or the second that begins …"""

    def __init__(self, run: int) -> None:
        self.left = run

    def on_round(self, report: perfed.runs.RoundReport) -> None:
        self.left -= report.round == 0
        if self.left == 0:  # after its first round
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Conduct:
    conduct = Conduct(study(), tmp_path_factory.mktemp("whole"))
    conduct.run(SEQUENTIAL)
    return conduct


def outcome(conduct: Conduct) -> Outcome:
    return Outcome(conduct.design, conduct.everything())


def numbers(conduct: Conduct) -> Any:
    """Everything but how long it took."""
    found = outcome(conduct).values()
    timed = ("seconds_per_round",)
    return {
        name: [{key: row[key] for key in row if key not in timed} for row in rows]
        for name, rows in found.items()
    }


def test_every_method_setting_and_seed_has_a_run(whole: Conduct) -> None:
    found = whole.everything()
    assert [(f.cell.setting, f.cell.method.name) for f in found] == [
        (setting, method)
        for setting in ("groups", "IID")
        for method in ("local", "fedavg", "perfed-ckt")
    ]
    for f in found:
        assert f.complete
        for seed, record in f.records.items():
            config = record["config"]
            assert config["seed"] == seed
            assert config["algorithm"]["name"] == f.cell.method.name
            assert config["partition"]["name"] == {"groups": "groups", "IID": "iid"}[f.cell.setting]
    assert outcome(whole).without_result() == []


def test_every_method_has_as_many_trials_and_the_first_is_as_listed() -> None:
    planned = study(tuning={"trials": 3, "rounds": 1, "grid": RATES})
    for cell in planned.cells():
        assert cell.search is not None
        assert len(cell.search.choices()) == len(set(cell.trials().values())) == 3
        assert cell.search.choices()[0] == ()
        first = next(iter(cell.trials().values()))
        assert first.training == cell.experiment(0, {}).training
        assert first.algorithm == cell.experiment(0, {}).algorithm
        assert {what.seed for what in cell.trials().values()} == {1000}
        assert {what.rounds for what in cell.trials().values()} == {1}


def test_the_choice_and_every_trial_are_written_down(whole: Conduct) -> None:
    written = json.loads(whole.write_choices(whole.everything()).read_text())
    assert written["tuning"]["seed"] == 1000
    tuned = [f for f in whole.everything() if f.cell.method.name == "perfed-ckt"]
    assert [row["setting"] for row in written["methods"]] == ["groups", "IID"]
    assert [len(row["trials"]) for row in written["methods"]] == [2, 2]
    assert [row["chosen"] for row in written["methods"]] == [f.choice for f in tuned]


def test_the_choice_is_by_validation_and_never_by_test_data(whole: Conduct, tmp_path: Path) -> None:
    """In the records of trials the one that was chosen is made the worst. By test numbers, that
    changes nothing; by validation numbers it does, and the runs of the other choice are refused."""
    for which in ("test", "validation"):
        shutil.copytree(whole.folder / "records", tmp_path / which / "records")
        for f in whole.everything():
            for place, name in enumerate(f.cell.trials()):
                path = tmp_path / which / "records" / f"{name}.json"
                record = json.loads(path.read_text())
                was_chosen = (place == 0) == (f.choice == {})
                for models in record["summary"]["models"].values():
                    for key in models["last"]:
                        if key.startswith(which):
                            models["last"][key] = 0.0 if was_chosen else 1.0
                path.write_text(json.dumps(record))
    same = Conduct(whole.design, tmp_path / "test").everything()
    assert [f.choice for f in same] == [f.choice for f in whole.everything()]
    with pytest.raises(RunError, match="made with other settings"):
        Conduct(whole.design, tmp_path / "validation").everything()


def test_runs_have_what_was_chosen(whole: Conduct) -> None:
    for f in whole.everything():
        assert f.choice is not None
        listed = 0.05 if f.cell.setting == "IID" else 0.1
        for record in f.records.values():
            wanted = f.choice.get("training.learning_rate", listed)
            assert record["config"]["training"]["learning_rate"] == wanted
            if f.cell.method.name == "perfed-ckt":
                assert record["config"]["algorithm"]["weight"] == f.choice.get(
                    "algorithm.weight", 2
                )
            assert not record["config"]["split"]["second_validation"]


def test_a_method_that_uses_validation_is_chosen_by_what_it_did_not_see() -> None:
    cells = study(methods=["local", "fedfomo"], tuning={"trials": 2, "grid": RATES}).cells()
    held = {
        cell.method.name: {what.split.second_validation for what in cell.trials().values()}
        for cell in cells
    }
    assert held == {"local": {False}, "fedfomo": {True}}


def test_stopped_it_goes_on_where_it_was(whole: Conduct, tmp_path: Path) -> None:
    stopped = Conduct(study(), tmp_path)
    for run in (2, 4, 5):  # in a run, after a trial, in a run with what was chosen
        with pytest.raises(KeyboardInterrupt):
            stopped.run(SEQUENTIAL, [Stop(run)])
        assert outcome(stopped).without_result()
    stopped.run(SEQUENTIAL)
    assert numbers(stopped) == numbers(whole)


def test_two_shards_put_together_are_the_whole(whole: Conduct, tmp_path: Path) -> None:
    together = tmp_path / "together" / "records"
    together.mkdir(parents=True)
    for number in (1, 2):
        part = Conduct(study(), tmp_path / str(number))
        part.run(SEQUENTIAL, shard=Shard(number, 2))
        for record in (part.folder / "records").iterdir():
            assert not (together / record.name).exists()
            shutil.copy(record, together)
    assert numbers(Conduct(study(), together.parent)) == numbers(whole)


def test_some_methods_and_settings_only_and_the_rest_is_listed(tmp_path: Path) -> None:
    conduct = Conduct(study(tuning=None, methods=["local", "fedavg"]), tmp_path)
    conduct.run(SEQUENTIAL, methods=["local"], settings=["IID"])
    found = outcome(conduct)
    assert [(s.name, [r.method for r in s.rows]) for s in found.sections] == [("IID", ["local"])]
    assert [(row["setting"], row["method"], row["why"]) for row in found.without_result()] == [
        ("groups", "local", "not run"),
        ("groups", "fedavg", "not run"),
        ("IID", "fedavg", "not run"),
    ]
    conduct.run(SEQUENTIAL, seconds=0)
    assert len(outcome(conduct).without_result()) == 3
    with pytest.raises(ConfigError, match="--methods: 'lokal' is none of local, fedavg"):
        conduct.run(SEQUENTIAL, methods=["lokal"])
    with pytest.raises(ConfigError, match="--settings: 'x' is none of groups, IID"):
        conduct.run(SEQUENTIAL, settings=["x"])


def test_a_method_that_does_not_fit_is_left_out_with_a_reason(tmp_path: Path) -> None:
    """By its options, by its weights, by features of two widths: the others are run."""
    many = {"name": "perfed-ckt", "clusters": 5, "label": "too many"}
    planned = study(
        methods=["local", many, "all"],
        settings={"two": {"models": [{"name": "mlp", "hidden": [h]} for h in (8, 9)]}},
        tuning=None,
        seeds=[0],
        clients_per_round=3,
    )
    conduct = Conduct(planned, tmp_path)
    conduct.run(SEQUENTIAL, methods=["local", "too many", "fedproto", "fedavg", "majority"])
    why = {row["method"]: row["why"] for row in outcome(conduct).without_result()}
    assert "algorithm.clusters: 5" in why["too many"]
    assert why["fedavg"] == ("left out: it averages weights, and clients have 2 different networks")
    assert "must be one width" in why["fedproto"]
    assert {row.method for row in outcome(conduct).sections[0].rows} == {"local", "majority"}
    before = sorted(file.name for file in (tmp_path / "records").iterdir())
    conduct.run(SEQUENTIAL, methods=["fedproto"])  # it stays left out
    assert sorted(file.name for file in (tmp_path / "records").iterdir()) == before


def test_a_setting_that_nothing_fits_is_an_error_and_not_left_out(tmp_path: Path) -> None:
    planned = study(settings={"none": {"data": {"name": "cifar10", "folder": str(tmp_path)}}})
    with pytest.raises(ConfigError, match="cifar10 is not in"):
        Conduct(planned, tmp_path / "out").run(SEQUENTIAL)


def test_all_is_every_method_of_the_package_once(request: pytest.FixtureRequest) -> None:
    """And none that this process has added: a study's file means the same everywhere."""
    request.addfinalizer(lambda: perfed.algorithms.forget("of-a-test"))
    perfed.algorithms.register("of-a-test")(type("OfATest", (Local,), {"__module__": __name__}))
    planned = study(methods=[{"name": "local", "participation": "selected"}, "all"], tuning=None)
    names = [method.name for method in planned.methods]
    assert names[0] == "local"
    assert "of-a-test" in perfed.algorithms
    assert "of-a-test" not in names
    assert {"perfed-ckt", "comet", "fedavg"} < set(names)
    assert len(names) == len(set(names)) == len(perfed.algorithms.built_in())


def test_what_a_method_says_it_sends_agrees_with_its_messages() -> None:
    """Methods of weights are told by their declared messages: heads and second networks are none
    of a client's own weights, and all but the head is."""
    for name in perfed.algorithms:
        if perfed.algorithms[name].sends == "weights":
            assert sends_own_weights(perfed.algorithms[name]().messages()), name
    base, head = (Messages(up={"part": Maybe(PerParameter(p))}) for p in ("base", "head"))
    assert sends_own_weights(base)
    assert not sends_own_weights(head)
    assert not sends_own_weights(Messages(up={"small": Model("small")}))
    assert not sends_own_weights(Messages())


def test_a_list_is_a_setting_for_each_value_where_a_key_takes_none() -> None:
    planned = study(
        tuning=None,
        methods=["local"],
        settings={
            "Dir": {"partition": {"name": "dirichlet", "alpha": [0.1, 1.0]}, "rounds": [1, 2]},
            "two networks": {"models": [{"name": "mlp", "hidden": [8]}, "mlp"]},
        },
    )
    assert list(planned.settings) == [
        "Dir rounds=1 alpha=0.1",
        "Dir rounds=1 alpha=1.0",
        "Dir rounds=2 alpha=0.1",
        "Dir rounds=2 alpha=1.0",
        "two networks",
    ]
    one = planned.cells(settings=["Dir rounds=2 alpha=0.1"])[0].experiment(0, {})
    assert (one.rounds, one.partition.alpha) == (2, 0.1)  # type: ignore[attr-defined]
    two = planned.cells(settings=["two networks"])[0].experiment(0, {})
    assert len(two.models.architectures) == 2


def test_values_for_all_methods_are_tried_where_a_method_takes_them() -> None:
    grid = {"training.learning_rate": [0.1, 0.05, 0.02], "weight": [-1.0, 3.0], "clusters": [1]}
    planned = study(methods=["local", "perfed-ckt"], tuning={"trials": 2, "grid": grid})
    grids = {method.name: dict(method.grid) for method in planned.methods}
    rates = {"training.learning_rate": [0.1, 0.05, 0.02]}
    assert grids["local"] == rates
    assert grids["perfed-ckt"] == rates | {"algorithm.weight": [3.0], "algorithm.clusters": [1]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": None}, "methods: expected a list of algorithms, or all"),
        ({"methods": []}, "methods: expected a list"),
        (
            {"methods": ["lokal"]},
            "methods[0].name: unknown algorithm 'lokal'; did you",
        ),
        ({"methods": [{"name": "ditto", "wait": 1}]}, "methods[0].wait: unknown key"),
        ({"methods": ["local", "local"]}, "methods: 'local' is there twice: give each a label"),
        ({"methods": ["all", "all"]}, "is there twice"),
        ({"methods": [{"name": "local", "label": "a,b"}]}, "methods[0].label: 'a,b' is no name"),
        (
            {"methods": [{"name": "ditto", "grid": {"wait": [1]}}]},
            "methods[0].grid: is no option of",
        ),
        ({"methods": [{"name": "ditto", "grid": {"weight": 1}}]}, "grid.weight: expected a list"),
        (
            {"methods": [{"name": "ditto", "grid": {"data.public": [1]}}]},
            "methods[0].grid.data.public: only options of methods and of training are tuned",
        ),
        (
            {"methods": [{"name": "ditto", "grid": {"weight": [-1.0]}}]},
            "methods: ditto: algorithm.weight: -1.0 is out of range",
        ),
        (
            {"tuning": None, "methods": [{"name": "ditto", "grid": {"weight": [1]}}]},
            "methods[0].grid: needs 'tuning'",
        ),
        (
            {"tuning": {"trials": 9, "grid": {"training.learning_rate": [0.1, 0.2]}}},
            "methods: local: its grid has 2 different choices, and every method has 9 trials",
        ),
        ({"tuning": {"trials": 1}}, "tuning.trials: 1 is out of range: must be at least 2"),
        ({"tuning": {"trails": 3}}, "tuning.trails: unknown key; did you mean 'trials'"),
        ({"tuning": {"seed": 1}}, "tuning.seed: 1 is among the study's seeds"),
        ({"tuning": 3}, "tuning: expected keys and values"),
        ({"seeds": []}, "seeds: at least one is needed"),
        ({"seeds": [0, 0]}, "seeds: a seed is there twice"),
        ({"seed": 3}, "seed: a study has 'seeds' instead"),
        ({"algorithms": ["local"]}, "algorithms: a study has 'methods' instead"),
        ({"setings": {}}, "setings: unknown key; did you mean 'settings'"),
        ({"rounds": 0}, "rounds: 0 is out of range"),
        ({"settings": {}}, "settings: expected names"),
        ({"settings": ["groups"]}, "settings: expected names"),
        ({"settings": {"a,b": {}}}, "settings.a,b: 'a,b' is no name"),
        ({"settings": {"a": 3}}, "settings.a: expected keys and values, got 3"),
        ({"settings": {"a": {"seeds": [3]}}}, "settings.a.seeds: is the same in all settings"),
        ({"settings": {"a": {"algorithm.weight": 3}}}, "settings.a.algorithm.weight: is the same"),
        ({"settings": {"a": {"partition.alfa": 1}}}, "settings.a.partition.alfa: unknown key"),
        (
            {"settings": {"a": {"partition.groups": [1, "x"]}}},
            "settings.a.partition.groups: expected",
        ),
        ({"settings": {"a b": {}, "a_b": {}}}, "a b local and a_b local would have one folder"),
        (
            {"settings": {"a": {"rounds": [*range(1, 60)], "clients": [*range(6, 60)]}}},
            "settings.a: more than 200 settings",
        ),
    ],
)
def test_what_is_no_study(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        study(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_study_needs_methods_and_an_experiment_has_none() -> None:
    with pytest.raises(ConfigError, match="methods: a study needs 'methods'"):
        design({"rounds": 3})
    with pytest.raises(ConfigError, match="methods: a file with 'methods' is a study"):
        perfed.config.parse({"methods": ["local"]})


@pytest.mark.parametrize("name", preset_names(STUDIES))
def test_studies_of_the_package_are_studies(name: str) -> None:
    planned = design(read_mapping(name, STUDIES))
    assert planned.name == name
    assert planned.about
    assert len(planned.seeds) >= 3
    assert (planned.tuning is not None) == name.startswith("bench-")  # others show how to begin
    for setting in planned.settings:
        fitting = [cell for cell in planned.cells(settings=[setting]) if not cell.left_out]
        if planned.tuning is not None:
            assert {len(cell.trials()) for cell in fitting} == {planned.tuning.trials}
        assert any(cell.method.algorithm.reference for cell in fitting)


# What is found, from records made up.


def fake(seed: int, accuracy: list[float], config: dict[str, Any]) -> dict[str, Any]:
    mean = sum(accuracy) / len(accuracy)
    last = {
        "test_accuracy": mean,
        "test_accuracy_worst_decile": min(accuracy),
        "test_calibration_error": 0.1,
        "validation_accuracy": mean,
    }
    sizes = {"train_size": [9] * len(accuracy), "train_labels": [2] * len(accuracy)}
    return {
        "config": config,
        "environment": {},
        "summary": {
            "models": {"personal": {"last": last}},
            "traffic": {"up_bytes": 300, "down_bytes": 100},
            "rounds": 2,
        },
        "clients": {"test_accuracy": {"personal": accuracy}, **sizes},
        "seconds": 3.0,
    }


def made_up(
    folder: Path, planned: Design, results: dict[tuple[str, str, int], list[float]]
) -> Outcome:
    (folder / "records").mkdir()
    for cell in planned.cells():
        for seed, what in cell.runs({}).items():
            accuracy = results.get((cell.setting, cell.method.name, seed))
            if accuracy is not None:
                text = json.dumps(fake(seed, accuracy, what.to_mapping()))
                (folder / "records" / f"{cell.run_name(seed)}.json").write_text(text)
    return Outcome(planned, Conduct(planned, folder).everything())


def test_numbers_of_a_row_by_hand(tmp_path: Path) -> None:
    planned = study(tuning=None, methods=["local", "fedavg"], settings={"one": {}})
    found = made_up(
        tmp_path,
        planned,
        {
            ("one", "local", 0): [0.5, 0.5, 0.5, 0.5],
            ("one", "local", 1): [0.4, 0.4, 0.4, 0.4],
            ("one", "fedavg", 0): [0.6, 0.6, 0.47, 0.49],
            ("one", "fedavg", 1): [0.5, 0.5, 0.5, 0.5],
        },
    )
    (section,) = found.sections
    row = section.rows[0].numbers()
    assert row["method"] == "fedavg"
    assert row["accuracy"] == 52
    assert row["accuracy_deviation"] == pytest.approx(2 * 2**0.5, abs=1e-4)
    assert row["above_local"] == pytest.approx(7)  # (10 + 10 − 3 − 1) / 4 = 4, and 10
    assert row["above_local_low"] < 7 < row["above_local_high"]
    assert row["harmed"] == 12.5  # one of eight, by three points; one point is no harm
    assert row["worst_tenth"] == pytest.approx(48.5)
    assert row["bytes_per_round"] == 200
    assert row["seconds_per_round"] == 1.5
    local = section.rows[1].numbers()
    assert (local["above_local"], local["harmed"]) == (None, None)


def test_only_what_has_the_same_data_is_ranked(tmp_path: Path) -> None:
    """Without one of the seeds, a method's mean is of other data: no rank, no p, no bold."""
    results = {
        (setting, method, seed): [value + 0.01 * seed] * 8
        for setting in ("groups", "IID")
        for method, value in (("local", 0.5), ("fedavg", 0.6), ("majority", 0.9))
        for seed in (0, 1)
    }
    del results["IID", "majority", 1]
    planned = study(tuning=None, methods=["local", "fedavg", "majority"])
    found = made_up(tmp_path, planned, results)
    groups, iid = found.sections
    assert [row.method for row in groups.ranked] == ["majority", "fedavg", "local"]
    assert [row.method for row in iid.ranked] == ["fedavg", "local"]
    assert "majority" not in iid.against_best
    table = found.tables()["setting IID"]
    assert "Not ranked, since runs of other seeds are on other data: majority (one seed (0))" in (
        table.note
    )
    assert table.bold == {(0, 2)}
    overall = found.overall()
    assert [(row["method"], row["mean_rank"]) for row in overall] == [("fedavg", 1), ("local", 2)]
    assert "lacks runs of theirs: majority" in found.tables()["over all settings"].note
    assert overall[0]["mean_gain"] == pytest.approx(10)


def test_equals_share_their_ranks(tmp_path: Path) -> None:
    planned = study(tuning=None, methods=["local", "fedavg", "majority"], seeds=[0])
    levels = {"local": 0.5, "fedavg": 0.5, "majority": 0.4}
    results = {
        (setting, method, 0): [value] * 4
        for setting in ("groups", "IID")
        for method, value in levels.items()
    }
    overall = made_up(tmp_path, planned, results).overall()
    ranks = {row["method"]: row["mean_rank"] for row in overall}
    assert ranks == {"local": 1.5, "fedavg": 1.5, "majority": 3}


def test_what_is_not_told_apart_from_the_best_is_marked_too(tmp_path: Path) -> None:
    close = [0.6, 0.62, 0.58, 0.61, 0.6, 0.59, 0.63, 0.57]
    planned = study(
        tuning=None, methods=["local", "fedavg", "majority"], settings={"one": {}}, seeds=[4]
    )
    results = {
        ("one", "local", 4): [a - 0.2 for a in close],
        ("one", "fedavg", 4): close,
        ("one", "majority", 4): [*reversed(close)],
    }
    found = made_up(tmp_path, planned, results)
    table = found.tables()["setting one"]
    assert table.bold == {(0, 2), (1, 2)}
    # Eight pairs of one sign: 2 / 2⁸, and times two tests.
    assert found.sections[0].against_best["local"] == pytest.approx(2 * 2 / 2**8)
    assert "one seed (4)" in table.title
    assert "One seed: another one divides the data anew" in table.note
    assert "±" not in table.text()


def test_diverged_runs_are_said_and_counted_nowhere(tmp_path: Path) -> None:
    planned = study(
        tuning={"trials": 2, "grid": {"training.learning_rate": [1e30, 1e31]}},
        methods=["local", "fedavg"],
        settings={"wild": {"training": {"learning_rate": 1e30, "steps": 5}}},
        seeds=[0],
    )
    conduct = Conduct(planned, tmp_path)
    conduct.run(SEQUENTIAL)
    found = outcome(conduct)
    assert found.sections == []
    assert [row["why"].split(":")[0] for row in found.without_result()] == ["diverged"] * 2
    assert found.tables()["without a result"].rows


def test_a_row_says_which_model_it_is_of(whole: Conduct) -> None:
    rows: list[Row] = [row for section in outcome(whole).sections for row in section.rows]
    kinds = {row.method: row.kind for row in rows}
    assert kinds == {"local": "personal", "fedavg": "global", "perfed-ckt": "personal"}
