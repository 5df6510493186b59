"""A site: its data and model by file or import path, its checkpoint, what it refuses."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from perfed import cli
from perfed.config import Training
from perfed.core import tensorfile
from perfed.core.algorithm import algorithms
from perfed.core.errors import ConfigError, PerfedError
from perfed.core.message import Message
from perfed.core.optimizer import optimizers
from perfed.flower.approval import Approvals
from perfed.flower.ledger import Ledger
from perfed.flower.plan import Plan, plan_hash
from perfed.flower.protocol import FIRST, JOIN, PROTOCOL, ROUND, Envelope, Header
from perfed.flower.site import Checkpoint, Site
from tests.flower.processes import wait_until
from tests.flower.setting import write_federation

PLAN = Plan(
    "trial",
    0,
    3,
    9,
    10,
    "common",
    Training(steps=2, batch_size=8, public_batch_size=8, learning_rate=0.1),
    algorithms.build({"name": "perfed-ckt", "clusters": 2}),
)
ADAM = optimizers.build("adam")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_federation(tmp_path / "federation")


def site(folder: Path, client: int = 0, **changes: Any) -> Site:
    path = folder / f"site-{client}.yaml"
    if changes:
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    return Site.open(path, lambda line: None)


def header(at: Site, kind: str, round: int = -1, run: str = "trial-1") -> Header:
    return Header(kind, run, round, at.public)


def join(at: Site, plan: Plan = PLAN, run: str = "trial-1") -> Envelope:
    return at.answer(Envelope(header(at, JOIN, run=run), facts={"plan": plan.to_mapping()}))


def play(at: Site, round: int, run: str = "trial-1") -> Envelope:
    if round < 0:
        return at.answer(Envelope(header(at, FIRST, -1, run)))
    centroids = torch.full((2, 30, 10), 0.1)
    return at.answer(Envelope(header(at, ROUND, round, run), Message(centroids=centroids)))


def weights(folder: Path, run: str = "trial-1") -> dict[str, torch.Tensor]:
    return tensorfile.load(folder / "state-0" / run / "personal.safetensors")


def test_a_round_done_twice_is_trained_once(folder: Path) -> None:
    join(site(folder))
    first = play(site(folder), 0)
    trained = weights(folder)
    again = play(site(folder), 0)
    assert torch.equal(first.message["soft_decisions"], again.message["soft_decisions"])
    assert first.facts == again.facts
    assert all(torch.equal(tensor, weights(folder)[name]) for name, tensor in trained.items())
    play(site(folder), 1)
    assert not torch.equal(weights(folder)["1.weight"], trained["1.weight"])


def test_a_round_that_is_over_is_refused(folder: Path) -> None:
    join(site(folder))
    play(site(folder), 3)
    assert play(site(folder), 2).refusal == "this site has done round 3: round 2 is over"


def test_runs_do_not_touch_each_other(folder: Path) -> None:
    for run in ("trial-1", "trial-2"):
        join(site(folder), run=run)
    play(site(folder), 0, "trial-1")
    play(site(folder), 1, "trial-1")
    once = weights(folder)
    play(site(folder), 0, "trial-2")
    assert all(torch.equal(tensor, weights(folder)[name]) for name, tensor in once.items())
    assert not torch.equal(weights(folder, "trial-2")["1.weight"], once["1.weight"])


@pytest.mark.attack(2, 27)
@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (
            lambda h: replace(h, protocol=PROTOCOL + 1),
            f"version {PROTOCOL + 1} of the protocol, this side {PROTOCOL}",
        ),
        (lambda h: replace(h, public="0" * 32), "the public set of the coordinator is 0000"),
        (lambda h: replace(h, run="trial-9"), "has not joined trial-9"),
        (lambda h: replace(h, run="../../etc"), "is no run's id"),
    ],
)
def test_a_task_that_is_not_for_this_site_is_refused(folder: Path, task: Any, reason: str) -> None:
    here = site(folder)
    join(here)
    answer = here.answer(Envelope(task(header(here, ROUND, 0)), Message(centroids=torch.ones(2))))
    assert reason in answer.refusal
    assert not answer.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "other"}, "takes part in 'trial', not in 'other'"),
        ({"classes": 7}, "has 10 classes, the run 7"),
        ({"clients": 2}, "this site is client 2; the run's are 0 … 1"),
    ],
)
def test_a_run_that_does_not_fit_is_not_joined(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    assert reason in join(site(folder, 2), replace(PLAN, **changes)).refusal


def test_a_plan_of_the_first_version_is_still_that_plan(folder: Path) -> None:
    """It had a decay where a schedule is now, and neither rounds nor a wire nor metrics."""
    path = folder / "state-0" / "trial-1" / "plan.json"
    new = {"schedule", "optimizer", "optimizer_state", "epochs", "augment"}
    old = {k: v for k, v in PLAN.to_mapping().items() if k not in ("rounds", "wire", "metrics")}
    training = {k: v for k, v in old["training"].items() if k not in new}
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(old | {"training": training | {"decay": 0.0}}))
    assert not join(site(folder)).refusal
    path.write_text(json.dumps(old | {"training": training | {"decay": 0.0}, "seed": 1}))
    assert "another configuration" in join(site(folder)).refusal


@pytest.mark.attack("changed-plan")
@pytest.mark.parametrize(
    ("changes", "said", "goes_on"),
    [
        ({"rounds": 12}, "rounds: 9 → 12", True),
        ({"metrics": ("loss",)}, 'metrics: [] → ["loss"]', True),
        ({"training": replace(PLAN.training, steps=3)}, "training.steps: 2 → 3", True),
        ({"training": replace(PLAN.training, optimizer=ADAM)}, "training.optimizer.b", False),
        ({"seed": 1}, "seed: 0 → 1", False),
    ],
)
def test_a_changed_plan_waits_until_it_is_approved(
    changes: dict[str, Any],
    said: str,
    goes_on: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also for a new run. Afterwards this run goes on if its checkpoint allows it."""

    def approve(*words: str) -> tuple[Any, str, str]:
        arguments = ["perfed", "site", "approve", str(folder / "site-0.yaml"), *words]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    assert approve() == (0, "no plan waits here\n", "")
    assert approve("0" * 12) == (2, "", "perfed: no plan waits here\n")
    assert not join(site(folder)).refusal
    plan = replace(PLAN, **changes)
    for run in ("trial-1", "trial-2"):
        refusal = join(site(folder), plan, run).refusal
        assert refusal.startswith("the plan is not the one that was approved here: ")
        assert said in refusal
        assert refusal.endswith(" would allow it")
    (command,) = re.findall(r"'perfed site approve SITE.YAML (\w+)'", refusal)
    assert not (folder / "state-0" / "trial-2").exists()
    assert not join(site(folder)).refusal  # the old one is still approved
    code, shown, _ = approve()
    assert (code, said in shown, command in shown) == (0, True, True)
    assert approve("0" * 12)[0] == approve(command[:4])[0] == 2
    assert approve(command)[0] == 0
    assert not join(site(folder), plan, "trial-2").refusal
    refusal = join(site(folder), plan).refusal
    assert ("another configuration" in refusal) is not goes_on
    events = [entry for entry in site(folder).ledger.read().entries if entry["event"] == "approved"]
    assert [entry["why"] for entry in events] == [
        "the first plan for a run of this name",
        "perfed site approve",
    ]
    assert any(said.split(" → ")[0] in change for change in events[1]["changes"])


