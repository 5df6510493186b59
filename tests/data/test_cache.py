"""Sets are fetched whole or not at all, by real processes, from a real server."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfed.core.errors import DataError
from perfed.data import cache
from perfed.data.cifar import CIFAR10, CIFAR100
from tests.data import sets


class Server(ThreadingHTTPServer):
    """Serves one archive: whole, cut, slowly for ever, or with an error."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content

    def source(self, way: str, md5: str = "") -> cache.Source:
        digest = md5 or hashlib.md5(self.content).hexdigest()
        return cache.Source(f"http://127.0.0.1:{self.server_port}/{way}", digest)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content, way = self.server.content, self.path.strip("/")
        if way == "absent":
            return self.send_error(404)
        self.send_response(200)
        if way != "unmeasured":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        half = len(content) // 2
        self.wfile.write(content[:half])
        with contextlib.suppress(OSError):  # whoever reads may be killed meanwhile
            for start in range(half, len(content)) if way == "dribble" else ():
                self.wfile.write(content[start : start + 1])
                self.wfile.flush()
                time.sleep(0.05)
        if way in ("whole", "unmeasured"):
            self.wfile.write(content[half:])
        return None

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    archive = sets.packed(sets.official_folder(tmp_path / "published"), "cifar-10-python.tar.gz")
    with Server(archive.read_bytes()) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def published(source: cache.Source) -> cache.ImageSet:
    return dataclasses.replace(CIFAR10, source=source)


def check_stored(root: Path) -> None:
    """The small set is there, and nothing else that one could see or stumble over."""
    assert {path.name for path in root.iterdir()} == {"cifar10", ".cifar10.lock"}
    stored = cache.find("cifar10", root)
    assert stored is not None
    arrays = cache.load(stored)
    assert np.array_equal(arrays.pixels, sets.PIXELS)
    assert np.array_equal(arrays.labels, sets.LABELS)


@pytest.mark.parametrize("way", ["whole", "unmeasured"])
def test_a_download_is_stored_and_says_where_it_came_from(
    tmp_path: Path, server: Server, way: str
) -> None:
    steps: list[tuple[str, int, int]] = []
    wanted = published(server.source(way))
    stored = cache.get(wanted, tmp_path / "root", progress=lambda *step: steps.append(step))
    check_stored(tmp_path / "root")
    assert stored.source == f"official archive, {wanted.source.url}"
    assert stored.manifest["source"]["md5"] == wanted.source.md5
    assert stored.manifest["by_class"] == [3] * 10
    assert stored.notes(wanted) == [
        "from the archive as published, by its checksum",
        "30 images: the whole set has 60,000",
    ]
    size = len(server.content)
    assert ("downloading", size, size if way == "whole" else 0) in steps
    assert steps[-1][0] == "reading"
    with pytest.raises(DataError, match="is there already"):
        cache.get(wanted, tmp_path / "root")


def test_downloads_that_fail_leave_nothing(tmp_path: Path, server: Server) -> None:
    right = server.source("whole")
    cut = rf"broke after {len(server.content) // 2:,} of {len(server.content):,} bytes"
    refused = cache.Source("http://127.0.0.1:1/", right.md5)
    for source, message in (
        (dataclasses.replace(right, md5="0" * 32), f"its md5 is {right.md5}, must be 0000"),
        (server.source("cut"), cut),
        (server.source("absent"), r"cannot download .*/absent: Not Found"),
        (refused, r"cannot download .*Connection refused.*--from PATH"),
    ):
        with pytest.raises(DataError, match=message) as error:
            cache.get(published(source), tmp_path / "root")
        assert "\n" not in str(error.value)
        assert [path.name for path in (tmp_path / "root").iterdir()] == [".cifar10.lock"]
    cache.get(published(right), tmp_path / "root")
    check_stored(tmp_path / "root")


GET = """
import dataclasses, os, sys, time
from pathlib import Path
from perfed.data import cache
from perfed.data.cifar import CIFAR10
root, origin, url, md5, stop = sys.argv[1:]
def wait(*arguments):
    print("here", flush=True)
    time.sleep(600)
if stop == "manifest":
    cache.write_atomically = wait
if stop == "rename":
    os.rename = wait
wanted = dataclasses.replace(CIFAR10, source=cache.Source(url, md5))
cache.get(wanted, Path(root), Path(origin) if origin else None)
"""


