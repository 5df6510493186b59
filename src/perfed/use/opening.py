"""A model that is ready for use, wherever it is: in a run, at a site, or exported."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from perfed.config import Experiment
from perfed.core import tensorfile
from perfed.core.errors import ConfigError, PerfedError, RunError
from perfed.core.extras import needed
from perfed.core.schema import from_mapping, plain
from perfed.core.tree import OWN
from perfed.data.needs import Needs
from perfed.data.opening import file_content
from perfed.flower.kit import SITE
from perfed.flower.settings import read_site
from perfed.flower.site import ALONE, PERSONAL, REPORT
from perfed.models import architectures
from perfed.runs import Result
from perfed.runs.comparison import FILE as COMPARISON
from perfed.runs.model_file import Blueprint, Part, in_file, load_with
from perfed.runs.result import headline_kind

AT_ONCE = 256  # samples that a model sees together
ABOUT = "perfed"  # under which an exported file says what it is
ONNX, TORCHSCRIPT = ".onnx", ".pt"
SITE_FILES = (".yaml", ".yml")
UNSEEN = "no training sample of"  # in a model's card


@dataclass(frozen=True)
class Ready:
    """A model, what it takes, and where it comes from."""

    needs: Needs
    card: Mapping[str, str]
    run: Callable[[np.ndarray], np.ndarray]
    """From samples to class probabilities."""
    module: nn.Module | None = None
    """Which gives logits; an exported model has none."""
    alone: Path | None = None
    """The file of the model that the same client has without the federation."""

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """A row for each sample."""
        pieces = [self.run(x[start : start + AT_ONCE]) for start in range(0, len(x), AT_ONCE)]
        found = np.concatenate(pieces)
        if found.shape != (len(x), self.needs.classes) or not np.isfinite(found).all():
            raise RunError("the model gives no probabilities for these samples")
        return found


def open_model(
    path: Path, client: int | None = None, kind: str | None = None, network: str = ""
) -> Ready:
    """The model at ``path``: a run directory (with a ``client``), a site's file (site.yaml), a
    site's model file, or an exported one. ``network`` is the own one of a model file that was
    trained with code of your own."""
    if not path.exists():
        raise RunError(f"no such file or folder: {str(path)!r}")
    ending = path.suffix.lower()
    is_run = (path / "config.yaml").is_file()
    if (path / COMPARISON).is_file():
        runs = sorted(file.parent for file in path.rglob("config.yaml"))
        such = f", such as {runs[0]}" if runs else ""
        raise RunError(f"{path} holds several runs: name one of them{such}")
    if client is not None and not is_run:
        raise ConfigError("only a run directory has several clients", "--client")
    if kind is not None and not is_run:
        raise ConfigError("only a run directory has several kinds", "--kind")
    if network and ending != ".safetensors":
        raise ConfigError("only for a model file: all others say what they are", "--network")
    if is_run:
        return _of_run(path, client, kind)
    if (path / SITE).is_file():  # the folder that a kit was unpacked to
        return _of_site(path / SITE)
    if path.is_dir():
        return _of_file(_newest(path), None)
    if ending in SITE_FILES:
        return _of_site(path)
    if ending == ".safetensors":
        own = plain(architectures.build(network)) if network else None
        return _of_file(path, own)
    if ending == ONNX:
        return _of_onnx(path)
    if ending == TORCHSCRIPT:
        return _of_torchscript(path)
    raise RunError(
        f"{path} is no model: it must be a run directory, a site's .yaml file or state folder, "
        f"a .safetensors file, or an exported {ONNX} or {TORCHSCRIPT} file"
    )


def of_module(module: nn.Module, needs: Needs, card: Mapping[str, str], **more: Any) -> Ready:
    """``module`` gives logits."""

    @torch.no_grad()
    def run(x: np.ndarray) -> np.ndarray:
        probabilities: np.ndarray = module(needs.inputs.tensor(x)).float().softmax(1).numpy()
        return probabilities

    return Ready(needs, card, run, module, **more)


def _of_run(path: Path, client: int | None, kind: str | None) -> Ready:
    result = Result(path)
    clients = result.model_clients()
    if client is None:
        if len(clients) > 1:
            raise ConfigError(
                f"missing: whose model; {path} has those of clients {clients[0]} … {clients[-1]}",
                "--client",
            )
        client = clients[0]
    module = result.model(client, kind)
    line = result.directory.lines("clients.jsonl")[-1]
    kind = kind or headline_kind(line)
    accuracy = line[kind]["test_accuracy"][clients.index(client)]
    card = {
        "run": result.experiment.name,
        "method": result.experiment.algorithm.label(),
        "client": str(client),
        "model": kind,
        "rounds": str(result.experiment.rounds),
        "test accuracy": f"{100 * accuracy:.1f} %, on {_judges(result.experiment)}",
    }
    needs = result.needs()
    if kind == "personal" and (unseen := _unseen(result, client)):
        card[UNSEEN] = ", ".join(needs.name(label) for label in unseen)
    return of_module(module, needs, card)


def _judges(experiment: Experiment) -> str:
    if experiment.fresh_test:
        return "fresh samples with this client's mix of labels"
    if experiment.shared_test:
        return "test samples of all clients, with this client's mix of labels"
    return "this client's own test samples"


def _unseen(result: Result, client: int) -> list[int]:
    """The classes of which a client had no training sample, where the run says so."""
    everyone = result.directory.read_json("partition.json").get("clients", ())
    facts = everyone[client] if client < len(everyone) else None  # or a site that told nothing
    counts = (facts or {}).get("labels", {}).get("train", ())
    return [label for label, count in enumerate(counts) if not count]


def _newest(state: Path) -> Path:
    """The model of a site's newest run, in its state folder or in that of a run."""
    if (state / PERSONAL).is_file():
        return state / PERSONAL
    found = sorted(state.glob(f"*/{PERSONAL}"), key=lambda file: file.stat().st_mtime_ns)
    if not found:
        raise RunError(f"{state} is no run directory, and no site has a model in it yet")
    return found[-1]


