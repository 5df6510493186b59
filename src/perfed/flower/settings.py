"""The two configuration files of a federation. Paths in them are relative to the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from perfed.config import Experiment, read_mapping
from perfed.core.errors import ConfigError, DataError
from perfed.core.inputs import Inputs, Tokens
from perfed.core.objects import import_object
from perfed.core.participation import Participation
from perfed.core.pixels import scaled
from perfed.core.privacy import Privacy
from perfed.core.schema import Options, from_mapping, option
from perfed.data import (
    ClientSplit,
    Dataset,
    Partition,
    Samples,
    Split,
    build_federation,
)
from perfed.data.datasets import stored
from perfed.data.federation import SMALLEST_CLIENT, split_client
from perfed.data.partition import Given
from perfed.data.readers import read_array, read_arrays
from perfed.data.sources import checked_samples
from perfed.data.tokens import check_tokens, common_tokens, tokens_in
from perfed.flower.agreement import Agreement
from perfed.flower.plan import Plan
from perfed.flower.protocol import public_hash
from perfed.models import Architecture

VOCABULARY_HELP = (
    "samples are tokens: how many different ones there are in the whole federation; 0: numbers, or "
    "as the dataset says"
)
O = TypeVar("O", bound=Options)  # noqa: E741


class Read(NamedTuple):
    """Samples as they were found; pixels as numbers, which the public set's hash is of."""

    x: np.ndarray
    tokens: Tokens | None
    origin: Mapping[str, Any] = MappingProxyType({})
    """What is known of the columns and classes, for who uses the model."""

    def checked(self, vocabulary: int, where: str) -> Read:
        """With the federation's vocabulary, where it says one."""
        if not vocabulary:
            return self
        try:
            check_tokens(self.x, vocabulary, where)
        except DataError as error:
            raise ConfigError(str(error), "vocabulary") from None
        return self._replace(x=self.x.astype(np.int64), tokens=Tokens(vocabulary))


@dataclass(frozen=True)
class PublicSet(Options):
    """The shared unlabeled samples, the same at the coordinator and at every site."""

    file: str = option("", "an .npy file, or an .npz file with an array 'public'")
    dataset: Dataset | None = option(
        None, "or a dataset: the samples it holds out as its public set"
    )
    seed: int = option(0, "with a dataset: the seed that chooses the samples", ge=0)
    hash: str = option(
        "", "the hash that 'perfed federation check' prints; another public set is refused"
    )

    @classmethod
    def expand(cls, value: Any) -> Any:
        """``public: public.npz``."""
        return {"file": value} if isinstance(value, str) else value

    def validate(self) -> None:
        if self.file and self.dataset:
            raise ConfigError("either a file or a dataset, not both")

    def load(self, vocabulary: int) -> Read | None:
        """The samples; None where there is no public set."""
        if self.dataset is not None:
            samples = raw_numbers(self.dataset.load(self.seed), "public.dataset")
            public = Read(samples.numbers(samples.public_x), samples.tokens)
        elif self.file:
            public = as_samples(_read_array(self.file, "public"), "public.file", vocabulary)
        else:
            return None
        found = public_hash(public.x)
        if self.hash and found != self.hash:
            raise ConfigError(f"the public set here has {found}, not {self.hash}", "public.hash")
        return public.checked(vocabulary, "public")


