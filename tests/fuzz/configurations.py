"""Configurations: of an experiment, a site and a coordinator, and ``--set``."""

from __future__ import annotations

from perfed import config
from perfed.core.schema import from_mapping, plain, to_mapping
from perfed.flower.settings import CoordinatorOptions, SiteOptions
from tests.fuzz.target import ODD_NUMBERS, Target


class Configurations(Target):
    """The first byte says of what; then a file's text, a zero byte, and overrides line by line."""

    tokens = (
        *ODD_NUMBERS,
        *(b": ", b"\n  ", b"- ", b"[", b"]", b"{", b"}", b"&a ", b"*a", b"<<: ", b"!!int ", b"? "),
        *(
            b"!!python/object:os.system ",
            b"2001-99-99",
            b'"\\ud800"',
            b"~nosuchuser/x",
            b"\t",
            b"#",
        ),
        *(b"algorithms: ", b"name: ", b"training: ", b"learning_rate: ", b"seeds: ", b"models: "),
        *(b"\xff", b"\x00", b"clients: ", b"wire: ", b"partition: ", b"''", b"|\n", b"%", b"---\n"),
    )

    def seeds(self) -> list[bytes]:
        presets = [config.preset_text(name) for name in config.preset_names()]
        return [
            *(b"\0" + text.encode() for text in presets),
            b"\0rounds: 2\ntraining: {steps: 3}\n\0algorithm.clusters=3\nseed=4",
            b"\1" + SITE.encode(),
            b"\2" + COORDINATOR.encode(),
        ]

    def read(self, data: bytes) -> None:
        kind, text = (data[0] % 3 if data else 0), data[1:]
        if kind == 0:
            text, _, more = text.partition(b"\0")
            path = self._written(text)
            overrides = more.decode("utf-8", "replace").split("\n") if more else []
            read = config.load(path, overrides)
            again = config.parse(config.load_yaml(config.dump_yaml(read.to_mapping()), "again"))
            assert again == read
            return
        cls = SiteOptions if kind == 1 else CoordinatorOptions
        options = from_mapping(cls, config.read_mapping(self._written(text)))
        written = config.dump_yaml(plain(to_mapping(options)))
        assert to_mapping(from_mapping(cls, config.load_yaml(written, "again"))) == to_mapping(
            options
        )

    def _written(self, text: bytes) -> str:
        path = self.folder / "fuzzed.yaml"
        path.write_bytes(text)
        return str(path)


SITE = """
run: trial
client: 0
classes: 10
model: {name: mlp, hidden: [8]}
data: {dataset: {name: digits}}
public: {dataset: {name: digits, public: 30}, seed: 0}
state: state-0
agrees: {algorithms: [fedavg], steps: 100}
"""
COORDINATOR = """
directory: run
classes: 10
deadline: 600.0
public: {dataset: {name: digits, public: 30}, seed: 0}
experiment: {name: trial, rounds: 3, clients: 3, clients_per_round: 3, algorithm: perfed-ckt}
"""