def _of_site(path: Path) -> Ready:
    options = read_site(path)
    folder = path.absolute().parent
    with chdir(folder):  # where the site's own network is found
        return _of_file(_newest(folder / options.state), plain(options.model))


def _of_file(path: Path, own: Any) -> Ready:
    """``own`` is the client's own network, from somebody who may say what is imported."""
    about = tensorfile.load_described(path)[1]
    if not about:
        raise RunError(
            f"{path} does not say what it is: an earlier version wrote it; a newer round replaces "
            "it, and perfed.load_model(…, network) reads it"
        )
    with in_file(path):
        blueprint = Blueprint.from_text(about)
        if own is not None:
            known = blueprint.parts[OWN]
            blueprint = blueprint.replaced(Part(own, known.inputs, known.outputs))
        blueprint.check_built_in(but_own=own is not None)
    module = load_with(path, blueprint.make)
    alone = path.with_name(ALONE)
    has_alone = alone.is_file() and path.name == PERSONAL
    card = {**blueprint.card, **_report(path)}
    return of_module(module, blueprint.needs, card, alone=alone if has_alone else None)


def _report(path: Path) -> dict[str, str]:
    """What a site's report says of its model."""
    file = path.with_name(REPORT)
    if path.name not in (PERSONAL, ALONE) or not file.is_file():
        return {}
    name = "test_accuracy" if path.name == PERSONAL else "alone_test_accuracy"
    try:
        line = json.loads(file.read_text("utf-8").splitlines()[-1])
        accuracy, rounds = float(line[name]), int(line["round"]) + 1
    except (IndexError, KeyError, TypeError, ValueError):
        return {}
    return {
        "model": "personal" if path.name == PERSONAL else "alone, without the federation",
        "rounds": str(rounds),
        "test accuracy": f"{100 * accuracy:.1f} %, on this site's own test samples",
    }


def _of_onnx(path: Path) -> Ready:
    runtime = needed("onnxruntime", "export", str(path))
    content = file_content(path)
    try:
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
        needs, card = _about(session.get_modelmeta().custom_metadata_map.get(ABOUT, ""))
        (given,) = session.get_inputs()
    except PerfedError as error:
        raise RunError(f"{path}: {error}") from None
    except Exception as error:  # a broken file can fail in any way
        raise RunError(f"{path} is no ONNX model that can be read: {_first_line(error)}") from None
    return Ready(needs, card, lambda x: np.asarray(session.run(None, {given.name: x})[0]))


def _of_torchscript(path: Path) -> Ready:
    extra = {ABOUT: ""}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and works
            module = torch.jit.load(  # type: ignore[no-untyped-call]
                str(path), map_location="cpu", _extra_files=extra
            )
        text = extra[ABOUT]
        needs, card = _about(text.decode() if isinstance(text, bytes) else text)
    except PerfedError as error:
        raise RunError(f"{path}: {error}") from None
    except Exception as error:  # as above
        raise RunError(f"{path} is no TorchScript model: {_first_line(error)}") from None

    @torch.no_grad()
    def run(x: np.ndarray) -> np.ndarray:
        probabilities: np.ndarray = module(needs.inputs.tensor(x)).numpy()
        return probabilities

    return Ready(needs, card, run)


def _about(text: str) -> tuple[Needs, dict[str, str]]:
    if not text:
        raise RunError("it does not say what it is: it must be made by 'perfed export-model'")
    try:
        values = json.loads(text)
        card = {str(name): str(value) for name, value in values["card"].items()}
        return from_mapping(Needs, values["needs"]), card
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise RunError(f"what it says of itself cannot be read: {error}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
