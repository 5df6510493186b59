"""Every option of everything that is registered can be asked for, and means something."""

import dataclasses
from dataclasses import dataclass

import pytest

import perfed
from perfed import Experiment, Training
from perfed.config import Comparison, load_yaml, parse
from perfed.core.algorithm import Algorithm
from perfed.core.errors import ConfigError
from perfed.core.schema import option
from perfed.data import datasets
from perfed.explain import about, described, entries, explain, overview, shown_default
from perfed.models import Models
from perfed.runs.design import Tuning
from perfed.starter import commented

REGISTRIES = {
    "algorithm": perfed.algorithms,
    "data": perfed.datasets,
    "partition": perfed.partitions,
    "shift": perfed.shifts,
    "models.architectures": perfed.architectures,
    "hostile": perfed.attacks,
}
OPTIONS = [
    (key, name, field.name)
    for key, registry in REGISTRIES.items()
    for name in registry
    for field in dataclasses.fields(registry[name])
]
GROUPS = {"": Experiment, "training.": Training, "models.": Models, "split.": perfed.Split}


@pytest.mark.parametrize(("key", "name", "option"), OPTIONS)
def test_every_option_of_every_component_is_explained(key: str, name: str, option: str) -> None:
    lines = explain(f"{key}.{option}")
    place = lines.index(f"{key}.{option} ({name})")
    field = next(f for f in dataclasses.fields(REGISTRIES[key][name]) if f.name == option)
    assert lines[place + 1].strip().endswith(field.metadata["help"])
    assert len(field.metadata["help"]) > 2
    assert "; default: " in lines[place + 2]
    assert any(line.strip().startswith(option) for line in explain(name))


@pytest.mark.parametrize(
    "component",
    [registry[name] for registry in REGISTRIES.values() for name in registry],
    ids=lambda component: component.registered_name,
)
def test_what_a_component_is_about_is_said_in_whole_sentences(component: type) -> None:
    assert about(component).endswith(".")


@pytest.mark.parametrize(
    "key",
    [f"{prefix}{field.name}" for prefix, cls in GROUPS.items() for field in dataclasses.fields(cls)]
    + ["algorithms", "seeds"],
)
def test_every_key_of_an_experiment_is_explained(key: str) -> None:
    title, meaning, values, *_ = explain(key)
    assert title == key
    assert len(meaning.strip()) > 2
    assert "; default: " in values


@pytest.mark.parametrize("key", ["study", "methods", "settings"])
def test_a_study_and_its_keys_are_explained(key: str) -> None:
    lines = explain(key)
    for name in ("methods", "settings", "seeds", "tuning"):
        assert name in lines
    assert max(map(len, lines)) <= 100


def test_each_key_of_tuning_is_explained() -> None:
    lines = explain("tuning")
    for field in dataclasses.fields(Tuning):
        assert f"tuning.{field.name}" in lines


@pytest.mark.parametrize(
    ("default", "shown"),
    [(1 / 5.6, "0.1786"), (86400.5, "86400.5"), (50.0, "50.0"), (1e-6, "1e-06")],
)
def test_a_default_is_rounded_only_where_it_has_no_end(default: float, shown: str) -> None:
    (field,) = dataclasses.fields(dataclasses.make_dataclass("Made", [("limit", float, default)]))
    assert shown_default(field) == shown


def test_an_algorithm_says_what_crosses() -> None:
    lines = [line.strip() for line in explain("perfed-ckt")]
    assert "client → server: soft_decisions, |P|×N probabilities" in lines
    assert "server → client: centroids, at most 3×|P|×N probabilities" in lines
    assert "client → server: nothing" in [line.strip() for line in explain("local")]
    assert explain("tests/plugins/eight_bit.py:EightBit")[0].endswith("(stage)")
    assert any("import path" in line for line in explain("wire"))


def test_nothing_is_left_out_and_nothing_is_there_twice() -> None:
    titles = [entry.title() for entry in entries()]
    assert len(set(titles)) == len(titles)
    assert len(overview()) == len(titles)
    keys = {entry.key for entry in entries()}
    for cls in (Experiment, Comparison):
        assert {f.name for f in dataclasses.fields(cls)} - {"experiment"} <= keys


def test_values_and_defaults_in_words() -> None:
    assert explain("training.steps") == [
        "training.steps",
        "  τ: training steps per round",
        "  a whole number, at least 1; default: 10",
    ]
    assert explain("selection")[2] == "  one of by-size, uniform; default: by-size"
    assert "default: 0.1, 0.3, 0.4" in explain("split.train")[2]
    assert explain("data.by_client")[2] == "  true or false; default: false"
    assert any(
        "a whole number, at least 0, or a dataset, by name: " in line
        for line in explain("data.public")
    )
    assert [line.split()[0] for line in explain("partition")[4:]] == sorted(perfed.partitions)
    assert explain("data.public.size") == explain("data.size")


@dataclass(frozen=True)
class Mine(Algorithm):
    """Mine, and nobody else's."""

    often: int = option(2, "how often", ge=1)


def test_a_users_own_by_import_path() -> None:
    assert explain(f"{__name__}:Mine") == [
        f"{__name__}:Mine (algorithm)",
        "  Mine, and nobody else's.",
        "  often: how often",
        "    a whole number, at least 1; default: 2",
        "  messages: nothing is declared; any finite numbers are admitted",
    ]
    with pytest.raises(ConfigError, match="has no options"):
        explain(f"{__name__}:REGISTRIES")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("training.step", "did you mean 'training.steps'?"),
        ("clusters", "did you mean 'algorithm.clusters'?"),
        ("trainning", "did you mean 'training'?"),
        ("algorithm.clusterz", "did you mean 'algorithm.clusters'?"),
        ("wieght", "did you mean 'algorithm.weight'?"),
        ("xyzzy", "no such key ('perfed explain' lists all)"),
    ],
)
def test_a_wrong_key_gives_the_right_one(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain(wrong)
    assert right in str(caught.value)


def test_a_preset_is_shown_as_it_is() -> None:
    text = "\n".join(explain("digits-groups"))
    assert parse(load_yaml(text, "here")) == perfed.load("digits-groups")


def test_where_an_option_is_one_of_a_few_words_they_are_said() -> None:
    fields = {field.name: field for field in dataclasses.fields(Training)}
    said = described(Training, fields["public_batchnorm"])
    assert [said.count(word) for word in ("separate,", "private,", "shared,")] == [1, 1, 1]
    assert described(Training, fields["steps"]) == "τ: training steps per round"
    colours = {field.name: field for field in dataclasses.fields(datasets["images"])}["colours"]
    assert described(datasets["images"], colours).endswith(" (rgb or grey)")
    assert "by-size, with probability" in " ".join(commented(Experiment()).replace("#", "").split())