@dataclass(frozen=True)
class SiteData(Options):
    """A site's own samples, with labels 0, 1, 2, …"""

    source: str = option("", "file.py:function or package.module:function; it returns x and y")
    dataset: Dataset | None = option(None, "or a dataset known to perfed ('perfed list datasets')")
    class_names: tuple[str, ...] = option(
        (),
        "for a dataset with named classes: all class names of the federation, in their order",
    )
    partition: Partition | None = option(
        None, "for trials: divide the dataset in this way and use only this site's part"
    )
    clients: int = option(1, "with a partition: the number of clients to divide among", ge=1)
    seed: int = option(0, "with a dataset: the seed of the partition", ge=0)

    def validate(self) -> None:
        if bool(self.source) == (self.dataset is not None):
            raise ConfigError("give either 'source' or 'dataset'")
        if self.partition is not None and self.dataset is None:
            raise ConfigError("needs a dataset to divide", "partition")
        if self.class_names and (self.dataset is None or self.partition is not None):
            raise ConfigError("only a dataset that is all this site's own has them", "class_names")

    def load(
        self, client: int, split: Split, vocabulary: int
    ) -> tuple[Read, np.ndarray, ClientSplit]:
        """Samples, labels, and which of them are for training, validation and test."""
        if self.dataset is not None and self.partition is not None:
            if client >= self.clients:
                raise ConfigError(
                    f"client {client} of {self.clients}: must be less than data.clients", "client"
                )
            whole = build_federation(self.dataset, self.partition, split, self.clients, self.seed)
            if client >= whole.clients:
                raise ConfigError(
                    f"client {client}: the partition leaves only {whole.clients}", "client"
                )
            held, labels = whole.samples.x, whole.samples.y
            if whole.distant is not None:
                held, labels = whole.distant.client(client)
            read = Read(whole.samples.numbers(held), whole.samples.tokens, whole.samples.origin)
            return read.checked(vocabulary, "data"), labels, whole.splits[client]
        if self.dataset is not None:
            samples = raw_numbers(self.dataset.load(self.seed), "data.dataset")
            x = Read(samples.numbers(samples.x), samples.tokens, self._origin(samples))
            y = self._numbered(samples)
        else:
            x, y = _call_source(self.source, vocabulary)
        if len(y) < SMALLEST_CLIENT:
            raise ConfigError(f"{len(y)} samples; at least {SMALLEST_CLIENT} are needed", "data")
        own = split_client(np.arange(len(y)), split, self.seed, client)
        return x.checked(vocabulary, "data"), y, own

    def _origin(self, samples: Samples) -> dict[str, Any]:
        """Classes as the federation calls them: what the data finds here may be fewer."""
        known = {key: samples.origin[key] for key in ("columns", "values") if key in samples.origin}
        return known | ({"classes": list(self.class_names)} if self.class_names else {})

    def _numbered(self, samples: Samples) -> np.ndarray:
        """Labels as all sites number them. A dataset numbers the names that it finds, and the same
        class would have one number here and another where some class does not occur."""
        found = samples.origin.get("classes", [])
        if self.class_names:
            of_federation = {name: label for label, name in enumerate(self.class_names)}
        else:
            of_federation = {name: int(name) for name in found if name.isdecimal()}
        unknown = [name for name in found if name not in of_federation]
        if unknown and self.class_names:
            raise ConfigError(
                f"'{unknown[0]}' is in the data, and not among them", "data.class_names"
            )
        if unknown:
            raise ConfigError(
                f"missing: the data names its classes, as '{unknown[0]}', "
                "and which number each has must be the same at all sites",
                "data.class_names",
            )
        if not found:
            return samples.y
        numbers: np.ndarray = np.array([of_federation[name] for name in found])
        return np.asarray(numbers[samples.y])


