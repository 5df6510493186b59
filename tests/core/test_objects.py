"""A user's own classes and objects are found again, under the name that is written down."""

import functools
import logging
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import perfed
from perfed import Algorithm, Message, algorithms
from perfed.core import objects
from perfed.core.errors import ConfigError
from perfed.core.objects import give, import_object, import_path, path_or_name
from perfed.core.schema import option, plain
from perfed.models import architectures, build_module
from tests.conftest import tiny

FILE = '''
from dataclasses import dataclass
from perfed import Algorithm, Message
from perfed.algorithms.fedavg import FedAvg
from perfed.core.schema import option

@dataclass(frozen=True)
class Mine(Algorithm):
    """Does nothing, {twice}."""
    often: int = option(1, "how often", ge=1)

    def client_round(self, client, message):
        return Message()

@dataclass(frozen=True)
class Nearly(FedAvg):
    """FedAvg by another name."""
'''


NET = """
from torch import nn

def net(shape, classes):
    return nn.Linear(shape[0], classes, bias=False)
"""


class Outer:
    class Inner:
        pass


def test_what_can_be_imported_goes_by_its_path(tmp_path: Path) -> None:
    for value in (Outer, Outer.Inner, nn.Linear, test_what_can_be_imported_goes_by_its_path):
        path = import_path(value)
        assert path == f"{value.__module__}:{value.__qualname__}"
        assert import_object(path) is value
    (tmp_path / "mine.py").write_text(FILE)
    mine = import_object(f"{tmp_path}/mine.py:Mine")
    assert import_path(mine) == f"{tmp_path}/mine.py:Mine"
    assert import_path(lambda: 0) == import_path(3) == ""


def test_what_cannot_goes_by_what_it_is() -> None:
    def makes(width: int) -> functools.partial[nn.Module]:
        return functools.partial(nn.Linear, width)

    def inside(width: int) -> object:
        return lambda shape, classes: nn.Linear(width, classes)

    values = [makes(1), makes(2), inside(1), inside(2)]
    names = [path_or_name(value) for value in values]
    assert len(set(names)) == 4
    assert [path_or_name(value) for value in (makes(1), inside(2))] == [names[0], names[3]]
    assert import_object(names[1]) is values[1]
    with pytest.raises(ConfigError, match=r"'Thing-0' was given as an object, in another Python"):
        import_object("object:Thing-0")
    assert give(1, "int", b"a") != give(1, "int", b"b")


def test_a_users_file_that_fails_is_one_line(tmp_path: Path) -> None:
    for text, message in (
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import nothing_like_it", "No module named 'nothing_like_it'"),
        ("def x(:", "SyntaxError: invalid syntax"),
        ("x = 1", "has no 'Mine'"),
    ):
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            import_object(f"{tmp_path}/bad.py:Mine")
        assert "\n" not in str(caught.value)
        sys.modules.pop(f"file:{tmp_path}/bad.py", None)
    with pytest.raises(ConfigError, match=r"cannot import .gone.py.: there is no such file"):
        import_object("gone.py:Mine")


