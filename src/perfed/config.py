"""What an experiment is: every choice that can change a number, validated and serialisable."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_type_hints

from perfed.core.algorithm import Algorithm
from perfed.core.errors import ConfigError, cut, did_you_mean, shown
from perfed.core.hostile import Attack
from perfed.core.optimizer import Optimizer
from perfed.core.participation import Participation
from perfed.core.paths import expanded
from perfed.core.privacy import Privacy
from perfed.core.schedule import Schedule
from perfed.core.schema import Options, from_mapping, option, to_mapping
from perfed.core.wire import Stage, stages
from perfed.data import Dataset, Federation, Partition, Shift, Split, build_federation
from perfed.models import Models

DEFAULT_PRESET = "digits-groups"
PRESETS, STUDIES, LINKS = "presets", "presets/studies", "presets/links"  # folders of the package
MOST_CHARACTERS = 1_000_000  # of a configuration: PyYAML reads them in a second
MOST_VALUES = 100_000  # keys and values of a configuration, in three seconds
DEEPEST = 50
"""How far values may be inside each other: reading them is recursive."""
MOST_SEEDS = 10_000
MOST_CLIENTS = 10_000_000
LARGEST_BATCH = 1_000_000
"""Samples. More than that no machine holds, and PyTorch says so when the run has begun."""


@dataclass(frozen=True)
class Training(Options):
    """A client's local training."""

    learning_rate: float = option(0.05, "η: the step size", gt=0)
    schedule: Schedule = option("constant", "how η changes from round to round")
    optimizer: Optimizer = option("sgd", "how a gradient becomes a training step")
    optimizer_state: Literal["new", "kept"] = option(
        "new",
        "new: momentum and the like begin anew in each round; kept: they stay with the client",
    )
    steps: int = option(10, "τ: training steps per round", ge=1)
    epochs: int = option(
        0,
        "passes over a client's training data per round, in the place of 'steps'; samples are then "
        "drawn without replacement; 0: count steps",
        ge=0,
    )
    batch_size: int = option(
        32,
        "b: private samples per step, drawn with replacement (without, if epochs is set)",
        ge=1,
        le=LARGEST_BATCH,
    )
    public_batch_size: int = option(
        64, "b': public samples per step, drawn with replacement", ge=1, le=LARGEST_BATCH
    )
    augment: tuple[Literal["flip", "crop"], ...] = option(
        (), "random changes of private images: mirrored, or moved by up to four pixels"
    )
    public_batchnorm: Literal["separate", "private", "shared"] = option(
        "separate",
        "which batches update BatchNorm's running statistics: separate, public batches have "
        "statistics of their own, which soft decisions use; private, only private batches; "
        "shared, both update the same ones",
    )

    @classmethod
    def expand(cls, value: Any) -> Any:
        """``decay`` of earlier configurations is a schedule now."""
        if not isinstance(value, Mapping) or "decay" not in value:
            return value
        if "schedule" in value:
            raise ConfigError("both 'decay' and 'schedule' are given", "decay")
        rest = {key: item for key, item in value.items() if key != "decay"}
        decay = value["decay"]
        return rest | ({"schedule": {"name": "inverse", "decay": decay}} if decay else {})

    def learning_rate_at(self, round: int, rounds: int) -> float:
        """η in a round of a run of so many."""
        return self.schedule.rate(self.learning_rate, max(round, 0), rounds)  # −1: the opening

    def steps_of(self, samples: int) -> int:
        """How many steps a client with so many training samples makes in a round."""
        if not self.epochs:
            return self.steps
        return -(-self.epochs * samples // self.batch_size)


@dataclass(frozen=True)
class Experiment(Options):
    """One run of one algorithm."""

    name: str = option("experiment", "the name of the run directory")
    about: str = option("", "a sentence on what it shows")
    seed: int = option(0, "the seed of all random numbers", ge=0)
    rounds: int = option(40, "T: communication rounds", ge=1)
    clients: int = option(30, "K: number of clients", ge=1, le=MOST_CLIENTS)
    clients_per_round: int = option(10, "m: clients selected in each round", ge=1)
    selection: Literal["by-size", "uniform"] = option(
        "by-size",
        "how clients are selected: by-size, with probability in proportion to their training "
        "samples, or uniform, all with the same probability",
    )
    averaging: Literal["size-once", "by-size"] = option(
        "size-once",
        "how much each client counts in a mean of models. size-once: in proportion to its training "
        "samples, but all the same if clients are selected by-size and only some take part in a "
        "round; by-size: always in proportion, so that size counts twice if clients are selected "
        "by-size",
    )
    participation: Participation = option(
        Participation(), "who is there in a round, who drops out, and who is slow"
    )
    evaluate_every: int = option(1, "rounds from one evaluation of all clients to the next", ge=1)
    evaluate_clients: int = option(
        0,
        "evaluate only this many clients, drawn once by the seed, where all would be too many; "
        "0: all",
        ge=0,
    )
    data: Dataset = option("digits", "the dataset")
    partition: Partition = option("groups", "how the samples are divided among the clients")
    shift: Shift | None = option(
        None,
        "how groups of clients differ beside their mix of labels, for example in what a label "
        "means",
    )
    split: Split = option(
        Split(), "how a client splits its samples into train, validation and test"
    )
    fresh_test: int = option(
        0,
        "evaluate each client on this many samples that no client holds, drawn with the client's "
        "mix of labels (data.samples must leave enough of them); 0: on its own test samples",
        ge=0,
    )
    shared_test: bool = option(
        False,
        "evaluate each client on the test samples of all clients, as many as there are with the "
        "client's mix of labels; nobody trains on them. For clients with few test samples of their "
        "own, whose accuracy is mostly chance. The more clients, the longer an evaluation takes",
    )
    fresh_mix: Literal["test", "held"] = option(
        "test",
        "which mix of labels fresh or shared samples have: test, that of the client's test "
        "samples, or held, that of all its samples",
    )
    models: Models = option(Models(), "the networks, and which client has which")
    training: Training = option(Training(), "local training")
    privacy: Privacy | None = option(
        None,
        "what hides single samples in all that clients send: differential privacy; none: messages "
        "are as the algorithm makes them ('perfed explain privacy')",
    )
    algorithm: Algorithm = option("perfed-ckt", "the algorithm")
    hostile: Attack | None = option(
        None,
        "what hostile clients send, in simulations: an attack, with the share of clients that are "
        "hostile; means and tables are then of honest clients",
    )
    metrics: tuple[str, ...] = option(
        (), "metrics of your own to record beside perfed's, each as file.py:name"
    )
    wire: tuple[Stage, ...] = option(
        (), "what happens to messages between an algorithm and the network, in this order"
    )

    def validate(self) -> None:
        if not re.fullmatch(r"[\w.+=-]{1,100}", self.name) or self.name.startswith("."):
            raise ConfigError(
                f"{shown(self.name)} cannot name a folder: use letters, digits, - and _", "name"
            )
        _check_homes(self.data)
        if self.clients_per_round > self.clients:
            raise ConfigError(
                f"{self.clients_per_round} of {self.clients} clients a round: "
                f"must be at most clients, {self.clients}",
                "clients_per_round",
            )
        if self.evaluate_clients > self.clients:
            raise ConfigError(
                f"{self.evaluate_clients} of {self.clients}: must be at most clients, "
                f"{self.clients}",
                "evaluate_clients",
            )
        if self.participation.shifts > self.clients:
            raise ConfigError(
                f"{self.participation.shifts} shifts of {self.clients} clients: must be at most "
                f"clients, {self.clients}",
                "participation.shifts",
            )
        if self.fresh_test and self.shared_test:
            raise ConfigError(
                "clients are evaluated on fresh samples already: must be false", "shared_test"
            )
        if self.shift is not None:
            self.shift.sizes(self.clients)  # every group has clients
        if self.hostile is not None and round(self.hostile.share * self.clients) >= self.clients:
            raise ConfigError("no client is left that is honest: must be lower", "hostile.share")
        if self.algorithm.needs_plain_sgd and not self.training.optimizer.is_plain():
            raise ConfigError(
                f"'{self.algorithm.registered_name}' needs plain SGD: must be sgd, without "
                "momentum, weight_decay and clip",
                "training.optimizer",
            )
        codes = [stage.registered_name for stage in self.wire if stage.codes]
        for name in codes:
            if codes.count(name) > 1:
                raise ConfigError(f"'{name}' is there twice: a code is made once", "wire")
        for stage, later in itertools.pairwise(self.wire):
            if stage.codes and not later.codes:
                raise ConfigError(
                    f"'{later.registered_name}' needs numbers, and '{stage.registered_name}' "
                    "leaves a code: put it before",
                    "wire",
                )
        for number, stage in enumerate(self.wire):
            try:
                stage.check(self.algorithm)
            except ConfigError as error:
                raise error.inside(f"wire[{number}]") from None
        if self.privacy is not None:
            check_private(self.algorithm, self.training)
        try:
            self.algorithm.check(self.clients_per_round)
        except ConfigError as error:
            raise error.inside("algorithm") from None

    def to_mapping(self) -> dict[str, Any]:
        return to_mapping(self)

    @property
    def validation_is_used(self) -> bool:
        """Whether the algorithm has seen the samples of which validation accuracy is told, so that
        a choice by it is no held-out evidence."""
        return self.algorithm.uses_validation and not self.split.second_validation

    def federation(self) -> Federation:
        """Its clients and their samples, as every run of it has them."""
        federation = self._honest_federation()
        if self.hostile is None:
            return federation
        hostile = {"hostile": self.hostile.clients(federation.clients, self.seed)}
        return replace(federation, partition_facts=federation.partition_facts | hostile)

    def _honest_federation(self) -> Federation:
        return build_federation(
            self.data,
            self.partition,
            self.split,
            self.clients,
            self.seed,
            self.fresh_test,
            self.fresh_mix,
            self.shift,
            self.shared_test,
        )


def check_private(algorithm: Algorithm, training: Training) -> None:
    """Raise where noise would not cover what clients send, or could not be accounted for."""
    if algorithm.not_private:
        raise ConfigError(
            f"'{algorithm.registered_name}' {algorithm.not_private}: choose another method, or "
            "leave out privacy",
            "algorithm",
        )
    for name in ("epochs", "augment"):
        if getattr(training, name):
            raise ConfigError(
                "privacy draws each sample anew in every step, as it is: must not be set",
                f"training.{name}",
            )


def _check_homes(data: Dataset) -> None:
    """Data is read later; ``~nobody/x`` can be told now."""
    for field in fields(data):
        value = getattr(data, field.name)
        if isinstance(value, str) and value.startswith("~"):
            expanded(value, f"data.{field.name}")


@dataclass(frozen=True)
class Comparison(Options):
    """One experiment, run with several algorithms and seeds."""

    experiment: Experiment
    algorithms: tuple[Algorithm, ...] = option((), "the algorithms to compare")
    seeds: tuple[int, ...] = option((0,), "each algorithm is run with each of these seeds", ge=0)

    def validate(self) -> None:
        if not self.algorithms:
            raise ConfigError("at least one is needed", "algorithms")
        if not self.seeds:
            raise ConfigError("at least one is needed", "seeds")
        labels = [algorithm.label() for algorithm in self.algorithms]
        twice = {label for label in labels if labels.count(label) > 1}
        if twice:
            raise ConfigError(f"'{twice.pop()}' is there twice", "algorithms")
        if len(self.seeds) > MOST_SEEDS:
            raise ConfigError(f"{len(self.seeds):,} seeds: at most {MOST_SEEDS:,}", "seeds")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"a seed is there twice in {shown(list(self.seeds))}", "seeds")
        self.experiments()  # each must be valid

    def experiments(self) -> list[Experiment]:
        return [
            replace(self.experiment, algorithm=algorithm, seed=seed)
            for algorithm in self.algorithms
            for seed in self.seeds
        ]

    def to_mapping(self) -> dict[str, Any]:
        mapping = to_mapping(self.experiment)
        del mapping["algorithm"], mapping["seed"]
        rest = to_mapping(self)
        return mapping | {"algorithms": rest["algorithms"], "seeds": rest["seeds"]}


