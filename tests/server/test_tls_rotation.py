"""Certificates, CAs and lists of revoked certificates that are replaced while servers and clients run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from authorities import HOST, Authorities, revoke, serial, until
from cryptography import x509

import fastps


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


@contextlib.contextmanager
def serving(folder: Path, *options: str, **files: Path) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A server process, its address and its log."""
    arguments = [f"--{name.replace('_', '-')}={file}" for name, file in files.items()]
    command = [sys.executable, "-m", "fastps", "serve", "--listen", f"{HOST}:0", "--web", "off"]
    log = folder / "log"
    with log.open("w") as errors:
        server = subprocess.Popen(
            [*command, *options, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert server.stdout is not None
    try:
        yield server, server.stdout.readline().split()[-1], log
    finally:
        server.terminate()
        server.communicate(timeout=60)


def presented(address: str) -> int:
    """The serial number of the certificate that new connections get."""
    command = ["openssl", "s_client", "-connect", address, "-alpn", "h2"]
    shown = subprocess.run(command, input="", capture_output=True, text=True, timeout=60).stdout
    certificate = shown[shown.index("-----BEGIN") : shown.index("-----END")] + "-----END CERTIFICATE-----\n"
    return x509.load_pem_x509_certificate(certificate.encode()).serial_number


class Load(threading.Thread):
    """Pushes one after another, each through a new connection now and then."""

    def __init__(self, address: str, files: dict[str, Path]) -> None:
        super().__init__()
        self.address, self.files = address, files
        self.pushes, self.connections = 0, 0
        self.stop = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                with fastps.connect(self.address, transport="tcp", **self.files) as ps:
                    ps.register("w", np.zeros(1000, np.float32), optimizer=fastps.SGD(lr=1.0))
                    self.connections += 1
                    for _ in range(20):
                        ps.push({"w": np.ones(1000, np.float32)})
                        self.pushes += 1
        except Exception as error:
            self.error = error


def test_a_client_that_starts_between_a_new_key_and_its_certificate_waits(
    authorities: Authorities, tmp_path: Path
) -> None:
    authorities.issue("old", "--client", "alice", "--role", "worker", "--name", "next")
    with serving(tmp_path, **authorities.server) as (_, address, _):
        authorities.put("old/next-key.pem", authorities.client["tls_key"])
        with pytest.raises(fastps.ConfigError, match="the private key of another certificate"):
            fastps.connect(address, transport="tcp", **authorities.client)
        certificate = (authorities.folder / "old/next.pem", authorities.client["tls_cert"])
        late = threading.Timer(0.1, shutil.copyfile, certificate)
        late.start()
        with fastps.connect(address, transport="tcp", **authorities.client) as ps:
            assert ps.names() == []
        late.join()


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_certificates_and_the_ca_rotate_under_load(authorities: Authorities, tmp_path: Path) -> None:
    with serving(tmp_path, **authorities.server) as (server, address, log):
        lasting = fastps.connect(address, transport="tcp", **authorities.client)
        load = Load(address, authorities.client)
        load.start()
        until(lambda: load.pushes > 40 or load.error is not None)
        reload = server.send_signal
        # Both CAs are trusted; then both ends change their certificates; then the old CA goes.
        authorities.trust("old", "new")
        reload(signal.SIGHUP)
        until(lambda: log.read_text().count("were read again") == 1)
        authorities.use("new", "server", authorities.server)
        new = serial(tmp_path / "new" / "server.pem")
        assert until(lambda: presented(address) == new) < 10  # without a signal
        authorities.use("new", "alice", authorities.client)
        before = load.connections
        until(lambda: load.connections > before + 1 or load.error is not None)
        authorities.trust("new")
        reload(signal.SIGHUP)
        until(lambda: log.read_text().count("were read again") == 3)
        before = load.connections
        until(lambda: load.connections > before + 2 or load.error is not None)
        load.stop.set()
        load.join(60)
        assert load.error is None
        # Nothing was lost, and the connection from the beginning still serves.
        assert lasting.pull("w").tolist() == [-float(load.pushes)] * 1000
        lasting.close()
        assert "ERROR" not in log.read_text()
        # A client of the old CA is a stranger now.
        old = authorities.files("stranger", "alice")
        with pytest.raises(fastps.PermissionDeniedError, match="does not accept the client's certificate"):
            fastps.connect(address, transport="tcp", **old)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_bad_files_leave_the_last_good_ones_in_force(authorities: Authorities, tmp_path: Path) -> None:
    own = serial(authorities.server["tls_cert"])
    with serving(tmp_path, **authorities.server) as (server, address, log):
        good = authorities.server["tls_cert"].read_bytes()
        for text, says in (
            (b"nonsense", "it holds none in PEM form"),
            ((tmp_path / "new" / "server.pem").read_bytes(), "is the private key of another certificate"),
            (authorities.ca.read_bytes(), "is that of a CA"),
            (good.replace(b"\n", b"\r\n"), "line 1 ends as on Windows"),
        ):
            authorities.server["tls_cert"].write_bytes(text)
            server.send_signal(signal.SIGHUP)
            until(lambda says=says: says in log.read_text())
            assert presented(address) == own
        assert log.read_text().count("ERROR") == 4
        authorities.server["tls_cert"].write_bytes(good)
        server.send_signal(signal.SIGHUP)
        with fastps.connect(address, transport="tcp", **authorities.client) as ps:
            counters = ps.stats()["shards"][0]["counters"]
            assert counters["tls_reloads_failed"] == 4
        assert server.poll() is None


def test_a_revoked_certificate_is_refused(authorities: Authorities, tmp_path: Path) -> None:
    crl = tmp_path / "crl.pem"
    crl.write_text(revoke(tmp_path / "old"))
    authorities.issue("old", "--client", "bob", "--role", "worker")
    bob = {"tls_ca": authorities.ca, "tls_cert": tmp_path / "old" / "bob.pem"}
    bob["tls_key"] = tmp_path / "old" / "bob-key.pem"
    with serving(tmp_path, **authorities.server, tls_crl=crl) as (server, address, log):
        for files in (authorities.client, bob):
            fastps.connect(address, transport="tcp", **files).close()
        crl.write_text(revoke(tmp_path / "old", bob["tls_cert"]))
        server.send_signal(signal.SIGHUP)
        until(lambda: "were read again" in log.read_text())
        with pytest.raises(fastps.PermissionDeniedError, match="does not accept the client's certificate"):
            fastps.connect(address, transport="tcp", **bob)
        fastps.connect(address, transport="tcp", **authorities.client).close()
    own = {name: file for name, file in authorities.server.items() if name != "tls_ca"}
    arguments = [f"--{name.replace('_', '-')}={file}" for name, file in own.items()]
    command = [sys.executable, "-m", "fastps", "serve", "--listen", f"{HOST}:0", *arguments]
    for more, says in (
        ([f"--tls-crl={crl}"], "tls_crl and tls_ca"),
        ([f"--tls-ca={authorities.ca}", f"--tls-crl={authorities.ca}"], "list of revoked certificates"),
    ):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, env=os.environ)
        assert done.returncode == 1
        assert says in done.stderr
