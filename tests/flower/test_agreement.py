"""A hostile coordinator, and a site that decides for itself (ATTACKS.md 18 to 24, 26, 28, 29)."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from flwr.app import ConfigRecord, Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed.core.algorithm import algorithms
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.flower import client_app, codec
from perfed.flower.agreement import Agreement, built_in_names, sends_no_weights
from perfed.flower.protocol import FIRST, JOIN, ROUND, Envelope, Header, Refused
from perfed.flower.site import IDLE_RUNS, Site
from tests.flower.setting import write_federation
from tests.flower.test_site import PLAN, header, join, play, site

WITHOUT_WEIGHTS = {"local", "majority"}
WITHOUT_WEIGHTS |= {"perfed-ckt", "perfed-evidence", "perfed-kin", "fedmd", "ds-fl", "scarlet"}
WITHOUT_WEIGHTS |= {"cosmos", "kt-pfl", "selective-fd", "fd", "fedproto", "fedtgp"}
WITHOUT_WEIGHTS |= {"cfd", "fedgh", "comet"}
PLANTED = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nclass X: ...\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its sites say nothing of what they agree to."""
    made = write_federation(tmp_path / "federation")
    for path in made.glob("site-*.yaml"):
        values = yaml.safe_load(path.read_text())
        del values["agrees"]
        path.write_text(yaml.safe_dump(values))
    return made


def invited(at: Site, plan: Any, run: str = "trial-1") -> Envelope:
    """Through the encoding, as it would come."""
    task = Envelope(header(at, JOIN, run=run), facts={"plan": plan})
    return at.answer(codec.decode(codec.encode(task)))


def plan(**changes: Any) -> dict[str, Any]:
    return PLAN.to_mapping() | changes


def training(**changes: Any) -> dict[str, Any]:
    return plan(training=PLAN.to_mapping()["training"] | changes)


def allowed_by(refusal: str) -> dict[str, Any]:
    """The line that the refusal names, as site.yaml would have it."""
    line = refusal.rpartition("; ")[2].removesuffix(" in site.yaml would allow it")
    values: dict[str, Any] = yaml.safe_load(line)
    assert list(values) == ["agrees"], refusal
    return values


# 18, 19: weights.


@pytest.mark.attack(18, 19)
def test_the_default_is_what_algorithms_declare_of_themselves() -> None:
    own = built_in_names("algorithms")
    assert {name for name in own if sends_no_weights(algorithms.build(name))} == WITHOUT_WEIGHTS


@pytest.mark.attack(18, 19)
@pytest.mark.parametrize("name", sorted(built_in_names("algorithms")))
def test_an_algorithm_that_sends_weights_is_refused_unless_the_site_lists_it(
    name: str, folder: Path
) -> None:
    asked = plan(algorithm={"name": name})
    answer = invited(site(folder), asked)
    if name in WITHOUT_WEIGHTS:
        assert not answer.refusal
        return
    assert answer.refusal == (
        f"this site does not agree to '{name}', which sends weights; "
        f"agrees: {{algorithms: [{name}]}} in site.yaml would allow it"
    )
    assert not list((folder / "state-0").glob("*/plan.json"))
    assert not invited(site(folder, **allowed_by(answer.refusal)), asked).refusal


def test_the_line_keeps_what_the_site_lists_already(folder: Path) -> None:
    here = site(folder, agrees={"algorithms": ["ditto"]})
    answer = invited(here, plan(algorithm="fedavg"))
    assert "agrees: {algorithms: [ditto, fedavg]} in site.yaml" in answer.refusal


@pytest.mark.attack(18)
def test_a_site_that_agrees_to_less_since_then_does_not_go_on(folder: Path) -> None:
    fedavg = plan(algorithm={"name": "fedavg"})
    assert not invited(site(folder, agrees={"algorithms": ["fedavg"]}), fedavg).refusal
    here = site(folder, agrees={})
    answer = here.answer(Envelope(header(here, ROUND, 0)))
    assert "does not agree to 'fedavg'" in answer.refusal
    assert not answer.message


