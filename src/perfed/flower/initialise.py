"""What ``perfed federation init`` writes: everything to try a federation on one machine, and the
files to start from for a real one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import chdir
from importlib import metadata
from pathlib import Path

from perfed.core.errors import ConfigError, RunError
from perfed.core.tensorfile import write_atomically
from perfed.flower import checking
from perfed.flower.agreement import sending_weights
from perfed.flower.checking import Findings
from perfed.flower.installing import write_services
from perfed.flower.kit import GATE, write_kits
from perfed.flower.protocol import public_hash
from perfed.flower.settings import read_coordinator

FLOWER = ("1.41", "1.42")
SIGNED = "app.fab"
PORT = 8000  # of the superlink, for its own machine alone
MODELS = ("{name: mlp, hidden: [32]}", "{name: mlp, hidden: [128]}", "{name: cnn, batchnorm: true}")

APP = """\
# The Flower app: 'flwr run' sends this folder to every site. It holds no code: both
# components are in the perfed that is installed there.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "perfed-federation"
version = "1.0.0"
description = "A federation with perfed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "perfed"

[tool.flwr.app.components]
serverapp = "perfed.flower.server_app:app"
clientapp = "perfed.flower.client_app:app"

[tool.flwr.app.config]
# On the machine of the superlink.
coordinator = "{coordinator}"
"""

COORDINATOR = """\
# The coordinator: what is trained, and what a round waits for. Paths are relative to this file.

directory: run        # the run directory; started again, the run goes on from there
deadline: 600         # seconds a site has for a round; who is late is left out of it
minimum: 1            # answers without which a round is tried again
set_aside_after: 3    # refused answers in a row after which a site is not asked for some rounds
states: 5             # last states of the server to keep, for 'perfed federation rollback'
start_with: 0         # sites that must be there before the first round; 0: all of them
node_keys: {node_keys}      # sites have registered keys: a client's number belongs to a key
classes: 10           # every site must have as many

# The public set: the same unlabeled samples here and at every site. A file, '.npy' or '.npz' with
# an array 'public', or, to try things out, what a dataset holds out. 'perfed federation check'
# prints its hash; sites that write it down find out about a mistake before they join.
public:
  dataset: {{name: digits, public: 400}}
# file: public.npz

experiment:
  name: {name}        # sites name the run they take part in
  seed: 0
  rounds: {rounds}
  clients: {sites}          # how many sites there are, numbered 0 … {last}
  clients_per_round: {sites}
  selection: by-size  # or uniform
  evaluate_every: 1
  training: {{learning_rate: 0.1, steps: 50, batch_size: 32, public_batch_size: 64}}
  algorithm: {{name: perfed-ckt, clusters: {clusters}, weight: 1.0}}
  # Needed only by algorithms whose server sends weights (fedavg, …):
  # models: [{{name: mlp, hidden: [32]}}]
"""

SITE = """\
# One site: its data, its model, and where it keeps what must not be lost.
# Paths are relative to this file. 'perfed site check {file}' says whether all is well.

client: {client}             # this site's number: no other site's, and never another
run: {name}       # the run it takes part in: the coordinator's experiment.name
state: state-{client}        # model, progress, reports; back it up, do not share it
classes: 10

# The network: a name ('perfed list models'), or your own, called with (input_shape, classes):
# 'my_nets.py:MyNet' or 'my_package.my_module:MyNet'. Nobody else needs to know it.
model: {model}

# The samples: your own function without arguments that returns x and y,
#   source: my_data.py:load           (or my_package.my_module:load)
# or a dataset known to perfed, such as {{name: npz, path: mine.npz}}. With a partition, as here to
# try things out, only this site's part of the dataset.
data:
  dataset: {{name: digits, public: 400}}
  partition: {{name: groups, groups: {groups}}}
  clients: {sites}
# To try things out, a site trains on few samples: it is then that others help.
split: {{train: [0.1], validation: 0.2, test: 0.5}}

# As in the coordinator's file.
public:
  dataset: {{name: digits, public: 400}}
  hash: {hash}

# What a coordinator may ask of this site; all else is refused, and the refusal says which line
# here would allow it. Algorithms that send no weights need not be listed. To try things out, those
# that do are listed too: with real data, delete those that you do not agree to. Your own goes by
# 'my_file.py:Name'; no other file or module that a coordinator names is ever imported.
agrees:
  algorithms: [{algorithms}]
  steps: 10000        # most training steps in a round
  batch_size: 1024    # most samples in a step
  least_samples: 16   # fewest samples that a round is trained on: steps × batch size
  rounds: 10000
  clients: 10000
  learning_rate: 1.0
  seconds: 3600       # most seconds of training in a round
  bytes_in: 67108864  # most bytes of one message that comes, and of one that leaves
  bytes_out: 67108864

