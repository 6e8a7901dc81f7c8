"""A CA whose certificates name a principal, made with `cryptography` only."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import grpc

DAY = datetime.timedelta(days=1)


class Authority:
    """A CA; `file` has its certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        constraints = (x509.BasicConstraints(ca=True, path_length=None), True)
        self._certificate = self._sign(self._name, self._key, constraints)
        self.file = self._write("ca.pem", self._certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        extension: tuple,
        since: datetime.timedelta = -DAY,
        until: datetime.timedelta = DAY,
    ) -> x509.Certificate:
        """A certificate that is valid since and until some time from now."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            issuer_name=self._name, subject_name=name, public_key=key.public_key()
        )
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now + since).not_valid_after(now + until)
        return builder.add_extension(*extension).sign(self._key, hashes.SHA256())

    def _write(self, name: str, text: bytes) -> str:
        file = self._folder / name
        file.touch(mode=0o600)
        file.write_bytes(text)
        return str(file)

    def issue(self, *names: x509.GeneralName, **validity: datetime.timedelta) -> tuple[bytes, bytes]:
        """A certificate and its key; `since` and `until` as for `_sign`."""
        key = ec.generate_private_key(ec.SECP256R1())
        self._count += 1
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"number {self._count}")])
        certificate = self._sign(subject, key, (x509.SubjectAlternativeName(names), False), **validity)
        form = serialization.PrivateFormat.PKCS8
        secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        return certificate.public_bytes(serialization.Encoding.PEM), secret

    def server(self, address: str) -> dict[str, str]:
        """Files for a server at this address."""
        certificate, key = self.issue(x509.IPAddress(ipaddress.ip_address(address)))
        return {
            "tls_cert": self._write("server.pem", certificate),
            "tls_key": self._write("server-key.pem", key),
        }

    def revoked(self, *certificates: bytes) -> str:
        """The file of a list with these certificates, which replaces the former one."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        builder = builder.last_update(now - DAY).next_update(now + DAY)
        builder = builder.add_extension(x509.CRLNumber(1), critical=False)
        for certificate in certificates:
            serial = x509.load_pem_x509_certificate(certificate).serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
            builder = builder.add_revoked_certificate(entry.build())
        signed = builder.sign(self._key, hashes.SHA256())
        return self._write("crl.pem", signed.public_bytes(serialization.Encoding.PEM))

    def client(
        self, name: str, role: str = "worker", **validity: datetime.timedelta
    ) -> tuple[dict[str, str], bytes]:
        """Files for a client of ours with the certificate of a principal, and the certificate."""
        principal = f"fastps://principal/{name}?role={role}"
        certificate, key = self.issue(x509.UniformResourceIdentifier(principal), **validity)
        files = {
            "tls_ca": self.file,
            "tls_cert": self._write(f"{name}.pem", certificate),
            "tls_key": self._write(f"{name}-key.pem", key),
        }
        return files, certificate

    def credentials_of(self, files: dict[str, str]) -> grpc.ChannelCredentials:
        """For a client in plain grpcio with the files of a client of ours."""
        ca, certificate, key = (Path(files[name]).read_bytes() for name in ("tls_ca", "tls_cert", "tls_key"))
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def credentials(
        self,
        role: str | None = None,
        scope: str = "*",
        trust: str | None = None,
        **validity: datetime.timedelta,
    ) -> grpc.ChannelCredentials:
        """For a client in plain grpcio, with a principal of this role and scope in its certificate.

        `trust` is the file of the CA of the servers, by default its own.
        """
        names: list[x509.GeneralName] = [x509.DNSName("client")]
        if role is not None:
            principal = f"fastps://principal/{role}-{self._count}?role={role}"
            limit = "" if scope == "*" else f"&scope={scope}"
            names.append(x509.UniformResourceIdentifier(principal + limit))
        certificate, key = self.issue(*names, **validity)
        return grpc.ssl_channel_credentials(Path(trust or self.file).read_bytes(), key, certificate)
