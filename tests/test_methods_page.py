"""docs/methods.md: every method of the package has its paragraph, its picture and its costs."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch

import perfed
from perfed.core.algorithm import Sends
from perfed.core.declaration import PROBABILITIES, SAMPLES, Array, Maybe, Model, PerParameter
from perfed.core.message import Message

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    import method_figures
    from method_costs import EachRecipient, methods

PAGE = (ROOT / "docs" / "methods.md").read_text("utf-8")
BUILT_IN = perfed.algorithms.built_in()
RECORD = json.loads((ROOT / "benchmarks/results/method_costs.json").read_text("utf-8"))
ROWS = {row["method"]: row for row in RECORD["rows"]}


def sections() -> dict[str, dict[str, str]]:
    """By what clients send: the paragraphs of methods, by name."""
    found = {}
    for part in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        title, text = part.split("\n", 1)
        paragraphs = (one.split("\n", 1) for one in re.split(r"^### ", text, flags=re.M)[1:])
        found[title.lower()] = {name.lower(): words for name, words in paragraphs}
    return {title: words for title, words in found.items() if words}


def test_methods_stand_under_what_their_clients_send_in_the_order_of_the_list() -> None:
    expected: dict[str, list[str]] = {sends: [] for sends in get_args(Sends)}
    for name in sorted(BUILT_IN):
        expected[str(perfed.algorithms[name].sends)].append(name)
    assert {title: list(found) for title, found in sections().items()} == expected
    assert list(sections()) == list(expected)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_method_has_a_short_paragraph_and_its_picture(name: str) -> None:
    words = sections()[str(perfed.algorithms[name].sends)][name]
    assert f"](method-{name}.svg)" in words
    assert "weakness" in words
    assert 3 < len(re.findall(r"\.(?=\s)", words)) < 10  # sentences


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_picture_is_what_the_method_declares(name: str) -> None:
    drawn = (ROOT / "docs" / f"method-{name}.svg").read_text("utf-8")
    assert drawn == method_figures.picture(name), "run python benchmarks/method_figures.py"


def test_there_is_no_picture_of_a_method_that_is_gone() -> None:
    pictures = {path.stem for path in (ROOT / "docs").glob("method-*.svg")}
    assert pictures == {f"method-{name}" for name in BUILT_IN}


@pytest.mark.parametrize("name", BUILT_IN)
def test_nothing_in_a_picture_is_cut(name: str) -> None:
    """Letters of 14 pixels are some 7 wide on average, in a wide font."""
    algorithm = perfed.algorithms[name]()
    declared = algorithm.messages()
    room = method_figures.RIGHT - method_figures.LEFT
    for line in (*method_figures.crossing(declared.up), *method_figures.crossing(declared.down)):
        assert 7.4 * len(line) < room, line
    client, server = method_figures.holdings(algorithm)
    for line in (*client, *server):
        assert 7.4 * len(line) < method_figures.BOX, line


def test_words_of_a_picture_say_what_crosses() -> None:
    entries = {
        "soft_decisions": Maybe(Array(("P", "N"), PROBABILITIES)),
        "head": PerParameter("head"),
        "model": Model(),
        "samples": SAMPLES,
    }
    assert method_figures.crossing(entries) == [
        "soft decisions: |P|×N probabilities",
        "weights of the head of its network",
        "weights of its network",
        "and its number of samples",
    ]
    assert method_figures.crossing({}) == []
    assert "nothing crosses" in method_figures.picture("local")
    assert method_figures.picture("local").count('class="arrow"') == 0
    assert method_figures.picture("fedavg").count('class="arrow"') == 2


def test_networks_stand_where_they_are() -> None:
    def has(name: str) -> tuple[list[str], list[str]]:
        return method_figures.holdings(perfed.algorithms[name]())

    assert has("cfd")[1] == ["network 'student'", "the public set"]
    assert "network 'student'" in has("fedkd")[0]
    assert has("feddf") == (["its data", "its network"], ["the public set"])
    assert "a second model" in has("pfedme")[0]


def test_the_record_has_the_costs_of_every_method() -> None:
    assert [(row["method"], row["sends"]) for row in RECORD["rows"]] == list(methods())
    assert set(ROWS) == set(BUILT_IN)


def test_costs_are_those_that_follow_from_the_definitions() -> None:
    """|P|·N, N·F and the network's size, by hand: cnn4 on 32×32 grey pictures, 10 classes."""
    convolutions = (25 * 1 * 32 + 32) + (25 * 32 * 64 + 64)
    head = 512 * 10 + 10
    network = convolutions + (64 * 5 * 5 * 512 + 512) + head
    expected = {
        "local": (0, 0),
        "ds-fl": (10_000, 10_000),
        "perfed-ckt": (10_000, 3 * 10_000),
        "perfed-kin": (10_000 + 12, 10_000 + 12 + 10),
        "fd": (10 * 10 + 10, 10 * 10 + 10),
        "fedproto": (10 * 512 + 10, 10 * 512 + 10),
        "lg-fedavg": (head, head),
        "fml": (1024 * 32 + 32 + 32 * 10 + 10,) * 2,
        "fedavg": (network, network),
        "fedper": (network - head, network - head),
        "scaffold": (2 * network, 2 * network),
        "hypcluster": (network, 3 * network),
        "fedfomo": (network + 5, 5 * network),
    }
    for name, counts in expected.items():
        assert (ROWS[name]["up_parameters"], ROWS[name]["down_parameters"]) == counts, name
    assert RECORD["parameters"] == network


def test_a_broadcast_counts_once_for_each_who_gets_it() -> None:
    channel, message = EachRecipient(), Message(table=torch.zeros(4, 2))
    channel.down({0: message, 1: message})
    assert channel.total.down_parameters == 2 * 8
    channel.down({0: Message()}, {0: Message(table=torch.zeros(4))})
    assert channel.total.down_parameters == 2 * 8
    assert channel.total.down_bytes > 2 * 32