def parse(values: Mapping[str, Any]) -> Experiment | Comparison:
    """Build an experiment, or a comparison if there are ``algorithms`` or ``seeds``."""
    if not isinstance(values, Mapping):
        raise ConfigError("a configuration is keys and values")
    if "methods" in values:
        raise ConfigError("a file with 'methods' is a study: 'perfed study' runs it", "methods")
    values = linked(values)
    if "algorithms" not in values and "seeds" not in values:
        return from_mapping(Experiment, values)
    for many, one in (("algorithms", "algorithm"), ("seeds", "seed")):
        if many in values and one in values:
            raise ConfigError(f"both '{one}' and '{many}' are given", many)
    rest = {key: item for key, item in values.items() if key not in ("algorithms", "seeds")}
    seeds = values.get("seeds", (rest.get("seed", 0),))
    # The one algorithm of a file that only lists seeds; 'local' fits every experiment meanwhile.
    algorithms = values.get("algorithms", (rest.get("algorithm", "perfed-ckt"),))
    base = from_mapping(Experiment, rest | {"algorithm": "local"})
    return Comparison(experiment=base, algorithms=algorithms, seeds=seeds)


def load(
    path: str | Path | None = None, overrides: Iterable[str] = (), links: Iterable[str] = ()
) -> Experiment | Comparison:
    """Read a YAML file or a preset (the default one without a name), and apply named links, then
    ``key=value``."""
    return parse(overridden(path, overrides, links=links))


