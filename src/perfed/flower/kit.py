"""A site's start-up kit: one archive that the coordinator makes, one command at the site.

    site.yaml              the site's configuration, as ``site-0.yaml`` at the coordinator
    link.yaml              where the federation is
    ca.crt                 with TLS: whom to believe that it is the federation
    key, key.pub           with TLS: the site's key, if the coordinator has made one to try things
                           out; else the site makes its own at its first start
    trusted-entities.yaml  with TLS: who signs the app
    README.txt             what to do

and the file of public samples, where ``site.yaml`` names one. Nothing else: ``site.yaml`` may name
files of the site's own, which are code. Those of a coordinator are not unpacked.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from perfed.config import read_mapping
from perfed.core.errors import ConfigError, RunError, one_line
from perfed.core.schema import Options, from_mapping, option
from perfed.core.tensorfile import write_atomically
from perfed.flower.saying import say
from perfed.flower.settings import read_site

KITS = "kits"
SITE, LINK, KEY, TRUSTED = "site.yaml", "link.yaml", "key", "trusted-entities.yaml"
AUTHORITY, README_FILE = "ca.crt", "README.txt"
HELD = {SITE, LINK, KEY, f"{KEY}.pub", TRUSTED, AUTHORITY, README_FILE}
ARRAYS = (".npz", ".npy")  # of public samples
ENDING = ".tar.gz"
GATE = 8443  # the port that sites come to

LINK_FILE = """\
# Where a site finds the federation, for 'perfed site start' and 'perfed site learn'.
superlink: {superlink}
tls: {tls}
"""

README = """\
This is everything that site {client} needs to take part in '{run}'.

  1. install perfed {version}; in its source tree:
     pip install --constraint constraints.txt '.[flower]'
  2. put your data and your network into site.yaml; 'perfed site check {name}/site.yaml' says
     whether all is well. Read 'agrees' there: it says what the coordinator may ask of you.
  3. perfed site start {name}

The last command runs until you stop it (Ctrl-C, or systemd). It opens no port to others. If the
federation is over already, 'perfed site learn {name}' gives you a model.
Nothing of your data leaves; 'perfed site ledger {name}/site.yaml' shows what did.
Back up the folder 'state' that site.yaml names: 'perfed site backup {name}/site.yaml FILE'.
"""


@dataclass(frozen=True)
class Link(Options):
    """Where a site finds the federation."""

    superlink: str = option("", "host:port of the coordinator's gate")
    tls: bool = option(True, "whether TLS is spoken there")

    def validate(self) -> None:
        host, _, port = self.superlink.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"'{self.superlink}' is not host:port", "superlink")


def read_link(folder: Path) -> Link:
    path = folder / LINK
    if not path.is_file():
        raise ConfigError(f"no {LINK} in {folder}: 'perfed federation kits' makes a site's folder")
    try:
        return from_mapping(Link, read_mapping(path))
    except ConfigError as error:
        raise ConfigError(f"{error} (in {path})") from None


def make_key(folder: Path, client: int) -> str:
    """Where the site in this folder has no key: it has one then, and this is what to do with it."""
    from perfed.flower.certificates import write_node_key

    if (folder / KEY).is_file():
        return ""
    write_node_key(folder / KEY)
    return (
        f"this site has a key of its own now: send {folder / KEY}.pub to the coordinator, who "
        f"puts it into 'certificates' as site-{client}.pub; until then it is not let in"
    )


def superlink_address(folder: Path) -> str:
    """Where the coordinator's own superlink is, as ``init`` wrote it for ``flwr``."""
    path = folder / "flwr-home" / "config.toml"
    try:
        links = tomllib.loads(path.read_text("utf-8"))["superlink"]
        address: str = links[links["default"]]["address"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot read the superlink's address in {path} ({type(error).__name__}): "
            "is this the folder that 'perfed federation init' wrote?"
        ) from None
    return address