@dataclass(frozen=True)
class SiteOptions(Options):
    """One site: its data, its model, and where it keeps them."""

    client: int = option(
        0, "this site's number, 0, 1, 2, …; each site has its own and keeps it", ge=0
    )
    run: str = option("", "the name of the run it takes part in: the coordinator's experiment.name")
    state: str = option("state", "the folder of this site's model and checkpoint; do not lose it")
    classes: int = option(0, "number of classes in the whole federation", ge=2)
    vocabulary: int = option(0, VOCABULARY_HELP, ge=0)
    model: Architecture = option("mlp", "a name, package.module:factory or file.py:factory")
    data: SiteData = option(None, "this site's samples")
    split: Split = option(
        Split(train=(0.6,), validation=0.1, test=0.3), "shares for train, validation and test"
    )
    public: PublicSet = option(PublicSet(), "the public set")
    agrees: Agreement = option(Agreement(), "what a coordinator may ask of this site")
    privacy: Privacy | None = option(
        None,
        "what hides single samples in all that leaves this site; only this file says so, whatever "
        "a coordinator's says ('perfed explain privacy')",
    )
    alone: bool = option(True, "also train a copy without the federation, to see what is gained")
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto: a GPU if there is one")

    def validate(self) -> None:
        if not self.run:
            raise ConfigError("missing: the coordinator's experiment.name", "run")

    def plan_faults(self, plan: Plan, has_public: bool) -> Iterator[str]:
        """Why a plan that is agreed to is not this site's."""
        if plan.name != self.run:
            yield f"this site takes part in '{self.run}', not in '{plan.name}'"
        if plan.classes != self.classes:
            yield f"this site has {self.classes} classes, the run {plan.classes}"
        if self.client >= plan.clients:
            yield f"this site is client {self.client}; the run's are 0 … {plan.clients - 1}"
        if plan.algorithm.needs_public_set and not has_public:
            yield "this site has no public set, and the algorithm needs one"

    def load(self) -> tuple[Samples, ClientSplit]:
        """This site's samples with the public set, and what each of its own is for."""
        if self.data.class_names and len(self.data.class_names) != self.classes:
            raise ConfigError(
                f"{len(self.data.class_names)} names of {self.classes} classes", "data.class_names"
            )
        (x, tokens, origin), y, own = self.data.load(self.client, self.split, self.vocabulary)
        if fault := label_fault(y, self.classes):
            raise ConfigError(fault, "classes")
        found = self.public.load(self.vocabulary)
        public = np.zeros((0, *x.shape[1:]), x.dtype) if found is None else found.x
        if found is not None:
            tokens = common_tokens(tokens, found.tokens)
        if tokens and not tokens.declared and self.model.takes != "numbers":
            raise ConfigError(
                "missing: samples are tokens, and how many different ones there are must be the "
                "same at all sites",
                "vocabulary",
            )
        if public.shape[1:] != x.shape[1:]:
            raise ConfigError(
                f"public samples are {public.shape[1:]}, this site's own are {x.shape[1:]}",
                "public",
            )
        everything = np.arange(len(x)), public, np.arange(len(public))
        samples = Samples(x, y, *everything, self.classes, tokens=tokens, origin=dict(origin))
        return samples, own


def label_fault(y: np.ndarray, classes: int) -> str:
    """What is wrong with labels that are not below ``classes``; nothing where they are."""
    if y.max() < classes:
        return ""
    must = f"with {classes} classes they are 0 … {classes - 1}"
    if y.min() == 1 and y.max() == classes:
        return f"labels in the data go from 1 to {classes}: {must}; subtract 1"
    return f"label {y.max()} in the data: {must}"


@dataclass(frozen=True)
class AtSites(Dataset):
    """Every client's own data, which never leaves its site."""

    import_path = "perfed.flower.settings:AtSites"
    registered_name = "at-sites"

    def load(self, seed: int) -> Samples:
        raise ConfigError("the data of this run is at its sites: it cannot run here", "data")


@dataclass(frozen=True)
class CoordinatorOptions(Options):
    """The coordinator: the experiment, and what a round waits for."""

    experiment: Experiment = option(None, "name, rounds, clients, training, algorithm, …")
    directory: str = option("run", "the run directory; a restarted coordinator resumes from it")
    classes: int = option(0, "number of classes in the whole federation", ge=2)
    public: PublicSet = option(PublicSet(), "the public set")
    input_shape: tuple[int, ...] = option(
        (), "shape of one sample; needed if there is no public set", ge=1
    )
    vocabulary: int = option(0, VOCABULARY_HELP, ge=0)
    deadline: float = option(600.0, "seconds a site has for a round", gt=0)
    minimum: int = option(
        1, "smallest number of answers; with fewer, the round is tried again", ge=1
    )
    start_with: int = option(0, "number of sites to wait for before the first round; 0: all", ge=0)
    poll: float = option(0.3, "seconds between two checks for answers", gt=0)
    node_keys: bool = option(
        False, "sites have registered keys (TLS): a client's number belongs to a key"
    )
    set_aside_after: int = option(
        3, "refused answers in a row after which a site is set aside", ge=1
    )
    states: int = option(
        5, "how many last states of the server to keep, for 'perfed federation rollback'", ge=1
    )
    set_aside_rounds: int = option(10, "for how many rounds; then it is asked again", ge=1)

    def validate(self) -> None:
        clients, selected = self.experiment.clients, self.experiment.clients_per_round
        if self.minimum > selected:
            raise ConfigError(
                f"{self.minimum} answers of {selected} clients a round: "
                f"must be at most experiment.clients_per_round, {selected}",
                "minimum",
            )
        if self.start_with > clients:
            raise ConfigError(f"{self.start_with} of {clients} clients", "start_with")
        for name in ("fresh_test", "shared_test"):
            if getattr(self.experiment, name):
                raise ConfigError(
                    "there are no samples here: sites are evaluated on their own",
                    f"experiment.{name}",
                )
        if self.experiment.shift is not None:
            raise ConfigError(
                "there are no samples here: sites have their own as they are", "experiment.shift"
            )
        if self.experiment.hostile is not None:
            raise ConfigError(
                "sites are what they are: only simulations have it", "experiment.hostile"
            )
        if self.experiment.privacy is not None:
            raise ConfigError(
                "is each site's own: set it in site.yaml, where no coordinator can change it",
                "experiment.privacy",
            )
        if self.experiment.participation != Participation():
            raise ConfigError(
                "is for simulations: sites come and go by themselves", "experiment.participation"
            )
        if self.experiment.evaluate_clients:
            raise ConfigError(
                "every site evaluates itself: must be 0", "experiment.evaluate_clients"
            )
        here = replace(self.experiment, data=AtSites(), partition=Given())
        object.__setattr__(self, "experiment", here)

    def plan(self) -> Plan:
        """What sites are told of the experiment."""
        experiment = self.experiment
        return Plan(
            experiment.name,
            experiment.seed,
            experiment.clients,
            experiment.rounds,
            self.classes,
            experiment.models.initial,
            experiment.training,
            experiment.algorithm,
            experiment.metrics,
            experiment.wire,
        )

    def public_samples(self) -> tuple[np.ndarray, Inputs]:
        """The public set, and what a sample of this federation is."""
        public = self.public.load(self.vocabulary)
        algorithm = self.experiment.algorithm
        if public is not None and len(public.x):
            return public.x, Inputs(public.x.shape[1:], public.tokens)
        if algorithm.needs_public_set:
            raise ConfigError(f"'{algorithm.registered_name}' needs one", "public")
        if not self.input_shape:
            raise ConfigError("needed where there is no public set", "input_shape")
        inputs = Inputs.with_vocabulary(self.input_shape, self.vocabulary)
        return inputs.zeros(0).numpy(), inputs