@contextlib.contextmanager
def getting(root: Path, origin: object, source: cache.Source, stop: str) -> Iterator[Any]:
    """Another process that gets the set, and stops for ever at some point."""
    arguments = [str(root), str(origin), source.url, source.md5, stop]
    process = subprocess.Popen(
        [sys.executable, "-c", GET, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()  # SIGKILL
        process.communicate()


def check_killed(root: Path, source: cache.Source) -> None:
    """Something is left, but no set; and the next get tidies up and succeeds."""
    assert (root / ".cifar10.part").is_dir()
    assert cache.find("cifar10", root) is None
    cache.get(published(source), root)
    check_stored(root)


def test_kill_9_in_the_middle_of_a_download(tmp_path: Path, server: Server) -> None:
    root = tmp_path / "root"
    archive = root / ".cifar10.part" / "archive"
    with getting(root, "", server.source("dribble"), "") as process:
        while not archive.exists():
            assert process.poll() is None
            time.sleep(0.01)
        with pytest.raises(DataError, match="another process is getting this set"):
            cache.get(published(server.source("whole")), root)
        assert process.poll() is None
        assert archive.exists()  # and was not disturbed
    check_killed(root, server.source("whole"))


@pytest.mark.parametrize("stop", ["manifest", "rename"])
def test_kill_9_just_before_a_set_is_whole(tmp_path: Path, server: Server, stop: str) -> None:
    root, source = tmp_path / "root", server.source("whole")
    with getting(root, sets.tfjs_package(tmp_path), source, stop) as process:
        assert process.stdout.readline() == "here\n"
        assert (root / ".cifar10.part" / "labels.npy").is_file()
    check_killed(root, source)


def test_what_is_wrong_with_files_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    root, x, y = tmp_path / "root", sets.PIXELS, sets.LABELS
    names = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def arrays(**arrays: np.ndarray) -> Path:
        return sets.npz(tmp_path / "a.npz", **arrays)

    for make, message in (
        (lambda: arrays(x=x, y=y + 1), "label 10 of image 18 is out of range: cifar10 has 0 … 9"),
        (lambda: arrays(x=x, y=y - 1), "label -1 of image 0 is out of range"),
        (lambda: arrays(x=x[:, :, :28, :28], y=y), "images of 3×28×28; cifar10 has 3×32×32"),
        (lambda: sets.image_folders(tmp_path / "f", names=names), "'car' is no class of cifar10"),
    ):
        with pytest.raises(DataError, match=message) as error:
            cache.get(CIFAR10, root, make())
        assert "\n" not in str(error.value)
        assert [path.name for path in root.iterdir()] == [".cifar10.lock"]


def test_folders_are_numbered_as_the_published_set_is(tmp_path: Path) -> None:
    """Also if some classes are absent, and if folders are called by number."""
    named = sets.image_folders(tmp_path / "named", splits=False)
    numbered = sets.image_folders(tmp_path / "numbered", False, tuple("0123456789"))
    order = np.argsort(sets.LABELS, kind="stable")
    for folder in (named, numbered):
        for absent in ("bird", "2", "airplane", "0"):
            shutil.rmtree(folder / absent, ignore_errors=True)
        stored = cache.get(CIFAR10, tmp_path / f"root-{folder.name}", folder)
        kept = order[~np.isin(sets.LABELS[order], [0, 2])]
        arrays = cache.load(stored)
        assert np.array_equal(arrays.labels, sets.LABELS[kept])
        assert np.array_equal(arrays.pixels, sets.PIXELS[kept])
        assert "classes of 0 to 3 images" in stored.notes(CIFAR10)
    many = sets.image_folders(tmp_path / "many", names=tuple(str(n + 90) for n in range(10)))
    stored = cache.get(CIFAR100, tmp_path / "root-many", many)
    assert stored.manifest["by_class"] == [0] * 90 + [3] * 10


def test_a_set_is_loaded_once_and_cannot_be_written_to(tmp_path: Path) -> None:
    stored = cache.get(CIFAR10, tmp_path, sets.npz(tmp_path / "a.npz"))
    again = cache.find("cifar10", tmp_path)
    assert again is not None
    assert cache.load(stored) is cache.load(again)
    with pytest.raises(ValueError, match="read-only"):
        cache.load(stored).pixels[0] = 0


@pytest.mark.parametrize("name", ["images.npy", "labels.npy"])
def test_a_damaged_set_is_not_loaded(tmp_path: Path, name: str) -> None:
    stored = cache.get(CIFAR10, tmp_path, sets.npz(tmp_path / "a.npz"))
    file = stored.folder / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{name} is damaged: its checksum"):
        cache.load(stored)
    file.unlink()
    with pytest.raises(DataError, match=f"cannot read .*{name}: No such file"):
        cache.load(stored)


def test_a_replaced_set_is_loaded_anew(tmp_path: Path) -> None:
    first = cache.load(cache.get(CIFAR10, tmp_path, sets.npz(tmp_path / "a.npz")))
    shutil.rmtree(tmp_path / "cifar10")
    other = sets.npz(tmp_path / "b.npz", images=255 - sets.PIXELS)
    second = cache.load(cache.get(CIFAR10, tmp_path, other))
    assert np.array_equal(second.pixels, 255 - first.pixels)
    assert second.labels is None


@pytest.mark.parametrize("content", [None, "", "[]", "{", "{}", '{"source": 3}'])
def test_what_perfed_did_not_store_is_never_overwritten(
    tmp_path: Path, content: str | None
) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    (folder / "mine.txt").write_text("precious")
    if content is not None:
        (folder / "manifest.json").write_text(content)
    with pytest.raises(DataError, match="is in the way: it is no set that perfed stored"):
        cache.get(CIFAR10, tmp_path, sets.npz(tmp_path / "a.npz"))
    assert (folder / "mine.txt").read_text() == "precious"


def test_where_sets_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("PERFED_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.default_root() == Path("/home/somebody/.cache/perfed")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.default_root() == Path("/caches/perfed")
    monkeypatch.setenv("PERFED_DATA", "~/sets")
    assert cache.default_root() == Path("/home/somebody/sets")


def test_the_manifest_can_be_checked_with_other_tools(tmp_path: Path) -> None:
    stored = cache.get(CIFAR10, tmp_path, sets.npz(tmp_path / "a.npz"))
    manifest = json.loads((stored.folder / "manifest.json").read_text())
    for name, checksum in manifest["checksums"].items():
        content = (stored.folder / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == checksum
    source = (tmp_path / "a.npz").read_bytes()
    assert manifest["source"] == {
        "layout": ".npz file",
        "from": str(tmp_path / "a.npz"),
        "md5": hashlib.md5(source).hexdigest(),
    }