def overridden(
    path: str | Path | None,
    overrides: Iterable[str],
    folder: str = PRESETS,
    links: Iterable[str] = (),
) -> dict[str, Any]:
    """The keys and values of a file or preset after its links and those of the command line, then
    ``key=value``; not yet checked."""
    values = read_mapping(path, folder)
    values = linked(values | {"link": [*_listed(values.get("link")), *links]})
    for text in overrides:
        apply_override(values, text)
    return values


def linked(values: Mapping[str, Any]) -> dict[str, Any]:
    """With what the named links of ``link: tiny`` or ``link: [robust, tiny]`` say in its place.

    A link is a part of a configuration, in ``presets/links``. Its keys are set, and the stages of
    its ``wire`` are added to those there are: codecs, which leave only a code, come last.
    """
    found = copy.deepcopy({key: value for key, value in values.items() if key != "link"})
    names = _listed(values.get("link"))
    said: dict[str, str] = {}  # which link has set a key
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(f"{shown(name)} is there twice", "link")
        for key, value in _dotted(_link(name)):
            if key == "wire":
                found["wire"] = sorted([*_listed(found.get("wire")), *value], key=_codes)
                continue
            if key in said:
                raise ConfigError(f"'{said[key]}' and '{name}' both set {key}: take one", "link")
            set_key(found, key, value, f"link {name}: {key}")
            said[key] = name
    return found


