"""The web listener off loopback: TLS with the server's certificate, and a credential of a reader."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from authorities import HOST, Authorities, revoke, serial, until
from cryptography import x509
from served import FASTPS, Served, serving

import fastps
from fastps.commands.cli import main

#: Off loopback for the server, which cannot know that the tests reach it through loopback.
OPEN = "0.0.0.0:0"
PAGES = ("/metrics", "/version", "/api/v1/cluster", "/absent")


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


def arguments(files: Mapping[str, Path | str]) -> list[str]:
    return [f"--{name.replace('_', '-')}={file}" for name, file in files.items()]


def own(authorities: Authorities) -> dict[str, Path]:
    """The certificate and key of a server that asks for no certificates."""
    return {name: file for name, file in authorities.server.items() if name != "tls_ca"}


def trust(authorities: Authorities, client: dict[str, Path] | None = None) -> ssl.SSLContext:
    """A client that trusts the CAs, perhaps with its own certificate."""
    context = ssl.create_default_context(cafile=str(authorities.ca))
    if client:
        context.load_cert_chain(client["tls_cert"], client["tls_key"])
    return context


def new_token(folder: Path, name: str, role: str, *options: str) -> str:
    file = folder / f"{name}.token"
    command = ["token", "new", str(folder / "tokens"), name, "--role", role, "--out", str(file), *options]
    assert main(command) == 0
    return file.read_text().strip()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_off_loopback_it_is_as_closed_as_a_shard(ca, tmp_path: Path) -> None:
    new_token(tmp_path, "reader", "reader")
    tokens, ended = {"tokens": tmp_path / "tokens"}, ca.issue("ended", HOST, valid=(-86_400 * 9, -86_400))
    for options, says in (
        ({}, ("--web: without TLS", "--tls-cert, --tls-key and --tokens", "--insecure", "0.0.0.0")),
        (tokens, ("--web: without TLS", "--tls-cert, --tls-key and --tokens", "--insecure")),
        (ca.server, ("--web: with TLS alone", "--tokens FILE or --tls-ca FILE, or --insecure")),
        (ended | tokens, ("ended.pem has expired", "got one that ended 1 days ago")),
    ):
        command = [*FASTPS, "serve", "--listen", f"{HOST}:0", "--web", OPEN, *arguments(options)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
        assert ran.returncode == 1, ran.stdout
        assert all(text in ran.stderr for text in says), ran.stderr


def test_https_asks_for_the_token_of_a_reader(authorities: Authorities, tmp_path: Path) -> None:
    authorities.issue("old", "--server", f"host-a,*.example.org,{HOST}", "--name", "named")
    authorities.use("old", "named", authorities.server)
    reader, worker = (new_token(tmp_path, role, role) for role in ("reader", "worker"))
    limited = new_token(tmp_path, "limited", "admin", "--groups", "a")
    tls, tokens, log = trust(authorities), tmp_path / "tokens", tmp_path / "log"
    options = [*arguments(own(authorities)), "--tokens", str(tokens)]
    with serving(*options, web=OPEN, log=log) as served:
        assert served.scheme == "https"
        for path in ("/healthz", "/readyz"):
            assert served.ask(path, tls=tls)[:2] == (200, "ok\n")
        for path in PAGES:
            status, text, headers = served.ask(path, tls=tls)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), path
            assert "the server asks for a token" in text
            assert served.ask(path, tls=tls, **bearer("fps_" + "0" * 72))[0] == 401
            assert served.ask(path, tls=tls, Authorization=reader)[0] == 401
            assert served.ask(path, tls=tls, **bearer(limited))[0] == 403
            for token in (reader, worker):
                status = served.ask(path, tls=tls, **bearer(token))[0]
                assert status == (404 if path == "/absent" else 200)
        for host in (
            "host-a",
            f"Host-A:{served.port}",
            "a.example.org",
            f"{HOST}:{served.port}",
            "localhost",
        ):
            assert served.ask("/metrics", host=host, tls=tls, **bearer(reader))[0] == 200, host
        for host in ("host-b", "example.org", "a.b.example.org", "host-a:1", "x@host-a"):
            assert served.ask("/metrics", host=host, tls=tls, **bearer(reader))[0] == 421, host
            assert served.ask("/healthz", host=host, tls=tls)[0] == 200, host
        for origin, status in (("https", 200), ("http", 403)):
            answer = served.ask("/healthz", tls=tls, Origin=f"{origin}://host-a:{served.port}")
            assert answer[0] == status
            assert "Access-Control-Allow-Origin" not in answer[2]
        assert served.ask("/metrics", method="POST", tls=tls, **bearer(reader))[0] == 405
        assert main(["token", "revoke", str(tokens), "reader"]) == 0
        served.process.send_signal(signal.SIGHUP)
        until(lambda: served.ask("/metrics", tls=tls, **bearer(reader))[0] == 401)
        assert served.ask("/metrics", tls=tls, **bearer(worker))[0] == 200
    assert "fps_" not in log.read_text()


def test_peers_without_tls_or_trust_get_a_sentence_or_a_clean_end(
    authorities: Authorities, tmp_path: Path
) -> None:
    new_token(tmp_path, "reader", "reader")
    options = [*arguments(own(authorities)), "--tokens", str(tmp_path / "tokens")]
    with serving(*options, web=OPEN, log=tmp_path / "log") as served:
        for method in ("GET", "POST"):
            assert served.ask("/metrics", method=method)[:2] == (400, "this port speaks TLS: use https\n")
        assert served.ask("/metrics", method="HEAD")[:2] == (400, "")
        for opening in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00\x05\x01\x02\x03\x04\x05"):
            with socket.create_connection((HOST, served.port), timeout=60) as peer:
                peer.sendall(opening)
                while peer.recv(1 << 16):
                    pass
        with pytest.raises(ssl.SSLCertVerificationError):
            served.ask("/healthz", tls=ssl.create_default_context())
        for change in ("old TLS", "only HTTP/2"):
            tls = trust(authorities)
            if change == "old TLS":
                tls.maximum_version = ssl.TLSVersion.TLSv1_2
            else:
                tls.set_alpn_protocols(["h2"])
            with pytest.raises(ssl.SSLError):
                served.ask("/healthz", tls=tls)
        tls = trust(authorities)
        tls.set_alpn_protocols(["h2", "http/1.1"])
        assert served.ask("/healthz", tls=tls)[0] == 200
        log = (tmp_path / "log").read_text()
        assert "a TLS handshake with the web listener failed" in log
        assert f"peer={HOST}" in log


def test_client_certificates_are_asked_for_on_loopback_too(authorities: Authorities, tmp_path: Path) -> None:
    authorities.issue("old", "--client", "limited", "--role", "admin", "--groups", "a")
    crl, audit = tmp_path / "crl.pem", tmp_path / "audit"
    crl.write_text(revoke(tmp_path / "old"))
    worker, limited = (trust(authorities, authorities.files(name, name)) for name in ("alice", "limited"))
    stranger = {"tls_cert": tmp_path / "new/alice.pem", "tls_key": tmp_path / "new/alice-key.pem"}
    options = [*arguments(authorities.server), f"--tls-crl={crl}", f"--audit={audit}"]
    with serving(*options, log=tmp_path / "log") as served:
        assert served.scheme == "https"
        for path in ("/healthz", "/readyz"):  # probes of Kubernetes show no certificate
            assert served.ask(path, tls=trust(authorities))[:2] == (200, "ok\n")
        for path in PAGES:
            status, text, _ = served.ask(path, tls=trust(authorities))
            assert (status, "asks for a client's certificate" in text) == (403, True)
            assert served.ask(path, tls=limited)[0] == 403
            assert served.ask(path, tls=worker)[0] == (404 if path == "/absent" else 200)
        assert "asks for a client's certificate" in audit.read_text()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            served.ask("/healthz", tls=trust(authorities, stranger))
        crl.write_text(revoke(tmp_path / "old", tmp_path / "old/alice.pem"))
        served.process.send_signal(signal.SIGHUP)

        def refused() -> bool:
            try:
                return served.ask("/metrics", tls=worker)[0] != 200
            except (ssl.SSLError, ConnectionError):
                return True

        until(refused)
        assert served.ask("/healthz", tls=trust(authorities))[0] == 200


def test_a_connection_ends_its_rights_with_its_certificate(authorities: Authorities, tmp_path: Path) -> None:
    """A scraper keeps its connection open for days."""
    crl = tmp_path / "crl.pem"
    crl.write_text(revoke(tmp_path / "old"))
    options = [*arguments(authorities.server), f"--tls-crl={crl}"]
    tls = trust(authorities, authorities.files("alice", "alice"))
    with (
        serving(*options, log=tmp_path / "log") as served,
        contextlib.closing(http.client.HTTPSConnection(HOST, served.port, timeout=60, context=tls)) as kept,
    ):

        def status(path: str) -> int:
            kept.request("GET", path, headers={"Host": f"{HOST}:{served.port}"})
            answer = kept.getresponse()
            answer.read()
            return answer.status

        assert status("/metrics") == 200
        own = kept.sock
        crl.write_text(revoke(tmp_path / "old", tmp_path / "old/alice.pem"))
        until(lambda: status("/metrics") == 403)
        assert status("/healthz") == 200
        assert kept.sock is own


def test_with_certificates_and_tokens_it_asks_for_both(authorities: Authorities, tmp_path: Path) -> None:
    token = new_token(tmp_path, "reader", "reader")
    authorities.issue("old", "--client", "limited", "--role", "admin", "--groups", "a")
    limited = trust(authorities, authorities.files("limited", "limited"))
    options = [*arguments(authorities.server), "--tokens", str(tmp_path / "tokens")]
    with serving(*options, web=OPEN, log=tmp_path / "log") as served:
        assert served.ask("/metrics", tls=trust(authorities), **bearer(token))[0] == 403
        assert served.ask("/metrics", tls=limited)[0] == 403
        assert served.ask("/metrics", tls=limited, **bearer(token))[0] == 200  # the token decides


class Scrapes(threading.Thread):
    """Asks for the metrics again and again, each time through a new connection."""

    def __init__(self, served: Served, token: str, *trusts: ssl.SSLContext) -> None:
        super().__init__()
        self.served, self.token, self.trusts = served, token, trusts
        self.count, self.stop = 0, threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                tls = self.trusts[self.count % len(self.trusts)]
                status, _, _ = self.served.ask("/metrics", tls=tls, **bearer(self.token))
                assert status == 200
                self.count += 1
        except Exception as error:
            self.error = error


def presented(served: Served) -> int:
    """The serial number of the certificate that new connections get."""
    pem = ssl.get_server_certificate((HOST, served.port), timeout=60)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def test_certificates_rotate_under_scrapes(authorities: Authorities, tmp_path: Path) -> None:
    token, files = new_token(tmp_path, "reader", "reader"), own(authorities)
    authorities.trust("old", "new")
    options = [*arguments(files), "--tokens", str(tmp_path / "tokens")]
    with serving(*options, web=OPEN, log=tmp_path / "log") as served:
        scrapes = Scrapes(served, token, trust(authorities))
        scrapes.start()
        until(lambda: scrapes.count > 3 or scrapes.error is not None)
        first = presented(served)
        for text, says in (
            (b"nonsense", "none in PEM form"),
            (authorities.ca.read_bytes(), "is that of a CA"),
        ):
            files["tls_cert"].write_bytes(text)
            served.process.send_signal(signal.SIGHUP)
            until(lambda says=says: says in (tmp_path / "log").read_text())
            assert presented(served) == first
        authorities.use("new", "server", authorities.server)
        assert (
            until(lambda: presented(served) == serial(tmp_path / "new/server.pem")) < 10
        )  # without a signal
        before = scrapes.count
        until(lambda: scrapes.count > before + 3 or scrapes.error is not None)
        scrapes.stop.set()
        scrapes.join(60)
        assert scrapes.error is None


@pytest.mark.timeout(180)
def test_stalled_handshakes_and_requests_stop_neither_scrapes_nor_pushes(
    authorities: Authorities, tmp_path: Path
) -> None:
    token, tls = new_token(tmp_path, "trainer", "worker"), trust(authorities)
    options = [*arguments(own(authorities)), "--tokens", str(tmp_path / "tokens")]
    with serving(*options, web=OPEN, log=tmp_path / "log") as served:
        stalled = []
        for k in range(400):
            peer = socket.create_connection((HOST, served.port), timeout=60)
            if k % 4 == 0:
                peer = tls.wrap_socket(peer, server_hostname=HOST)
                peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n")
            else:
                peer.sendall(b"\x16\x03\x01\x02\x00"[: k % 6])  # a part of a record, or nothing
            stalled.append(peer)
        files = {"tls_ca": authorities.ca, "token_file": tmp_path / "trainer.token"}
        with fastps.connect(served.addresses, **files) as ps:
            ps.register("w", np.zeros(10, np.float32), fastps.SGD(lr=1.0))
            for step in range(5):
                ps.push("w", np.ones(10, np.float32))
                assert served.ask("/metrics", tls=tls, **bearer(token))[0] == 200
                assert ps.pull("w")[0] == -(step + 1)
        for peer in stalled:  # the server ends each
            with peer, contextlib.suppress(ConnectionResetError, ssl.SSLError):
                assert peer.recv(1 << 16) == b""
        assert served.ask("/metrics", tls=tls, **bearer(token))[0] == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_scrapes_as_the_guide_says(authorities: Authorities, tmp_path: Path) -> None:
    authorities.issue("old", "--server", "host-a", "--name", "host-a")
    authorities.use("old", "host-a", authorities.server)
    new_token(tmp_path, "reader", "reader")
    options = [*arguments(own(authorities)), "--tokens", str(tmp_path / "tokens")]
    guide = (Path(__file__).parents[2] / "docs/how-to/security.md").read_text()
    (line,) = re.findall(r"^\$ (sed .* \|\s+curl .*)$", guide, re.MULTILINE)
    with serving(*options, web=OPEN, log=tmp_path / "log") as served:
        here = f"curl --silent --max-time 60 --connect-to ::{HOST}:{served.port} "
        line = line.replace("curl ", here).replace("host-a:7069", f"host-a:{served.port}")
        ran = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=90)
        assert "\nfastps_ready 1\n" in ran.stdout, ran.stderr
