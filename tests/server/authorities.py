"""Two CAs of `fastps certs` whose files are replaced while servers and clients run."""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fastps.commands.cli import main

HOST = "127.0.0.1"


class Authorities:
    """Two CAs of `fastps certs`, and the files that servers and clients are started with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for ca in ("old", "new"):
            assert main(["certs", "init", str(folder / ca)]) == 0
            self.issue(ca, "--server", HOST, "--name", "server")
            self.issue(ca, "--client", "alice", "--role", "worker")
        self.ca = folder / "ca.pem"
        self.put("old/ca.pem", self.ca)
        self.server = self.files("server", "server")
        self.client = self.files("client", "alice")

    def issue(self, ca: str, *options: str) -> None:
        assert main(["certs", "issue", str(self.folder / ca), *options]) == 0

    def files(self, name: str, source: str) -> dict[str, Path]:
        """Options of one end, with copies of what the old CA issued."""
        files = {kind: self.folder / f"{name}-{kind}.pem" for kind in ("tls_cert", "tls_key")}
        self.use("old", source, files)
        return files | {"tls_ca": self.ca}

    def use(self, ca: str, source: str, files: dict[str, Path]) -> None:
        """Replaces the certificate and the key of one end."""
        self.put(f"{ca}/{source}-key.pem", files["tls_key"])
        self.put(f"{ca}/{source}.pem", files["tls_cert"])

    def put(self, source: str, target: Path) -> None:
        """Replaces a file at once, as a careful operator does."""
        new = target.with_suffix(".new")
        shutil.copyfile(self.folder / source, new)
        new.chmod(0o600)
        new.replace(target)

    def trust(self, *cas: str) -> None:
        new = self.ca.with_suffix(".new")
        new.write_text("".join((self.folder / ca / "ca.pem").read_text() for ca in cas))
        new.replace(self.ca)


def until(happens: Callable[[], bool], seconds: float = 60.0) -> float:
    """Waits for a condition; returns the seconds that it took."""
    begin = time.monotonic()
    while not happens():
        assert time.monotonic() - begin < seconds
        time.sleep(0.05)
    return time.monotonic() - begin


def serial(file: Path) -> int:
    return x509.load_pem_x509_certificate(file.read_bytes()).serial_number


def revoke(folder: Path, *files: Path) -> str:
    """A list of revoked certificates, signed by the CA of the folder."""
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateRevocationListBuilder().issuer_name(ca.subject)
    builder = builder.last_update(now).next_update(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.CRLNumber(1), critical=False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
    )
    for file in files:
        one = x509.RevokedCertificateBuilder().serial_number(serial(file)).revocation_date(now)
        builder = builder.add_revoked_certificate(one.build())
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