alone: true           # train a copy without the federation too, to see what is gained
device: auto          # cpu, cuda, cuda:1, …
"""

CONNECTION = """\
# Where 'flwr' finds the superlink, for whoever sets FLWR_HOME to this folder.
[superlink]
default = "perfed"

[superlink.perfed]
address = "127.0.0.1:{port}"
{security}
"""


def require_flower() -> None:
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise ConfigError("a federation needs Flower: pip install 'perfed[flower]'") from None
    if ".".join(version.split(".")[:2]) not in FLOWER:
        needed = " or ".join(FLOWER)
        raise ConfigError(
            f"a federation needs Flower {needed}, here is {version}: pip install 'perfed[flower]'"
        )


def initialise(
    folder: Path, sites: int, tls: bool, hosts: list[str], port: int = PORT, rounds: int = 10
) -> list[str]:
    """Write the files; returns the commands that start a federation from them."""
    require_flower()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} exists already: choose another")
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(draft, folder, sites, tls, rounds)
        if tls:
            from perfed.flower.certificates import write_certificates
            from perfed.flower.signing import build, sign

            write_certificates(draft / "certificates", sites, hosts)
            (draft / SIGNED).write_bytes(build(draft / "app"))
            sign(draft / SIGNED, draft / "certificates" / "signer")
        security = (
            f'root-certificates = "{folder / "certificates" / "ca.crt"}"'
            if tls
            else "insecure = true"
        )
        connection = CONNECTION.format(port=port, security=security)
        _put(draft / "flwr-home" / "config.toml", connection)
        write_services(draft / "services", folder)
        write_kits(draft, f"{hosts[0]}:{GATE}" if hosts else "")
        draft.chmod(0o755)
        os.replace(draft, folder)  # all of it, or nothing
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return commands(folder, sites)


def _write(draft: Path, folder: Path, sites: int, tls: bool, rounds: int) -> None:
    coordinator = COORDINATOR.format(
        name=folder.name,
        sites=sites,
        rounds=rounds,
        last=sites - 1,
        clusters=min(2, sites),
        node_keys=str(tls).lower(),
    )
    _put(draft / "coordinator.yaml", coordinator)
    public, _ = read_coordinator(draft / "coordinator.yaml").public_samples()
    app = APP.format(coordinator=folder / "coordinator.yaml")
    _put(draft / "app" / "pyproject.toml", app)
    for client in range(sites):
        text = SITE.format(
            file=f"site-{client}.yaml",
            client=client,
            name=folder.name,
            model=MODELS[client % len(MODELS)],
            groups=min(2, sites),
            sites=sites,
            hash=public_hash(public),
            algorithms=", ".join(sending_weights()),
        )
        _put(draft / f"site-{client}.yaml", text)


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def commands(folder: Path, sites: int) -> list[str]:
    """For one machine, each in a terminal of its own."""
    lines = [f"cd {folder}", "perfed federation serve"]
    lines += [f"perfed site start kits/site-{client}.tar.gz" for client in range(sites)]
    return [*lines, "perfed federation start"]


def check_coordinator(path: Path, plan: Path | None = None) -> list[str]:
    """What a coordinator's file says, and the hash to give to the sites; the plan that they would
    get, as a file."""
    options = read_coordinator(path)
    with chdir(path.absolute().parent):
        public, inputs = options.public_samples()
    experiment = options.experiment
    lines = [
        f"run '{experiment.name}': {experiment.algorithm.label()}, {experiment.rounds} rounds, "
        f"{experiment.clients} sites, {options.classes} classes",
        f"public set: {public_hash(public)} ({len(public)} samples, each {inputs})",
    ]
    if plan is not None:
        content = json.dumps(options.plan().to_mapping(), indent=1)
        write_atomically(plan, f"{content}\n".encode())
        lines.append(f"plan: {plan}; a site tries it with 'perfed site check SITE.YAML --plan'")
    return lines


def check_site(path: Path, plan: Path | None = None) -> Findings:
    """What a site has, and all that is wrong with it."""
    require_flower()
    return checking.check_site(path, plan)
