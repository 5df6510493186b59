"""A private certificate authority, the server's certificate, the sites' keys and a key to sign the
app with, to try TLS, node authentication and trusted entities with. Whoever has ``ca.key`` can pass
for the coordinator."""

from __future__ import annotations

import ipaddress
import os
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
    ssh_key_fingerprint,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = timedelta(days=825)
ALWAYS = ("localhost", "127.0.0.1", "::1")


def write_certificates(folder: Path, sites: int, hosts: list[str]) -> None:
    """``ca.crt``, ``server.crt`` for these hosts and this machine, and a key pair for each site."""
    folder.mkdir(parents=True)
    ca_key, ca = _authority()
    server_key, server = _server(ca_key, ca, [*ALWAYS, *hosts])
    for name, certificate in (("ca.crt", ca), ("server.crt", server)):
        (folder / name).write_bytes(certificate.public_bytes(Encoding.PEM))
    _write_key(folder / "ca.key", ca_key, PrivateFormat.PKCS8)
    _write_key(folder / "server.key", server_key, PrivateFormat.PKCS8)
    for client in range(sites):
        write_node_key(folder / f"site-{client}")
    write_signing_key(folder / "signer")


def write_node_key(path: Path) -> None:
    """A site's key as Flower wants it: ECDSA on P-384, in OpenSSH's format, ``.pub`` beside it."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_key(path, key, PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def write_signing_key(path: Path) -> None:
    """As Flower's trusted entities have it: Ed25519, in OpenSSH's format."""
    _write_key(path, Ed25519PrivateKey.generate(), PrivateFormat.OpenSSH)


def fingerprint(public_key: bytes) -> str:
    """Of a key in PEM, as ``ssh-keygen -l`` prints it; empty where it is no key."""
    try:
        key = load_pem_public_key(public_key)
    except ValueError:
        return ""
    if not isinstance(key, ec.EllipticCurvePublicKey):  # Flower registers no others
        return ""
    digest = ssh_key_fingerprint(key, hashes.SHA256())
    return f"SHA256:{b64encode(digest).decode().rstrip('=')}"


def _write_key(
    path: Path, key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey, form: PrivateFormat
) -> None:
    content = key.private_bytes(Encoding.PEM, form, NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("perfed trial authority")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return key, certificate


def _server(
    ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate, hosts: list[str]
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        _builder(_name("perfed coordinator"), ca.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(authority, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    return key, certificate


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + VALID)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