@pytest.mark.attack("changed-plan")
def test_what_is_approved_is_what_somebody_has_seen(folder: Path) -> None:
    """Another plan has come before the first one was approved."""
    join(site(folder))
    seen = plan_hash(replace(PLAN, rounds=10).to_mapping())
    for rounds in (10, 11):
        assert "rounds" in join(site(folder), replace(PLAN, rounds=rounds)).refusal
    approvals = Approvals(folder / "state-0", Ledger(folder / "state-0"))
    with pytest.raises(PerfedError, match=f"'{seen}' does not wait here, but"):
        approvals.approve(seen)
    for text in ("[]", "{", '{"trial": 3}'):
        (folder / "state-0" / "approved.json").write_text(text)
        assert "is corrupt" in join(site(folder)).refusal


@pytest.mark.attack(47)
def test_a_corrupt_checkpoint_is_reported_not_replaced(folder: Path) -> None:
    join(site(folder))
    play(site(folder), 0)
    path = folder / "state-0" / "trial-1" / "checkpoint.safetensors"
    whole = path.read_bytes()
    number = int.from_bytes(whole[:8], "little") + 8 + 3  # a byte of a weight
    flipped = whole[:number] + bytes([whole[number] ^ 0x40]) + whole[number + 1 :]
    later = whole.replace(b'\\"round\\": 0', b'\\"round\\": 1')
    for damaged in (whole[:1000], flipped, later):
        assert damaged != whole
        path.write_bytes(damaged)
        refusal = play(site(folder), 1).refusal
        assert "is corrupt" in refusal
        assert "'perfed site restore'" in refusal
        assert path.read_bytes() == damaged
    path.write_bytes(whole)
    assert play(site(folder), 1).message


