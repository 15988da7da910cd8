"""`kvmesh credentials DIR`: what a mesh over several machines needs to trust its broker, and the broker to know its roles.

    DIR/ca.pem                        who signed the broker's certificate: for every process, not secret
    DIR/broker.pem                    the broker's certificate and key: for the broker alone
    DIR/nats.conf                     its configuration, with a user and rights for each role: for the broker alone
    DIR/{router,prefill,decode}.env   KVMESH_NATS_* of a role: for the processes of that role alone

The authority's key is not kept: to change anything, make everything again.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.up.nats_config import ROLES, nats_config, new_passwords
from shared import lifecycle
from shared.errors import ConfigError

Key = ec.EllipticCurvePrivateKey


def main(argv: list[str]) -> None:
    """Exit status 1, and one line, where something is wrong."""
    parser = argparse.ArgumentParser(prog="kvmesh credentials", description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="made where it is not there; must be empty")
    parser.add_argument(
        "--host", action="append", help="name or address of the broker, first the one to use [localhost]"
    )
    parser.add_argument("--port", type=int, default=4222, help="port of the broker [4222]")
    parser.add_argument("--days", type=int, default=365, help="how long the certificates are valid [365]")
    parser.add_argument("--seen-at", type=Path, help="where who reads them will find the files [the directory]")
    asked = parser.parse_args(argv)
    hosts = asked.host or ["localhost", "127.0.0.1"]
    try:
        write(asked.directory, hosts, asked.port, asked.days, seen_at=asked.seen_at)
    except ConfigError as error:
        lifecycle.fail("credentials", error)
    print(f"{asked.directory}: start the broker with  nats-server -c {asked.seen_at or asked.directory}/nats.conf")


def write(directory: Path, hosts: Sequence[str], port: int, days: int, *, seen_at: Path | None = None) -> None:
    """Writes the files, the secret ones so that only their owner can read them. `seen_at`: the directory in which they find one
    another, where they are carried elsewhere. Raises `ConfigError`."""
    _check(directory, port, days)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = _authority(ca_key, days)
    certificate = _certificate(ca, ca_key, key, hosts, days)
    passwords = new_passwords()
    directory = directory.resolve()
    seen_at = seen_at or directory
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    (directory / "ca.pem").write_bytes(ca.public_bytes(pem))
    broker = directory / "broker.pem"
    _secret(broker, certificate.public_bytes(pem) + key.private_bytes(pem, *private))
    _secret(
        directory / "nats.conf", nats_config(f"0.0.0.0:{port}", passwords, certificate=seen_at / broker.name).encode()
    )
    for role in ROLES:
        told = {
            "KVMESH_NATS_URL": f"tls://{hosts[0]}:{port}",
            "KVMESH_NATS_USER": role,
            "KVMESH_NATS_PASSWORD": passwords[role],
            "KVMESH_NATS_CA": str(seen_at / "ca.pem"),
        }
        _secret(directory / f"{role}.env", "".join(f"{name}={value}\n" for name, value in told.items()).encode())


def _check(directory: Path, port: int, days: int) -> None:
    if not 1 <= port <= 65535:
        raise ConfigError("--port", port, "a port, 1 to 65535")
    if not 1 <= days <= 3650:
        raise ConfigError("--days", days, "a number of days, 1 to 3650")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("directory", str(directory), f"a directory that can be made ({error.strerror})") from None
    if any(directory.iterdir()):
        raise ConfigError("directory", str(directory), "an empty directory: what is there is not replaced")


def _secret(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(content)


def _authority(key: Key, days: int) -> x509.Certificate:
    name = _name("kvmesh authority")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    return (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _certificate(ca: x509.Certificate, ca_key: Key, key: Key, hosts: Sequence[str], days: int) -> x509.Certificate:
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        _builder(_name("kvmesh broker"), ca.subject, key, days)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: Key, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
