"""Start-up kits: what is in them, and what is not unpacked."""

from __future__ import annotations

import io
import stat
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


@pytest.mark.parametrize("text", ["superlink: here", "superlink: a:b", "superlnk: a:1", "[]"])
def test_a_wrong_link_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "link.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"link\.yaml|superlink"):
        read_link(tmp_path)