def test_a_name_in_the_sites_own_file_must_be_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"agrees.algorithms\[0\]: unknown 'fedavgg'; did you"):
        site(folder, agrees={"algorithms": ["fedavgg"]})


# 20, 21: paths and modules.


def with_path(kind: str, path: str) -> dict[str, Any]:
    return {
        "algorithms": plan(algorithm={"name": path}),
        "stages": plan(wire=[{"name": path}]),
        "metrics": plan(metrics=[path]),
        "optimizers": training(optimizer={"name": path}),
        "schedules": training(schedule=path),
        "networks": plan(algorithm={"name": "perfed-ckt", "clusters": 2, "weight": path}),
    }[kind]


@pytest.mark.attack(20, 21)
@pytest.mark.parametrize(
    "kind", ["algorithms", "stages", "metrics", "optimizers", "schedules", "networks"]
)
def test_a_path_from_the_coordinator_is_not_imported(kind: str, folder: Path) -> None:
    planted = folder / "planted.py"
    planted.write_text(PLANTED)
    for path in (f"{planted}:X", "planted.py:X", "planted.py", "planted:X", f"{folder}/none.py:X"):
        refusal = invited(site(folder), with_path(kind, path)).refusal
        assert refusal.startswith(f"this site does not import '{path}' because"), refusal
        assert allowed_by(refusal) == {"agrees": {kind: [path]}}
    assert not planted.with_suffix(".ran").exists()
    # Only the very path that is listed, and it is then imported: here it holds nothing of use.
    agrees = {kind: ["planted.py:X"]}
    assert "does not import" in invited(site(folder, agrees=agrees), with_path(kind, "a:X")).refusal
    assert not planted.with_suffix(".ran").exists()
    refusal = invited(site(folder, agrees=agrees), with_path(kind, "planted.py:X")).refusal
    assert refusal.startswith("the plan: ")
    assert planted.with_suffix(".ran").exists() == (kind != "networks")


@pytest.mark.attack(21)
def test_no_module_is_imported_and_its_names_are_not_told(folder: Path) -> None:
    sys.modules.pop("this", None)
    for name in ("this:x", "this", "this.x", "imported", "object:x"):
        refusal = invited(site(folder), plan(algorithm=name)).refusal
        assert refusal
        assert "did you mean" not in refusal
    network = {"name": "imported", "factory": "this:s"}
    hidden = {"name": "perfed-ckt", "deep": [{"deeper": network}]}
    assert "does not import 'this:s'" in invited(site(folder), plan(algorithm=hidden)).refusal
    assert "this" not in sys.modules


@pytest.mark.attack(20)
def test_a_name_that_a_file_has_registered_is_not_perfeds_own(folder: Path) -> None:
    from perfed.core.wire import Stage, stages

    stages.register("planted")(type("Planted", (Stage,), {"__module__": "planted"}))
    try:
        refusal = invited(site(folder), plan(wire=["planted"])).refusal
    finally:
        stages.forget("planted")
    assert refusal == "the perfed here has no 'planted' among its stages"


# 23, 24: limits, before anything is made.