def test_a_checkpoint_of_an_older_version_without_a_checksum_is_read(folder: Path) -> None:
    join(site(folder))
    answer = play(site(folder), 0)
    path = folder / "state-0" / "trial-1" / "checkpoint.safetensors"
    tensors, about = tensorfile.unsealed(path.read_bytes())
    told = json.loads(about)
    words = {"round": str(told["round"]), "facts": json.dumps(told["facts"])}
    path.write_bytes(tensorfile.encode(tensors, words))
    assert Checkpoint.trained(path)
    again = play(site(folder), 0)
    assert again.facts == answer.facts
    assert play(site(folder), 1).message


def test_what_is_gained_is_told_at_the_site(folder: Path) -> None:
    """Alone is local training, on the same mini-batches: with λ=0 there is nothing to gain."""
    nothing = replace(
        PLAN, algorithm=algorithms.build({"name": "perfed-ckt", "clusters": 2, "weight": 0.0})
    )
    join(site(folder, 1), nothing)
    for round in range(3):
        play(site(folder, 1), round)
    report = folder / "state-1" / "trial-1" / "report.jsonl"
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2]
    assert all(line["alone_test_loss"] == line["test_loss"] for line in lines)
    assert all(line["gain"] == 0 for line in lines)
    assert "alone" not in (join(site(folder, 0), nothing).facts)


def test_a_site_may_save_the_cost_of_the_copy(folder: Path) -> None:
    here = site(folder, alone=False)
    join(here)
    play(here, 0)
    assert "alone" not in (folder / "state-0" / "trial-1" / "report.jsonl").read_text()


def test_a_copy_that_diverges_is_nobody_elses_matter(folder: Path) -> None:
    join(site(folder))
    play(site(folder), 0)
    path = folder / "state-0" / "trial-1" / "checkpoint.safetensors"
    checkpoint = Checkpoint.load(path, torch.device("cpu"))
    assert checkpoint.alone is not None
    checkpoint.alone.weights.params["1.weight"].fill_(float("nan"))
    checkpoint.save(path)
    answer = play(site(folder), 1)
    assert (answer.refusal, bool(answer.message)) == ("", True)
    last = (path.parent / "report.jsonl").read_text().splitlines()[-1]
    assert json.loads(last).keys() & {"gain", "alone_test_accuracy"} == set()


def work_and_tell(folder: Path, ready: Any) -> None:
    here = Site.open(folder / "site-0.yaml", lambda line: None)
    ready.set()
    for round in range(200):
        play(here, round)


@pytest.mark.attack(49)
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(folder: Path) -> None:
    join(site(folder), replace(PLAN, rounds=1000))
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    worker = spawn.Process(target=work_and_tell, args=(folder, ready))
    worker.start()
    assert ready.wait(60)
    checkpoint = folder / "state-0" / "trial-1" / "checkpoint.safetensors"
    wait_until(checkpoint.is_file, "a first round")
    worker.join(0.3)
    assert worker.is_alive()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    done = join(site(folder), replace(PLAN, rounds=1000)).facts["round"]
    assert done >= 0
    assert play(site(folder), done).message  # from the checkpoint
    assert play(site(folder), done + 1).message
    assert site(folder).ledger.read().faults == []


OWN = """
import numpy as np
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        layers = nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, classes)
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)

def make(shape, classes):
    return Net(shape, classes)

def too_few(shape, classes):
    return Net(shape, classes - 1)

def load():
    random = np.random.default_rng(0)
    return random.normal(size=(40, 1, 8, 8)), np.arange(40) % 10

def eleven():
    x, y = load()
    return x, y + 1

def flat():
    x, y = load()
    return x.reshape(40, 64), y

def broken():
    x, y = load()
    x[3] = np.nan
    return x, y
"""


