"""Start-up kits: what is in them, and what is not unpacked."""

from __future__ import annotations

import io
import shlex
import stat
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from perfed.core.errors import ConfigError
from perfed.flower.initialise import initialise
from perfed.flower.kit import open_kit, read_link, write_kits
from perfed.flower.services import supernode_words
from perfed.flower.settings import read_site


def test_a_kit_has_what_its_site_needs_and_no_other_sites_key(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    initialise(folder, 2, tls=True, hosts=["link.example.org"])
    kit = (folder / "kits" / "site-1.tar.gz").rename(tmp_path / "site-1.tar.gz")
    site = open_kit(kit)
    assert site == tmp_path / "site-1"
    assert read_site(site / "site.yaml").client == 1
    assert read_link(site).superlink == "link.example.org:8443"
    assert (site / "key").read_bytes() == (folder / "certificates" / "site-1").read_bytes()
    assert stat.S_IMODE((site / "key").stat().st_mode) == 0o600
    kept = {path.name for path in site.iterdir()}
    assert kept == {
        *("README.txt", "ca.crt", "key", "key.pub", "link.yaml", "site.yaml"),
        "trusted-entities.yaml",
    }
    words = supernode_words(site)
    assert "--insecure" not in words
    assert {"--root-certificates", "--auth-supernode-private-key", "--trusted-entities"} < {*words}
    (site / "mine").touch()  # what a site has changed stays
    assert open_kit(kit) == site == open_kit(site)
    assert (site / "mine").is_file()


def test_without_keys_at_the_coordinator_a_site_makes_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    initialise(folder, 1, tls=True, hosts=[])
    for key in ("site-0", "site-0.pub"):
        (folder / "certificates" / key).unlink()
    write_kits(folder, "link.example.org:9000")
    (kit,) = write_kits(folder)  # as the last time
    site = open_kit(kit)
    assert not list(site.glob("key*"))
    assert read_link(site).superlink == "link.example.org:9000"


def test_the_public_set_travels_with_the_kit(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    initialise(folder, 1, tls=False, hosts=[])
    text = (folder / "site-0.yaml").read_text()
    public = text.replace(
        "public:\n  dataset: {name: digits, public: 400}", "public:\n  file: p.npz"
    )
    assert public != text
    (folder / "site-0.yaml").write_text(public)
    with pytest.raises(ConfigError, match=r"public\.file: no .*p\.npz: put the public set there"):
        write_kits(folder)
    np.savez(folder / "p.npz", public=np.zeros((3, 1, 8, 8), np.uint8))
    site = open_kit(write_kits(folder)[0])
    assert (site / "p.npz").read_bytes() == (folder / "p.npz").read_bytes()


@pytest.mark.parametrize("name", ["../out/site.yaml", "site.yaml", "site-0/link"])
def test_an_archive_that_is_no_kit_leaves_nothing(tmp_path: Path, name: str) -> None:
    kit = tmp_path / "in" / "site-0.tar.gz"
    kit.parent.mkdir()
    with tarfile.open(kit, "w:gz") as archive:
        entry = tarfile.TarInfo(name)
        if name.endswith("link"):
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(entry, io.BytesIO())
    with pytest.raises(ConfigError, match="is no kit"):
        open_kit(kit)
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "site-0.tar.gz"]
    kit.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="is no kit"):
        open_kit(kit)


def packed(kit: Path, more: dict[str, bytes]) -> Path:
    """A kit, with other or further files in it."""
    with tarfile.open(kit) as archive:
        files = {e.name: archive.extractfile(e).read() for e in archive}  # type: ignore[union-attr]
    with tarfile.open(kit, "w:gz") as archive:
        for name, content in (files | more).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return kit


@pytest.mark.attack("kit-with-code")
@pytest.mark.parametrize(
    "name", ["data.py", "perfed/__init__.py", "state-0/approved.json", "net.so"]
)
def test_a_kit_brings_no_code_and_no_state(tmp_path: Path, name: str) -> None:
    initialise(tmp_path / "trial", 1, tls=True, hosts=[])
    kit = packed(tmp_path / "trial" / "kits" / "site-0.tar.gz", {f"site-0/{name}": b""})
    with pytest.raises(ConfigError, match=f"is no kit: it has 'site-0/{name}'"):
        open_kit(kit)
    assert [path.name for path in kit.parent.iterdir()] == [kit.name]


def test_a_newer_kit_is_not_overlooked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it says brings the new address, and leaves what the site has written."""
    trial = tmp_path / "trial"
    initialise(trial, 1, tls=True, hosts=[])
    kit = trial / "kits" / "site-0.tar.gz"
    site = open_kit(kit)
    (site / "site.yaml").write_text("mine")
    (site / "trusted-entities.yaml").write_text("mine")
    assert open_kit(kit) == site
    assert capsys.readouterr().out == ""
    write_kits(trial, "link.example.org:8444")
    assert open_kit(kit) == site
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "another link.yaml; to take it: " in said
    subprocess.run(shlex.split(said.partition("to take it: ")[2]), check=True)
    assert read_link(site).superlink == "link.example.org:8444"
    assert (site / "site.yaml").read_text() == "mine"
    open_kit(kit)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "name", ["site-0", "x; touch hacked;", "--checkpoint=1 --checkpoint-action=exec=x", "\x1b[2J"]
)
def test_what_a_kits_folder_is_called_is_no_part_of_a_command(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The line is there to be copied into a shell. What a site's own folder is called is its own
    matter, too: a browser saves a second kit as 'site-0 (1).tar.gz'."""
    initialise(tmp_path / "trial", 1, tls=True, hosts=[])
    kit = tmp_path / "trial" / "kits" / "site-0 (1).tar.gz"
    (tmp_path / "trial" / "kits" / "site-0.tar.gz").rename(kit)
    site = open_kit(kit)
    assert site.name == "site-0 (1)"
    link = (site / "link.yaml").read_bytes() + b"\n"
    with tarfile.open(kit, "w:gz") as archive:
        entry = tarfile.TarInfo(f"{name}/link.yaml")
        entry.size = len(link)
        archive.addfile(entry, io.BytesIO(link))
    capsys.readouterr()
    open_kit(kit)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    monkeypatch.chdir(tmp_path)
    subprocess.run(["sh", "-c", said.partition("to take it: ")[2]], check=False)
    assert ((site / "link.yaml").read_bytes() == link) == (name != "\x1b[2J")
    assert {path.name for path in tmp_path.iterdir()} == {"trial"}
    assert {path.name for path in kit.parent.iterdir()} == {kit.name, site.name}


@pytest.mark.parametrize("text", ["superlink: here", "superlink: a:b", "superlnk: a:1", "[]"])
def test_a_wrong_link_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "link.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"link\.yaml|superlink"):
        read_link(tmp_path)