def read_coordinator(path: Path) -> CoordinatorOptions:
    return _read(CoordinatorOptions, path)


def read_site(path: Path) -> SiteOptions:
    return _read(SiteOptions, path)


def _read(cls: type[O], path: Path) -> O:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name the .yaml file in it")
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    if path.name.endswith(".tar.gz"):
        raise ConfigError(f"{path} is a kit: 'perfed site start' unpacks it; name the site.yaml")
    values = read_mapping(path)
    with chdir(path.parent):
        try:
            return from_mapping(cls, values)
        except ConfigError as error:
            raise ConfigError(f"{error} (in {path})") from None


def raw_numbers(samples: Samples, where: str) -> Samples:
    """Refuse what is still to be standardised: no site knows the others' training samples."""
    if samples.unscaled is not None:
        raise ConfigError(
            "would be standardised by training samples of all sites, which no site knows: "
            "set 'scale: none', and scale the columns in the file",
            where,
        )
    return samples


def as_samples(values: Any, where: str, vocabulary: int) -> Read:
    """Checked; tokens as integers, others as float32, bytes (0 … 255) scaled to −1 … 1."""
    x = checked_samples(values, where)
    tokens = tokens_in(x, vocabulary, where)
    return Read(stored(x, tokens) if tokens else scaled(x), tokens)


def _call_source(source: str, vocabulary: int) -> tuple[Read, np.ndarray]:
    function = import_object(source)
    try:
        made = function()
    except Exception as error:  # whatever a site's own code raises
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{source}() failed: {reason}", "data.source") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError(f"{source}() must return x and y", "data.source")
    x, y = as_samples(made[0], f"x of {source}()", vocabulary), np.asarray(made[1])
    if y.shape != (len(x.x),):
        raise ConfigError(f"{len(x.x)} samples but labels of shape {y.shape}", "data.source")
    if not np.issubdtype(y.dtype, np.number) or (y != y.astype(np.int64)).any() or y.min() < 0:
        raise ConfigError("labels must be 0, 1, 2, …", "data.source")
    return x, y.astype(np.int64)


def _read_array(file: str, name: str) -> np.ndarray:
    path = Path(file).expanduser()
    try:
        if path.suffix == ".npy":
            return read_array(path)
        arrays = read_arrays(path)
    except (DataError, OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read {file}: {error}", name) from None
    if name not in arrays:
        raise ConfigError(f"{file} has no array '{name}'", name)
    return arrays[name]