def write_kits(folder: Path, address: str = "") -> list[Path]:
    """An archive for every ``site-N.yaml`` of the coordinator's folder. The address is remembered
    there."""
    from perfed import __version__

    certificates = folder / "certificates"
    tls = certificates.is_dir()
    if not address and (folder / LINK).is_file():
        address = read_link(folder).superlink
    link = LINK_FILE.format(superlink=address or f"127.0.0.1:{GATE}", tls=str(tls).lower()).encode()
    write_atomically(folder / LINK, link)
    kits = []
    for path in sorted(folder.glob("site-*.yaml")):
        name, site = path.stem, read_site(path)
        files = {
            SITE: path.read_bytes(),
            LINK: link,
            README_FILE: README.format(
                client=site.client, run=site.run, version=__version__, name=name
            ).encode(),
        }
        if site.public.file:
            files[PurePosixPath(site.public.file).as_posix()] = _public(folder, site.public.file)
        if tls:
            sources = {
                AUTHORITY: AUTHORITY,
                TRUSTED: TRUSTED,
                KEY: name,
                f"{KEY}.pub": f"{name}.pub",
            }
            for kept, source in sources.items():
                if (certificates / source).is_file():
                    files[kept] = (certificates / source).read_bytes()
        kit = folder / KITS / f"{name}{ENDING}"
        kit.parent.mkdir(exist_ok=True)
        kit.parent.chmod(0o700)  # there may be keys in them
        write_atomically(kit, _archive(name, files))
        kits.append(kit)
    if not kits:
        raise RunError(f"no site-*.yaml in {folder}: 'perfed federation init' writes them")
    return kits


def _public(folder: Path, file: str) -> bytes:
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"{file}: a kit holds files of the coordinator's folder", "public.file")
    if path.suffix not in ARRAYS:
        raise ConfigError(f"{file}: in a kit it ends in {' or '.join(ARRAYS)}", "public.file")
    if not (folder / file).is_file():
        raise ConfigError(f"no {folder / file}: put the public set there", "public.file")
    return (folder / file).read_bytes()


def _archive(name: str, files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for file, data in files.items():
            entry = tarfile.TarInfo(f"{name}/{file}")
            entry.size, entry.mode = len(data), 0o600 if file == KEY else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def open_kit(path: Path) -> Path:
    """A site's folder: unpacked beside the archive at the first time, as it is from then on."""
    if path.is_dir():
        return path
    if not path.is_file():
        raise ConfigError(f"no {path}: give a kit, or the folder that it was unpacked to")
    folder = path.absolute().with_name(path.name.removesuffix(ENDING))
    if folder == path.absolute():
        raise ConfigError(f"{path} is no kit: 'perfed federation kits' makes {ENDING} archives")
    try:
        with tarfile.open(path) as archive:
            if folder.is_dir():
                _tell_of_news(archive, path, folder)
            else:
                _unpack(archive, path, folder)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ConfigError(f"{path} is no kit: {error}") from None
    return folder


def _unpack(archive: tarfile.TarFile, path: Path, folder: Path) -> None:
    _check_held(archive, path)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        archive.extractall(draft, filter="data")  # no way out of the folder, no devices
        held = [*draft.iterdir()]
        if len(held) != 1 or not (held[0] / SITE).is_file():
            raise ConfigError(f"{path} is no kit: it has no {SITE} in one folder")
        os.replace(held[0], folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check_held(archive: tarfile.TarFile, path: Path) -> None:
    """``site.yaml`` may name a file of the site's own, and perfed runs it. It must not find one
    that the coordinator has put there, nor a state that another machine has made up."""
    for entry in archive:
        name = "/".join(PurePosixPath(entry.name).parts[1:])
        is_known = name in HELD or name.endswith(ARRAYS)
        if not entry.isdir() and not (entry.isfile() and is_known):
            raise ConfigError(
                f"{path} is no kit: it has {entry.name!a}, and a kit holds no code and nothing "
                "else of a site's own; put such files into the folder once it is unpacked"
            )


def _tell_of_news(archive: tarfile.TarFile, path: Path, folder: Path) -> None:
    """A folder that is there is the site's own, and stays as it is; an address that the coordinator
    has sent anew would be overlooked. Whom the site trusts to sign is not asked of a kit again."""
    for entry in archive:
        name = "/".join(PurePosixPath(entry.name).parts[1:])
        if name in (LINK, AUTHORITY) and entry.isfile() and not _is_here(archive, entry, folder):
            # The coordinator has chosen this name, and the line goes into somebody's shell.
            into = ["-C", str(folder), "--strip-components=1", "--", one_line(entry.name)]
            say(
                f"{folder} is there already and stays as it is, but {path.name} has another "
                f"{name}; to take it: {shlex.join(['tar', '-xzf', str(path), *into])}"
            )


def _is_here(archive: tarfile.TarFile, entry: tarfile.TarInfo, folder: Path) -> bool:
    here, sent = folder / PurePosixPath(entry.name).name, archive.extractfile(entry)
    if sent is None or not here.is_file() or here.stat().st_size != entry.size:
        return False
    return here.read_bytes() == sent.read()
