"""A shard's port that is asked for a page: 404 with one sentence, by HTTP/1, by HTTP/2 and through TLS."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main
from fastps.commands.kit.servers import free_ports

HAS_HTTP2 = "HTTP2" in subprocess.run(["curl", "--version"], capture_output=True, text=True).stdout


def by_http1(
    address: str, method: str, path: str, tls: ssl.SSLContext | None = None, **headers: str
) -> tuple[int, str]:
    host, port = address.rsplit(":", 1)
    if tls is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
    else:
        connection = http.client.HTTPSConnection(host, int(port), timeout=60, context=tls)
    with closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def by_http2(address: str, *more: str) -> str:
    """curl's output: body and status."""
    command = [
        "curl",
        "--silent",
        "--max-time",
        "60",
        "--http2-prior-knowledge",
        "--write-out",
        " %{http_code}",
    ]
    return subprocess.run(
        [*command, *more, f"http://{address}/healthz"], capture_output=True, text=True, timeout=90
    ).stdout


def test_a_shard_says_where_metrics_and_health_are() -> None:
    with fastps.serve(shards=1) as server, fastps.connect(server.addresses) as ps:
        [address] = server.address_list
        for path in ("/metrics", "/healthz", "/"):
            status, body = by_http1(address, "GET", path)
            assert status == 404
            assert body.startswith("this port speaks gRPC: ")
            assert body.count("\n") == 1
            assert "--web" in body
        assert by_http1(address, "HEAD", "/metrics") == (404, "")
        ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
        ps.push("w", np.ones(3, np.float32))
        assert ps.pull("w")[0] == -1.0


@pytest.mark.skipif(not HAS_HTTP2, reason="there is no curl with HTTP/2")
def test_http2_without_grpc_gets_404_too() -> None:
    with fastps.serve(shards=1) as server:
        [address] = server.address_list
        found = by_http2(address)
        assert found.startswith("this port speaks gRPC: ")
        assert found.endswith("\n 404")


def test_peers_that_begin_like_a_request_and_stop_do_not_stay() -> None:
    with fastps.serve(shards=1) as server:
        host, port = server.address_list[0].rsplit(":", 1)
        for opening in (b"G", b"GET /metrics HTTP/1.1\r\n", b"HEAD", b"G" * 100_000):
            with socket.create_connection((host, int(port)), timeout=60) as peer:
                peer.sendall(opening)
                assert peer.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        with fastps.connect(server.addresses) as ps:
            assert ps.stats()["shards"][0]["counters"]["connections"] >= 1


def test_through_tls_and_without_it_where_it_is_asked_for(ca) -> None:
    with fastps.serve(shards=1, **ca.server) as server:
        [address] = server.address_list
        for tls in (ssl.create_default_context(cafile=ca.file), None):
            status, body = by_http1(address, "GET", "/healthz", tls)
            assert status == 404
            assert body.startswith("this port speaks gRPC: ")
            assert by_http1(address, "HEAD", "/healthz", tls) == (404, "")


@contextmanager
def recovering(folder: Path, *options: str, **client: str) -> Iterator[tuple[str, str]]:
    """Addresses of a shard that recovers until the block ends, and of its web listener."""
    address, web = (f"127.0.0.1:{port}" for port in free_ports(2))
    command = [sys.executable, "-m", "fastps", "serve", "--listen", address, "--web", web]
    command += ["--data-dir", str(folder), *options]
    with subprocess.Popen(command) as server:
        with fastps.connect(address, wait=60, **client) as ps:
            ps.register("w", np.zeros(3, np.float32), fastps.SGD(lr=1.0))
        server.terminate()
    # An older snapshot: the server waits for the manifest until something is written.
    older = folder / "shard-0/generation-00000000"
    older.mkdir()
    os.mkfifo(older / "MANIFEST")
    with subprocess.Popen(command) as server:
        try:
            yield address, web
            (older / "MANIFEST").open("rb+", buffering=0).close()  # releases the reader
            with fastps.connect(address, wait=60, **client) as ps:
                assert ps.names() == ["w"]
        finally:
            server.kill()


def answered(address: str, method: str, path: str, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
    """The answer of a server that is starting."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return by_http1(address, method, path, tls)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_shard_that_recovers_says_the_same(ca, tmp_path: Path) -> None:
    secure = [f"--{name.replace('_', '-')}={file}" for name, file in ca.server.items()]
    for name, options, client, tls in (
        ("plain", [], {}, None),
        ("tls", secure, ca.trust, ssl.create_default_context(cafile=ca.file)),
    ):
        (tmp_path / name).mkdir()
        with recovering(tmp_path / name, *options, **client) as (address, web):
            for method, path in (("GET", "/metrics"), ("GET", "/healthz"), ("HEAD", "/")):
                for way in {tls, None}:
                    status, body = answered(address, method, path, way)
                    assert status == 404
                    assert body.startswith("this port speaks gRPC: " if method == "GET" else "")
            if HAS_HTTP2 and tls is None:
                assert by_http2(address).endswith("\n 404")
            assert by_http1(web, "GET", "/healthz") == (200, "ok\n")
            status, body = by_http1(web, "GET", "/readyz")
            assert status == 503
            assert body.startswith("the server is recovering: shard 0: ")
            with pytest.raises(fastps.UnavailableError, match="the server is recovering"):
                fastps.connect(address, timeout=1.0, **client)


def test_a_shard_that_recovers_tells_strangers_no_names(tmp_path: Path) -> None:
    token = tmp_path / "reader.token"
    for name, role in (("trainer", "worker"), ("reader", "reader")):
        command = ["token", "new", str(tmp_path / "tokens"), name, "--role", role]
        assert main([*command, "--out", str(tmp_path / f"{name}.token")]) == 0
    (data := tmp_path / "data").mkdir()
    options = ("--tokens", str(tmp_path / "tokens"))
    with recovering(data, *options, token_file=str(tmp_path / "trainer.token")) as (_, web):
        ready = answered(web, "GET", "/readyz")
        assert ready == (503, "a shard does not serve yet, or no more; a reader of everything sees why\n")
        own = {"Authorization": f"Bearer {token.read_text().strip()}"}
        status, body = by_http1(web, "GET", "/readyz", **own)
        assert (status, body.startswith("the server is recovering: shard 0: ")) == (503, True)
        status, body = by_http1(web, "GET", "/readyz", Authorization="Bearer fps_" + "0" * 72)
        assert (status, "shard 0" in body) == (503, False)