def test_a_class_keeps_its_own_name_and_not_that_of_what_it_extends(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    nearly = algorithms.build(f"{path}:Nearly")
    assert nearly.label() == "Nearly"
    assert plain(nearly)["name"] == f"{path}:Nearly"
    assert algorithms.build("fedavg").label() == "fedavg"
    with pytest.raises(ConfigError, match="is for algorithm, not dataset"):
        perfed.datasets.build(f"{path}:Nearly")


@dataclass(frozen=True)
class Idle(Algorithm):
    """Given as an object, or as a class."""

    def client_round(self, client: object, message: Message) -> Message:
        return Message()


def test_an_algorithm_given_in_python_is_written_down_by_its_path() -> None:
    for given in (Idle(), Idle):
        experiment = tiny(algorithm=given)
        assert experiment.to_mapping()["algorithm"]["name"] == f"{__name__}:Idle"
        assert perfed.config.parse(experiment.to_mapping()) == experiment


def test_the_same_class_may_be_registered_again_and_another_may_not() -> None:
    def define() -> None:
        @algorithms.register("defined-twice")
        @dataclass(frozen=True)
        class Twice(Idle):
            """A cell that is run again."""

    try:
        define()
        define()
        with pytest.raises(ValueError, match="'defined-twice' is registered already"):
            algorithms.register("defined-twice")(Idle)
    finally:
        algorithms.forget("defined-twice")


def test_components_of_a_file_reach_a_process_elsewhere(tmp_path: Path) -> None:
    """As Ray's workers get them: by pickle, in another working directory, under the same name."""
    (tmp_path / "mine.py").write_text(FILE + NET)
    (tmp_path / "elsewhere").mkdir()
    sender = (
        "import pickle, sys, perfed; a = perfed.algorithms.build({'name': 'mine.py:Mine', "
        "'often': 3}); m = perfed.architectures.build('mine.py:net'); "
        "sys.stdout.buffer.write(pickle.dumps((a, m)))"
    )
    receiver = (
        "import pickle, sys; from perfed.models import build_module; "
        "a, m = pickle.load(sys.stdin.buffer); module = build_module(m, (4,), 2); "
        "print(a.often, a.label(), a.import_path, m.label(), module.weight.shape)"
    )
    sent = subprocess.run([sys.executable, "-c", sender], cwd=tmp_path, capture_output=True)
    assert sent.returncode == 0, sent.stderr
    got = subprocess.run(
        [sys.executable, "-c", receiver],
        cwd=tmp_path / "elsewhere",
        input=sent.stdout,
        capture_output=True,
    )
    assert got.returncode == 0, got.stderr
    words = "3 Mine(often=3) mine.py:Mine mine.py:net torch.Size([2, 4])"
    assert got.stdout.decode().strip() == words


def test_a_built_module_is_sent_with_its_weights() -> None:
    module = nn.Linear(3, 2)
    sent = pickle.loads(pickle.dumps(architectures.build(module)))
    assert sent == architectures.build(module)
    made = build_module(sent, (3,), 2)
    assert (made.weight == module.weight).all()
    assert made.weight is not module.weight


def test_options_without_a_dataclass_are_spoken_of(tmp_path: Path) -> None:
    file = tmp_path / "forgotten.py"
    file.write_text(
        "from perfed.algorithms.local import Local\n"
        "from perfed.core.schema import option\n"
        "class Forgotten(Local):\n"
        "    strength: float = option(1.0, 'how much')\n"
    )
    with pytest.raises(ConfigError, match="Forgotten' has options but is no dataclass: write @"):
        algorithms.build({"name": f"{file}:Forgotten", "strength": 2})
    with pytest.raises(ConfigError, match="option' is not an algorithm class"):
        algorithms.build(f"{file}:option")


@pytest.mark.attack(69)
@pytest.mark.parametrize("code", ["0", "3", "'enough'", ""])
def test_a_file_that_ends_python_is_an_error(code: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(f"import sys\nsys.exit({code})\n")
    with pytest.raises(ConfigError, match=r"cannot import '.*ends.py': it ends Python \(sys.exit"):
        import_object(f"{tmp_path / 'ends.py'}:Mine")


@pytest.mark.attack(70)
def test_an_import_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file here waits until the line about it is said."""
    said = threading.Event()
    lines: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            said.set()

    monkeypatch.setattr(objects, "PATIENCE", 0.01)
    monkeypatch.setattr("builtins.said", said, raising=False)
    (tmp_path / "waits.py").write_text("assert said.wait(60)\nvalue = 1\n")
    handler = Listen()
    logging.getLogger("perfed").addHandler(handler)
    try:
        assert objects.import_object(f"{tmp_path}/waits.py:value") == 1
    finally:
        logging.getLogger("perfed").removeHandler(handler)
    assert lines == [f"still importing '{tmp_path}/waits.py', after 0.01 seconds: it must not wait "
                     "or compute"]  # fmt: skip


def test_an_option_with_a_symbol_may_be_null() -> None:
    @dataclass(frozen=True)
    class Sharp(Algorithm):
        temperature: float | None = option(None, "none: not at all", symbol="T")

        def client_round(self, client: Any, message: Message) -> Message:
            return message

    Sharp.registered_name = "sharp"
    assert Sharp().label() == "sharp (T=null)"
    assert Sharp(0.1).label() == "sharp (T=0.1)"