def _listed(value: Any) -> list[Any]:
    """Several, one, or none."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _link(name: Any) -> dict[str, Any]:
    known = preset_names(LINKS)
    if name not in known:
        hint = did_you_mean(str(name), known)
        raise ConfigError(f"no link is called {shown(name)}{hint}", "link")
    values = read_mapping(name, LINKS)
    return {key: value for key, value in values.items() if key != "about"}


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``algorithm: {gate: x}`` as ``algorithm.gate``: what else is inside stays as it is."""
    for key, value in values.items():
        if isinstance(value, Mapping) and "name" not in value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _codes(stage: Any) -> bool:
    """Whether a stage, as a configuration has it, leaves only a code."""
    name = stage.get("name") if isinstance(stage, Mapping) else stage
    return isinstance(name, str) and stages[name].codes


def _similar_files(path: Path) -> list[str]:
    """Beside where it should be, if a YAML file is meant."""
    if path.suffix not in (".yaml", ".yml") or not path.parent.is_dir():
        return []
    return get_close_matches(str(path), map(str, path.parent.glob(f"*{path.suffix}")))


def _if_a_run(folder: Path) -> str:
    if not any((folder / name).exists() for name in ("config.yaml", "comparison.yaml")):
        return ", must be a YAML file or the name of a preset"
    return f" with a run: --resume {folder} continues it, 'perfed report {folder}' shows it"


def read_mapping(path: str | Path | None, folder: str = PRESETS) -> dict[str, Any]:
    """The keys and values of a YAML file or a preset, not yet checked."""
    name = DEFAULT_PRESET if path is None else str(path)
    if name in preset_names(folder):
        text = preset_text(name, folder)
    else:
        try:
            with open(name, encoding="utf-8") as file:
                text = file.read(MOST_CHARACTERS + 1)  # one too many is refused
        except FileNotFoundError:
            hint = did_you_mean(name, _similar_files(Path(name)) or preset_names(folder))
            kind = "study" if folder == STUDIES else "preset"
            raise ConfigError(f"no file and no {kind} is called '{name}'{hint}") from None
        except IsADirectoryError:
            raise ConfigError(f"{name} is a folder{_if_a_run(Path(name))}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {name}: {error}") from None
    values = load_yaml(text, name)
    if not isinstance(values, dict):
        raise ConfigError(f"{name} holds no keys and values")
    return values