@pytest.mark.attack(23, 30)
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (training(steps=10**7), "10000000 steps a round, at most 10000; agrees: {steps: 10000000}"),
        (training(steps=10**9), "1000000000 steps a round"),
        (training(epochs=10**6), "steps a round, at most 10000; agrees: {steps: "),
        (training(epochs=2**62), "1000000000000000000 steps a round"),
        (training(batch_size=10**5), "100000 samples a step, at most 1024"),
        (training(public_batch_size=10**6), "a step, at most 1024; agrees: {batch_size: 1000000}"),
        (training(learning_rate=1e4), "10000.0 as a learning rate, at most 1.0"),
        (plan(clients=10**9), "1000000000 clients, at most 10000; agrees: {clients: 1000000000}"),
        (
            training(steps=1, batch_size=1),
            "1 samples a round, at least 16; agrees: {least_s",
        ),
        (training(steps=3, batch_size=5), "15 samples a round, at least 16"),
        (plan(rounds=10**6), "1000000 rounds, at most 10000; agrees: {rounds: 1000000}"),
    ],
)
def test_a_limit_holds_before_anything_is_made(
    asked: dict[str, Any], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = site(folder)
    monkeypatch.setattr(Site, "_population", None)
    refusal = invited(here, asked).refusal
    assert refusal.startswith("this site does not agree to ")
    assert said in refusal
    assert len(refusal) < 200
    assert allowed_by(refusal)


@pytest.mark.attack(23)
@pytest.mark.parametrize(
    "asked",
    [training(epochs=10**4200), training(batch_size=10**8), training(public_batch_size=2**63)],
)
def test_what_no_experiment_can_have_is_refused_in_one_line(
    asked: dict[str, Any], folder: Path
) -> None:
    refusal = invited(site(folder), asked).refusal
    assert refusal.startswith("the plan: training.")
    assert "is out of range" in refusal
    assert len(refusal) < 200


@pytest.mark.attack(23)
def test_steps_of_an_algorithms_own_are_limited_too(folder: Path) -> None:
    here = site(folder, agrees={"algorithms": ["per-fedavg"]})
    asked = plan(algorithm={"name": "per-fedavg", "adaptation_steps": 10**9})
    assert "1000000000 steps a round, at most 10000" in invited(here, asked).refusal


@pytest.mark.attack(23)
def test_training_that_takes_too_long_ends_and_the_site_stays_as_it_was(folder: Path) -> None:
    here = site(folder, agrees={"seconds": 1e-9})
    assert not invited(here, plan()).refusal
    before = {path: path.read_bytes() for path in folder.glob("state-0/*/checkpoint*")}
    refusal = play(here, 0).refusal
    assert (
        "does not train for more than 1e-09 seconds in a round; agrees: {seconds: 2e-09}" in refusal
    )
    assert before == {path: path.read_bytes() for path in folder.glob("state-0/*/checkpoint*")}
    assert not play(site(folder, agrees={"seconds": 60}), 0).refusal


def test_a_site_may_agree_to_more(folder: Path) -> None:
    refusal = invited(site(folder), training(steps=20000)).refusal
    assert not invited(site(folder, **allowed_by(refusal)), training(steps=20000)).refusal


@pytest.mark.attack(23)
def test_a_run_has_the_rounds_that_were_agreed_to(folder: Path) -> None:
    here = site(folder)
    invited(here, plan(rounds=2))
    assert play(here, 1).message
    assert play(here, 2).refusal == "round 2: this run has 2, from 0"


@pytest.mark.attack(24)
def test_a_large_message_is_refused_in_both_ways(folder: Path) -> None:
    join(site(folder))
    came = play(site(folder, agrees={"bytes_in": 100}), 0).refusal
    assert "bytes in a message, at most 100; agrees: {bytes_in: " in came
    assert not play(site(folder, **allowed_by(came)), 0).refusal
    left = play(site(folder, agrees={"bytes_out": 100}), 0)
    assert "bytes in a message, at most 100; agrees: {bytes_out: " in left.refusal
    assert not left.message


@pytest.mark.attack(10, 24)
def test_a_large_message_is_refused_before_a_tensor_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = codec.encode(Envelope(Header(ROUND, "r", 0, ""), Message(x=torch.zeros(1000))))
    assert codec.decode(records, 5000).message
    monkeypatch.setattr("perfed.core.tensorfile.decode", None)
    with pytest.raises(Refused, match=r"a message of 40\d\d bytes: must be at most 2000"):
        codec.decode(records, 2000)


@pytest.mark.attack(24)
def test_the_app_at_a_site_asks_the_sites_file_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = site(folder, agrees={"bytes_in": 2000})
    task = Envelope(header(here, ROUND, 0), Message(x=torch.zeros(1000)))
    sent: Any = SimpleNamespace(content=codec.encode(task))
    context = Context(1, 1, {"site": str(folder / "site-0.yaml")}, RecordDict(), {})
    monkeypatch.setattr("perfed.core.tensorfile.decode", None)
    monkeypatch.setattr(Site, "answer", None)
    monkeypatch.setattr(client_app, "FlowerMessage", lambda content, reply_to: content)
    answer = codec.decode(cast(RecordDict, client_app.answer(sent, context)))
    assert "bytes: must be at most 2000" in answer.refusal


# 26 (with 25): what is not declared is not trained on.


@pytest.mark.attack(25, 26)
@pytest.mark.parametrize("value", [1e3, 1e30, -0.1, 0.2, float("nan")])
def test_centroids_that_are_no_probabilities_are_not_trained_on(value: float, folder: Path) -> None:
    here = site(folder)
    join(here)
    wrong = Message(centroids=torch.full((2, 30, 10), value))
    answer = here.answer(Envelope(header(here, ROUND, 0), wrong))
    assert "centroids: " in answer.refusal
    assert not answer.message
    assert not list((folder / "state-0").glob("*/checkpoint.safetensors"))


# 28: folders.


@pytest.mark.attack(28)
def test_many_invitations_leave_few_folders(folder: Path) -> None:
    here = site(folder)
    join(here, run="trial-mine")
    play(here, 0, "trial-mine")
    for number in range(3 * IDLE_RUNS):
        assert not join(here, run=f"trial-{number}").refusal
        if number % 2:
            assert not play(here, -1, f"trial-{number}").refusal  # an opening is no training
    runs = {path.parent.name for path in (folder / "state-0").glob("*/plan.json")}
    newest = range(2 * IDLE_RUNS, 3 * IDLE_RUNS)
    assert runs == {"trial-mine", *(f"trial-{number}" for number in newest)}
    assert len(list((folder / "state-0").glob("*/"))) == IDLE_RUNS + 1
    assert not play(here, 1, "trial-mine").refusal


@pytest.mark.attack(28)
def test_what_somebody_else_keeps_in_a_folder_is_not_deleted(folder: Path) -> None:
    here = site(folder)
    join(here, run="trial-old")
    note = folder / "state-0" / "trial-old" / "note"
    note.write_text("mine")
    join(here, run="trial-broken")
    broken = folder / "state-0" / "trial-broken" / "checkpoint.safetensors"
    broken.write_bytes(b"cut off")
    for number in range(IDLE_RUNS + 2):
        join(here, run=f"trial-{number}")
    assert note.read_text() == "mine"
    assert broken.read_bytes() == b"cut off"


# 29: what is no plan.

MALFORMED = [
    (None, "there is no plan in the invitation"),
    ("fedavg", "the plan is a str, must be keys and values"),
    ([1], "the plan is a list, must be keys and values"),
    ({}, "the plan has no 'name'"),
    ({k: v for k, v in plan().items() if k != "training"}, "the plan has no 'training'"),
    (plan(seed="0"), "the plan: seed: expected a whole number, got str '0'"),
    (plan(clients=-1), "the plan: clients: -1 is out of range: must be at least 1"),
    (plan(clients=True), "the plan: clients: expected a whole number"),
    (plan(training=3), "the plan: training: expected keys and values, got int 3"),
    (plan(training=None), "the plan: training: expected keys and values, got nothing"),
    (training(steps=2.5), "the plan: training.steps: expected a whole number"),
    (training(learning_rate=float("inf")), "the plan: training.learning_rate: expected a finite"),
    (plan(algorithm=None), "the plan: algorithm: expected a name"),
    (plan(algorithm={"name": ["fedavg"]}), "the plan: algorithm: expected a name"),
    (plan(algorithm={"name": "perfed-ckt", "clusters": {}}), "the plan: algorithm.clusters: "),
    (plan(wire="x"), "the plan: wire: expected a list"),
    (plan(wire=[None]), "the plan: wire[0]: expected a name"),
    (plan(metrics=[3]), "the plan: metrics[0]: expected str"),
    (plan(metrics={}), "the plan: metrics: expected a list"),
    (plan(initial=["common"]), "the plan: initial: ['common'] is none of"),
    (plan(more=1), "the plan: more: unknown key"),
]


@pytest.mark.attack(29)
@pytest.mark.parametrize(("asked", "said"), MALFORMED)
def test_what_is_no_plan_is_refused_in_one_line(asked: Any, said: str, folder: Path) -> None:
    refusal = invited(site(folder), asked).refusal
    assert refusal.startswith(said)
    assert "\n" not in refusal


@pytest.mark.attack(29)
def test_an_invitation_without_a_plan_is_refused(folder: Path) -> None:
    here = site(folder)
    answer = here.answer(Envelope(header(here, JOIN)))
    assert answer.refusal == "there is no plan in the invitation"


@pytest.mark.attack(12, "control-characters-to-a-site")
def test_what_a_coordinator_says_does_not_write_lines_of_its_own(folder: Path) -> None:
    said: list[str] = []
    here = Site.open(folder / "site-0.yaml", said.append)
    for name in ("x\n\x1b[2Jperfed: all is well", "y" * 10**6, "\ud800"):
        answer = here.answer(
            Envelope(header(here, JOIN), facts={"plan": plan(name=name, algorithm=name)})
        )
        assert len(answer.refusal) < 600
        assert answer.refusal.isprintable()
    assert all(line.isprintable() and len(line) < 600 for line in said)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
places = st.sampled_from(
    [(key,) for key in plan()]
    + [("training", key) for key in plan()["training"]]
    + [("algorithm", key) for key in plan()["algorithm"]]
)


@pytest.mark.attack(29)
@settings(max_examples=300, deadline=None)
@given(places, anything)
def test_any_value_anywhere_is_a_plan_or_refused(place: tuple[str, ...], value: Any) -> None:
    asked = plan()
    inside = asked
    for key in place[:-1]:
        inside[key] = dict(inside[key])
        inside = inside[key]
    inside[place[-1]] = value
    with contextlib.suppress(Refused):
        Agreement().plan(asked, 50)


@pytest.mark.attack(2, "envelope-of-other-types")
@pytest.mark.parametrize(
    "change",
    [
        {"facts": "[1]"},
        {"facts": '{"plan": "' + "x" * 2**20 + '"}'},
        {"facts": "[" * 10**5},
        {"round": "0"},
        {"round": True},
        {"run": b"trial"},
        {"kind": 3},
        {"refusal": 1.5},
        {"protocol": [2]},
    ],
)
def test_an_envelope_of_other_types_is_refused(change: dict[str, Any]) -> None:
    records = codec.encode(Envelope(Header(JOIN, "r", -1, "")))
    about = ConfigRecord({**records.config_records["about"], **change})
    with pytest.raises(Refused, match="not an envelope of perfed"):
        codec.decode(RecordDict({"about": about}))


@pytest.mark.attack("task-of-no-kind")
@pytest.mark.parametrize(
    ("kind", "round"), [("train", 0), ("", -1), (ROUND, -1), (FIRST, 3), (JOIN, 5), (ROUND, -7)]
)
def test_a_task_of_no_kind_is_refused(kind: str, round: int, folder: Path) -> None:
    here = site(folder)
    join(here)
    answer = here.answer(Envelope(header(here, kind, round)))
    assert "is no task" in answer.refusal or "there is no '" in answer.refusal
