"""A shard's port that is asked for a page: 404 with one sentence, by HTTP/1, by HTTP/2 and through TLS."""

from __future__ import annotations

import http.client
import socket
import ssl
import subprocess

import numpy as np
import pytest

import fastps


def by_http1(address: str, method: str, path: str) -> tuple[int, str]:
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request(method, path)
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


def test_http2_without_grpc_gets_404_too() -> None:
    if subprocess.run(["curl", "--version"], capture_output=True, text=True).stdout.find("HTTP2") < 0:
        pytest.skip("there is no curl with HTTP/2")
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


def test_through_tls(ca) -> None:
    with fastps.serve(shards=1, **ca.server) as server:
        host, port = server.address_list[0].rsplit(":", 1)
        context = ssl.create_default_context(cafile=ca.file)
        connection = http.client.HTTPSConnection(host, int(port), timeout=60, context=context)
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        assert answer.status == 404
        assert answer.read().decode().startswith("this port speaks gRPC: ")