@pytest.mark.parametrize("place", ["own.py", "nets/own.py", "own_module"])
def test_model_and_data_of_ones_own(
    folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By file, relative to the site's configuration wherever one is, or by import path."""
    path = folder / (place if place.endswith(".py") else f"{place}.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(OWN)
    monkeypatch.syspath_prepend(str(folder))
    here = site(folder, model=f"{place}:Net", data={"source": f"{place}:load"})
    data, model, _ = here.check()
    assert "4 to validate, 20 to test, each 1×8×8" in data
    assert f"{64 * 5 + 5 + 5 * 10 + 10} parameters" in model
    assert join(here).facts["architecture"] == f"{place}:Net"
    assert play(here, -1).message["soft_decisions"].shape == (30, 10)
    assert play(here, 0).message["soft_decisions"].shape == (30, 10)
    restored = tensorfile.load(folder / "state-0" / "trial-1" / "personal.safetensors")
    assert {"layers.1.weight", "layers.3.bias"} <= restored.keys()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "own.py:too_few"}, r"gives 9 numbers .*10 classes"),
        ({"model": "own.py:Nett"}, "has no 'Nett'; did you mean 'Net'"),
        ({"model": "nowhere.py:Net"}, "cannot import 'nowhere.py'"),
        (
            {"data": {"source": "own.py:eleven"}},
            "labels in the data go from 1 to 10",
        ),
        ({"data": {"source": "own.py:flat"}}, "public samples are .* own are"),
        ({"data": {"source": "own.py:broken"}}, "not finite"),
        ({"data": {"source": "own.py:make"}}, "failed: TypeError"),
        ({"data": {}}, "either 'source' or 'dataset'"),
        ({"public": {"file": "missing.npz"}}, "cannot read missing.npz"),
        ({"clas": 3}, "did you mean 'class"),
        ({"classes": 1}, "must be at least 2"),
        ({"run": ""}, "run: missing"),
        ({"device": "cuda:99"}, "cannot be used"),
    ],
)
def test_a_mistake_is_found_before_joining(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    (folder / "own.py").write_text(OWN)
    with pytest.raises(PerfedError, match=reason):
        site(folder, **changes).check()


def test_another_public_set_is_found_before_joining(folder: Path) -> None:
    """By a single pixel."""
    public = np.zeros((30, 1, 8, 8), np.float32)
    np.savez(folder / "public.npz", public=public)
    agreed = site(folder, public="public.npz").public
    public[7, 0, 3, 3] += 1e-3
    np.savez(folder / "public.npz", public=public)
    with pytest.raises(ConfigError, match=f"not {agreed}"):
        site(folder, public={"file": "public.npz", "hash": agreed})


def test_bytes_of_a_public_set_are_scaled_as_those_of_a_dataset(folder: Path) -> None:
    public = np.random.default_rng(0).integers(0, 256, (30, 1, 8, 8)).astype(np.uint8)
    np.save(folder / "public.npy", public)
    here = site(folder, public="public.npy")
    assert here.samples.public_x.dtype == np.float32
    assert (here.samples.public_x.min(), here.samples.public_x.max()) == (-1, 1)


def site_with_table(folder: Path, labels: list[str], classes: int = 4, **data: Any) -> Site:
    rows = [f"{number},{number % 3},{label}" for number, label in enumerate(labels)]
    (folder / "own.csv").write_text("\n".join(["age,dose,outcome", *rows]))
    dataset = {"name": "csv", "path": "own.csv", "target": "outcome", "scale": "none"}
    own = {"dataset": dataset, **data}
    return site(folder, classes=classes, model="mlp", public={}, data=own)


def test_labels_of_a_table_are_as_in_the_file_though_some_do_not_occur(folder: Path) -> None:
    """A dataset numbers the classes it finds: here 3 would be 1, and at another site 3."""
    at = site_with_table(folder, ["3", "0"] * 8)
    assert at.samples.y.tolist() == [3, 0] * 8
    assert any("2 of 4 classes in the training data: 0 (" in line for line in at.check())
    with pytest.raises(ConfigError, match="label 9 in the data: with 4 classes"):
        site_with_table(folder, ["3", "9"] * 8)


def test_classes_with_names_have_the_numbers_that_all_sites_agree_on(folder: Path) -> None:
    names = ["healthy", "mild", "severe"]
    at = site_with_table(folder, ["severe", "healthy"] * 8, classes=3, class_names=names)
    assert at.samples.y.tolist() == [2, 0] * 8
    for labels, given, said in (
        (["severe"] * 16, {}, "data.class_names: missing: the data names its classes, as 'severe'"),
        (["odd"] * 16, {"class_names": names}, "data.class_names: 'odd' is in the data, and not"),
        (["mild"] * 16, {"class_names": names[1:]}, "data.class_names: 2 names of 3 classes"),
    ):
        with pytest.raises(ConfigError, match=said):
            site_with_table(folder, labels, classes=3, **given)


def test_a_state_folder_that_cannot_be_is_found_before_joining(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state: cannot write in .*file/state: Not a directory"):
        site(folder, state="file/state").check()
