from dataclasses import dataclass
from typing import Literal

import pytest

import perfed
from perfed import Experiment, load
from perfed.config import Comparison, apply_override, dump_yaml, load_yaml, parse, preset_names
from perfed.core.errors import ConfigError
from perfed.core.schema import Options, from_mapping, option, to_mapping


@dataclass(frozen=True)
class Inner(Options):
    size: int = option(1, "", ge=1, lt=10)


@dataclass(frozen=True)
class Outer(Options):
    inner: Inner = option(Inner(), "")
    rates: tuple[float, ...] = option((0.5,), "", gt=0)
    mode: Literal["a", "b"] = option("a", "")
    path: str | None = option(None, "")


def test_widening_is_allowed_and_nothing_else() -> None:
    assert Outer(rates=[1, 2]).rates == (1.0, 2.0)
    for wrong in ({"rates": 1.0}, {"rates": ["1"]}, {"mode": "c"}, {"path": 3}):
        with pytest.raises(ConfigError):
            Outer(**wrong)
    with pytest.raises(ConfigError, match="whole number"):
        Inner(size=True)
    with pytest.raises(ConfigError, match="whole number"):
        Inner(size=2.0)


def test_an_error_names_the_dotted_key_and_what_is_right() -> None:
    with pytest.raises(
        ConfigError, match=r"^inner\.size: 10 is out of range: must be less than 10"
    ):
        from_mapping(Outer, {"inner": {"size": 10}})
    with pytest.raises(ConfigError, match=r"^inner\.sise: unknown key; did you mean 'size'\?"):
        from_mapping(Outer, {"inner": {"sise": 3}})


