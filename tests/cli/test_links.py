"""Named links: a part of a configuration that goes over an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perfed
from perfed import config
from perfed.config import linked, load, parse
from perfed.core.errors import ConfigError
from perfed.runs.design import design
from tests.cli.test_cli import perfed as command
from tests.plugins.test_stages import HERE, NOISE

CODE = {"name": f"{HERE}/eight_bit.py:EightBit"}


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of a folder of the test's own."""
    for name, text in {
        "small": f"about: small\nwire: ['{CODE['name']}']",
        "noisy": f"wire: [{{name: '{NOISE['name']}', norm: 50.0}}]\ntraining: {{steps: 3}}",
        "short": "training: {steps: 2, batch_size: 8}\nrounds: 2",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    names = lambda folder=config.PRESETS: ["noisy", "short", "small"]  # noqa: E731
    text = lambda name, folder: (tmp_path / f"{name}.yaml").read_text()  # noqa: E731
    monkeypatch.setattr(config, "preset_names", names)
    monkeypatch.setattr(config, "preset_text", text)
    eight_bit = perfed.stages[CODE["name"]]
    monkeypatch.setattr(eight_bit, "codes", True)


def names(values: dict[str, Any]) -> list[str]:
    experiment = parse(values)
    assert isinstance(experiment, perfed.Experiment)
    return [type(stage).__name__ for stage in experiment.wire]


@pytest.mark.usefixtures("links")
def test_its_keys_are_set_and_its_stages_added_codecs_last() -> None:
    found = linked({"rounds": 9, "training": {"learning_rate": 0.3}, "link": ["small", "noisy"]})
    assert "link" not in found
    assert found["training"] == {"learning_rate": 0.3, "steps": 3}
    assert found["rounds"] == 9
    assert names(found) == ["GaussianNoise", "EightBit"]
    assert names({"link": "noisy", "wire": [CODE]}) == ["GaussianNoise", "EightBit"]
    assert names({"link": [], "wire": [NOISE]}) == ["GaussianNoise"]
    with pytest.raises(ConfigError, match="wire: 'gaussian-noise' needs numbers"):
        names({"wire": [CODE, NOISE]})
    with pytest.raises(ConfigError, match="wire: 'eight-bit' is there twice"):
        names({"wire": [CODE], "link": "small"})


@pytest.mark.usefixtures("links")
def test_two_that_disagree_are_refused_in_a_line() -> None:
    for link, words in (
        (["noisy", "short"], "'noisy' and 'short' both set training.steps: take one"),
        (["small", "small"], "'small' is there twice"),
        ("smal", "no link is called 'smal'; did you mean 'small'"),
        (3, "no link is called 3"),
        ([{"a": 1}], "no link is called {'a': 1}"),
    ):
        with pytest.raises(ConfigError) as error:
            parse({"link": link})
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_every_link_of_the_package_fits_every_algorithm_that_it_can() -> None:
    for name in config.preset_names(config.LINKS):
        link = config.read_mapping(name, config.LINKS)
        assert link["about"]
        for algorithm in perfed.algorithms:
            if "privacy" in link and perfed.algorithms[algorithm].not_private:
                with pytest.raises(ConfigError, match="choose another method"):
                    parse({"algorithm": algorithm, "link": name})
            else:
                assert parse({"algorithm": algorithm, "link": name})


def test_on_the_command_line_before_set_and_in_studies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = load(links=["tiny"]).to_mapping()["wire"]
    assert load(None, ["wire=[]"], ["tiny"]).to_mapping()["wire"] == []
    study = design({"methods": ["local"], "settings": {"plain": {}, "tiny": {"link": "tiny"}}})
    assert [cell.experiment(0, {}).to_mapping()["wire"] for cell in study.cells()] == [[], wire]
    for arguments in (["run"], ["compare"], ["study", "bench-digits"], ["tune"]):
        assert command(monkeypatch, *arguments, "--link", "tinny") == 2
        assert "link: no link is called 'tinny'; did you mean 'tiny'?" in capsys.readouterr().err
    assert command(monkeypatch, "explain", "tiny") == 0
    assert "wire:" in capsys.readouterr().out