def preset_names(folder: str = PRESETS) -> list[str]:
    """Of experiments and comparisons, or in another folder of studies or links."""
    files = (resources.files("perfed") / folder).iterdir()
    return sorted(file.name[:-5] for file in files if file.name.endswith(".yaml"))


def preset_text(name: str, folder: str = PRESETS) -> str:
    return (resources.files("perfed") / folder / f"{name}.yaml").read_text("utf-8")


def apply_override(values: dict[str, Any], text: str) -> None:
    """Set one dotted key: ``algorithm.clusters=3``."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"'{text}' is not of the form key=value", "--set")
    where = f"--set {key}"
    set_key(values, key, load_yaml(value, where), where)


def set_key(values: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set one dotted key, inside short forms and defaults too; ``where`` is for an error."""
    *path, last = key.split(".")
    for one, many in (("algorithm", "algorithms"), ("seed", "seeds")):
        if key == one:  # one in the place of several
            values.pop(many, None)
    if path and path[0] == "algorithm" and "algorithms" in values:
        raise ConfigError(
            "there are several algorithms: choose one first, as --set algorithm=perfed-ckt",
            where,
        )
    if path:
        _open(values, path[0])
    node = values
    for level in path:
        inner = node.get(level, {})
        if isinstance(inner, str):  # the short form 'algorithm: local'
            inner = {"name": inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"'{level}' has no keys inside", where)
        node[level] = inner
        node = inner
    node[last] = value


def _open(values: dict[str, Any], section: str) -> None:
    """Write a section out, so that a key inside it can be set: the default's name where there is
    none, and short forms such as 'models: cnn'."""
    kind = get_type_hints(Experiment).get(section)
    if not (isinstance(kind, type) and issubclass(kind, Options)):
        return
    default = {field.name: field.default for field in fields(Experiment)}[section]
    if section in values:
        values[section] = kind.expand(values[section])
    elif isinstance(default, str):
        values[section] = default


def load_yaml(text: str, where: str) -> Any:
    """Parse YAML; plain JSON, a part of YAML, also where PyYAML is not installed."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{where} has more than {MOST_CHARACTERS:,} characters, the most allowed")
    try:
        import yaml
    except ImportError:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where} is not JSON, and reading YAML needs PyYAML") from None
    try:
        return yaml.load(text, Loader=_yaml_loader())  # noqa: S506 - a kind of SafeLoader
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid YAML: {reason}") from None
    except ConfigError as error:
        raise ConfigError(f"{where} {error.message}") from None


@functools.cache
def _yaml_loader() -> Any:
    """YAML 1.2's idea of a number, where PyYAML takes 1e-3 for a string, and of keys, of which
    PyYAML takes the last of two that are equal. What PyYAML's own parts raise of odd values is
    made one kind of error. An alias counts as all it stands for: a few of them can stand for more
    than a machine holds."""
    import yaml

    class Loader(yaml.SafeLoader):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.values = self.depth = 0
            self.sizes: dict[int, int] = {}  # values in a node, by its id

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias, before = self.check_event(yaml.AliasEvent), self.values
            self.depth += 1
            if self.depth > DEEPEST:
                raise ConfigError(f"has values more than {DEEPEST} deep inside each other")
            node = super().compose_node(parent, index)
            self.depth -= 1
            if is_alias and id(node) not in self.sizes:
                raise ConfigError("has an alias inside of what it stands for")
            self.values += self.sizes[id(node)] if is_alias else 1
            if self.values > MOST_VALUES:
                raise ConfigError(
                    f"has more than {MOST_VALUES:,} keys and values, the most allowed (an alias "
                    "counts as all it stands for)"
                )
            if not is_alias:
                self.sizes[id(node)] = self.values - before
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # not a key of ours: refused elsewhere
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"'{cut(key.value)}' is there twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
                what = shown(node.value) if isinstance(node, yaml.ScalarNode) else "this"
                kind = node.tag.rpartition(":")[2]  # tag:yaml.org,2002:int
                problem = f"{what} cannot be read as {kind}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

        def scan_flow_scalar_non_spaces(self, double: Any, start_mark: Any) -> Any:
            try:
                return super().scan_flow_scalar_non_spaces(double, start_mark)
            except (ValueError, OverflowError):
                problem, mark = "there is no such character", self.get_mark()
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark) from None

    pattern = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", pattern, list("-+.0123456789"))
    return Loader


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML, or JSON (which YAML readers read) where PyYAML is not installed."""
    try:
        import yaml
    except ImportError:
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    text: str = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return text