@pytest.mark.attack(55)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"roundz": 3}, "roundz: unknown key; did you mean 'rounds'?"),
        ({"rounds": "many"}, "rounds: expected a whole number, got str 'many'"),
        ({"rounds": 0}, "rounds: 0 is out of range: must be at least 1"),
        ({"clients_per_round": 31}, "must be at most clients, 30"),
        (
            {"algorithm": {"name": "perfed-ckt", "clusters": 11}},
            "algorithm.clusters: 11 clusters of 10 clients",
        ),
        ({"algorithm": "perfed_ckt"}, "did you mean 'perfed-ckt'?"),
        ({"algorithm": {"clusters": 3}}, "algorithm: expected a name ("),
        ({"algorithm": "no_such_module:Thing"}, "cannot import 'no_such_module'"),
        ({"partition": {"name": "groups", "grups": 2}}, "partition.grups: unknown key"),
        ({"split": {"train": [0.5], "test": 0.6}}, "split: 0.5 + 0.1 + 0.6 is more than"),
        ({"name": "../elsewhere"}, "name: '../elsewhere' cannot name a folder"),
        ({"training": {"learning_rate": 10**400}}, "learning_rate: the number is too large"),
        (
            {"training": {"learning_rate": float("inf")}},
            "training.learning_rate: expected a finite number, got inf",
        ),
        ({"split": {"train": [float("nan")]}}, "split.train[0]: expected a finite number, got nan"),
        ({"training": 3}, "training: expected keys and values, got int 3"),
        ({"models": {"architectures": []}}, "models.architectures: at least one"),
    ],
)
def test_bad_experiments(change: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(Experiment, change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", preset_names())
def test_configurations_survive_a_round_trip(name: str) -> None:
    loaded = load(name)
    again = parse(load_yaml(dump_yaml(loaded.to_mapping()), "test"))
    assert again == loaded


def test_overrides_reach_inside_and_short_forms() -> None:
    values = {"algorithm": "perfed-ckt"}
    apply_override(values, "algorithm.clusters=2")
    apply_override(values, "training.learning_rate=0.5")
    apply_override(values, "rounds=7")
    experiment = parse(values)
    assert isinstance(experiment, Experiment)
    assert to_mapping(experiment.algorithm) == {"clusters": 2, "weight": 2.0}
    assert (experiment.training.learning_rate, experiment.rounds) == (0.5, 7)
    with pytest.raises(ConfigError, match="not of the form key=value"):
        apply_override(values, "rounds")
    with pytest.raises(ConfigError, match="has no keys inside"):
        apply_override(values, "rounds.more=1")


def test_an_override_inside_what_is_not_given_starts_from_the_default() -> None:
    values: dict[str, object] = {"models": "cnn"}
    for text in ("data.public=100", "partition.groups=2", "algorithm.clusters=2"):
        apply_override(values, text)
    apply_override(values, "models.initial=own")
    experiment = from_mapping(Experiment, values)
    assert to_mapping(experiment)["data"] == {"name": "digits", "public": 100}
    assert to_mapping(experiment)["partition"]["groups"] == 2
    assert experiment.algorithm.label() == "perfed-ckt (c=2, λ=2)"
    assert [one.label() for one in experiment.models.architectures] == ["cnn"]
    assert experiment.models.initial == "own"


def test_an_override_inside_one_of_several_algorithms_must_say_which() -> None:
    values: dict[str, object] = {"algorithms": ["local", "perfed-ckt"]}
    with pytest.raises(ConfigError, match=r"^--set algorithm\.clusters: there are several"):
        apply_override(values, "algorithm.clusters=2")
    apply_override(values, "algorithm=perfed-ckt")
    apply_override(values, "algorithm.clusters=2")
    assert values == {"algorithm": {"name": "perfed-ckt", "clusters": 2}}


def test_numbers_may_be_written_as_people_write_them() -> None:
    for text, value in (("1e-3", 0.001), ("1E5", 1e5), (".5e1", 5.0), ("-2.e-1", -0.2), ("3", 3)):
        assert load_yaml(text, "test") == value
    assert load_yaml("1e-3x", "test") == "1e-3x"


def test_short_forms_and_positions_in_lists() -> None:
    assert from_mapping(Experiment, {"models": "cnn"}).models.architectures[0].label() == "cnn"
    two = from_mapping(Experiment, {"models": ["mlp", "cnn"]}).models.architectures
    assert [a.label() for a in two] == ["mlp", "cnn"]
    with pytest.raises(ConfigError, match=r"^algorithms\[1\]\.name: unknown algorithm 'locl'"):
        parse({"algorithms": ["fedavg", "locl"]})
    values = {"algorithms": ["local", "fedavg"], "seeds": [0, 1]}
    apply_override(values, "algorithm=local")
    apply_override(values, "seed=3")
    assert values == {"algorithm": "local", "seed": 3}


def test_labels_tell_variants_apart() -> None:
    built = [
        perfed.algorithms.build(s).label()
        for s in (
            "per-fedavg",
            {"name": "per-fedavg", "variant": "hessian-free"},
            {"name": "feddf", "steps": 5},
            "perfed-ckt",
        )
    ]
    assert built == [
        "per-fedavg (α=0.01)",
        "per-fedavg (α=0.01, variant=hessian-free)",
        "feddf(steps=5)",
        "perfed-ckt (c=3, λ=2)",
    ]


def test_a_comparison_is_every_algorithm_with_every_seed() -> None:
    comparison = parse({"algorithms": ["local", "fedavg"], "seeds": [3, 5]})
    assert isinstance(comparison, Comparison)
    pairs = [(e.algorithm.registered_name, e.seed) for e in comparison.experiments()]
    assert pairs == [("local", 3), ("local", 5), ("fedavg", 3), ("fedavg", 5)]
    with pytest.raises(ConfigError, match="there twice"):
        parse({"algorithms": ["local", "local"]})
    with pytest.raises(ConfigError, match="a seed is there twice"):
        parse({"algorithms": ["local"], "seeds": [0, 1, 0]})
    with pytest.raises(ConfigError, match="both 'seed' and 'seeds'"):
        parse({"seed": 1, "seeds": [1]})
