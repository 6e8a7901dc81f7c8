"""Each refusal that a client can cause arrives as a typed error with its fields, for tensors of any name."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import fastps
from clients.driver import Driver, packed
from faults.shards import Shards

#: Names that look like numbers with exponents, long ones, and others than ASCII.
NAMES = ["e1234", "a12345678", "n" * 1024, "wäight λ 重み"]
ONES = np.ones(10, np.float32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Shards]:
    two = Shards(2, "--memory-limit", "16MiB")
    yield two
    two.close()


@pytest.mark.parametrize("name", NAMES, ids=["exponent", "digits", "long", "unicode"])
def test_refusals_of_a_server(cluster: Shards, drivers: Callable[..., Driver], name: str) -> None:
    driver = drivers(cluster.addresses)

    def spec(**fields: Any) -> dict[str, Any]:
        return {
            "name": name,
            "shape": [10],
            "group": name,
            "optimizer": "sgd",
            "settings": {"lr": 1.0},
        } | fields

    def push(**fields: Any) -> dict[str, Any]:
        return driver.refused("push", gradients=[{"tensor": name, "values": packed(ONES)}], **fields)

    def register(values: Any = ONES, **fields: Any) -> dict[str, Any]:
        return driver.refused("register", tensor=spec(**fields), values=packed(values))

    def check(error: dict[str, Any], kind: str, **fields: Any) -> None:
        assert error["kind"] == kind, error
        assert error["code"] not in ("Unknown", "OK"), error
        assert error["tensor"] == name, error
        assert {field: error[field] for field in fields} == fields, error

    with fastps.connect(",".join(cluster.addresses)) as ps:
        ps.register(name, ONES, optimizer=fastps.SGD(lr=1.0), group=name)
        check(register(np.ones(3), shape=[3]), "precondition", shard=0)
        check(register(optimizer="nonsense"), "config", shard=0)
        check(register(settings={"nonsense": 1.0}), "config", shard=0)
        check(push(lr=-1.0), "config")
        overflow = [{"tensor": name, "values": packed(3e38 * ONES)}]
        check(driver.refused("push", gradients=overflow, lr=1e30), "non_finite")
        driver.do("join", group=name, mode="sync", workers=1)
        check(push(), "precondition")  # without a base
        driver.do("pull", tensors=[name], keep="v")
        driver.do("push", gradients=[{"tensor": name, "values": packed(ONES)}], based_on="v")
        check(push(based_on="v"), "stale_push")
        other = drivers(cluster.addresses)
        error = other.refused("join", group=name, mode="bounded", workers=1)
        assert (error["kind"], error["shard"]) == ("precondition", 0)
        full = other.refused("join", group=name, mode="sync", workers=1, timeout_ms=300)
        assert (full["kind"], full["shard"]) == ("unavailable", 0)
        assert full["retry_after_ms"] > 0
        driver.do("leave", group=name)
        driver.do("push", gradients=[{"tensor": name, "values": packed(ONES)}])
        ps.unregister(name)
        check(push(), "unknown_tensor")
        check(push(), "unknown_tensor", shard=0)  # with the current map
        huge = np.zeros(4 << 20, np.float32)  # with its state, more than both shards may hold
        check(register(huge, shape=[huge.size], optimizer="adam"), "capacity")


def test_arguments_are_checked_before_anything_is_sent(
    cluster: Shards, drivers: Callable[..., Driver]
) -> None:
    driver = drivers(cluster.addresses)
    driver.register("w", np.zeros((4, 5)))
    bad = np.zeros((4, 5), np.float32)
    bad[2, 1] = np.nan
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"values": packed(bad)}, "non_finite", "index 11"),
        ({"values": packed(np.ones(15))}, "shape", "expected 20, got 15"),
        ({"values": packed(np.inf * np.ones(20))}, "non_finite", "index 0"),
        ({"values": packed(np.ones(10)), "rows": [0, 4]}, "shape", "row"),
        ({"values": packed(np.ones(9)), "rows": [0, 1]}, "shape", "expected 10, got 9"),
        ({"values": packed(np.ones(20)), "tensor": "missing"}, "unknown_tensor", "missing"),
    ]
    for fields, kind, text in cases:
        error = driver.refused("push", gradients=[{"tensor": "w"} | fields])
        assert (error["kind"], text in error["message"]) == (kind, True), error
    whole = [{"tensor": "w", "values": packed(np.ones(20))}]
    for fields, text in (({"codec": "onebit"}, "error feedback"), ({"gradients": whole * 2}, "twice")):
        error = driver.refused("push", **{"gradients": whole} | fields)
        assert (error["kind"], text in error["message"]) == ("config", True), error
    assert driver.refused("advance", group="default")["kind"] == "config"
    assert driver.versions("w") == [1]
    driver.do("close")
    for op, fields in (("pull", {"tensors": ["w"]}), ("push", {"gradients": whole}), ("close", {})):
        answer = driver.ask(op, **fields)
        assert ("error" in answer) == (op != "close")
        assert op == "close" or answer["error"]["kind"] == "closed"


class Stranger(socketserver.StreamRequestHandler):
    """Answers whatever comes by the server's `answer`."""

    def handle(self) -> None:
        self.request.recv(1 << 16)
        self.wfile.write(self.server.answer)  # type: ignore[attr-defined]


@contextmanager
def stranger(answer: bytes) -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Stranger) as server:
        server.answer = answer  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_connections_that_cannot_be_fail_at_once_with_the_words_of_python(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], ca: Any
) -> None:
    files = ca.issue("server", "localhost", "127.0.0.1") | ca.trust
    options = [f"--{name.replace('_', '-')}={file}" for name, file in files.items()]
    (secure,), (plain,) = clusters(*options, shards=1).addresses, clusters(shards=1).addresses
    wrong, own = ca.issue("other", "other")["tls_cert"], ca.client
    go = {"ca": ca.file, "cert": own["tls_cert"], "key": own["tls_key"]}
    driver = drivers([secure], connected=False)
    with (
        stranger(b"HTTP/1.1 400 Bad Request\r\n\r\n") as web,
        stranger(b"SSH-2.0-x\r\n") as banner,
        stranger(b"<!DOCTYPE HTML>\n<html>") as page,
    ):
        cases: list[tuple[str, dict[str, str], dict[str, Any], str]] = [
            (secure, {}, {}, "denied"),
            (plain, go, own, "denied"),
            (secure, go | {"name": "other"}, own | {"tls_server_name": "other"}, "denied"),
            (secure, go | {"ca": wrong}, own | {"tls_ca": wrong}, "denied"),
            (web, {}, {}, "config"),
            (banner, {}, {}, "config"),
            (banner, go, own, "denied"),
            *(
                (address, {}, {}, "config")
                for address in (
                    "localhost",
                    f"http://{plain}",
                    f"dns:///{plain}",
                    "localhost:",
                    "localhost:0",
                    "localhost:65536",
                    "localhost:http",
                    "me@localhost:70",
                    "localhost:70/x",
                    "::1",
                    "unix:x",
                    "unix://x",
                )
            ),
        ]
        for address, tls, settings, kind in cases:
            error = driver.refused("connect", addresses=[address], tls=tls or None)
            with pytest.raises(fastps.FastpsError) as native:
                fastps.connect(address, **settings)
            # A setting has the name that it has in the language.
            same = str(native.value).partition(": expected tls_ca")[0].replace("tls_ca", "Options.TLS")
            assert (error["kind"], error["deadline"]) == (kind, False), error
            assert error["message"].startswith(same), (error, same)
        assert "a web server" in driver.refused("connect", addresses=[page])["message"]
    refused = driver.connect(tls={"ca": ca.file})["error"]
    assert (refused["kind"], "asks for a client's certificate" in refused["message"]) == ("denied", True)
    wrong_fields: list[dict[str, Any]] = [{"addresses": ["fps_secret:70"]}, {"token": "fps_secret"}]
    for fields in (*wrong_fields, {"tls": {"ca": "fps_secret"}}):
        error = driver.refused("connect", **{"addresses": [plain]} | fields)
        assert (error["kind"], "secret" in str(error)) == ("config", False), error


def test_connections_that_cannot_be_are_typed_errors(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], ca: Any
) -> None:
    options = [f"--{name.replace('_', '-')}={file}" for name, file in (ca.server | ca.trust).items()]
    cluster = clusters(*options, shards=1)
    driver = drivers(cluster.addresses, connected=False)
    wrong = ca.issue("other", "other")["tls_cert"]
    trust, own = {"ca": ca.file}, ca.client
    cases: dict[str, dict[str, Any]] = {
        "plain text": {},
        "no certificate": {"tls": trust},
        "another authority": {"tls": {"ca": wrong, "cert": own["tls_cert"], "key": own["tls_key"]}},
    }
    for case, fields in cases.items():
        error = driver.connect(**fields, timeout_ms=1000)["error"]
        assert error["kind"] == "denied", (case, error)
        assert cluster.addresses[0] in error["message"], (case, error)
    assert driver.connect(tls={"ca": "/nowhere"})["error"]["kind"] == "config"
    assert driver.ask("connect", addresses=[])["error"]["kind"] == "config"
    missing = driver.ask("connect", addresses=["127.0.0.1:1"], timeout_ms=500)
    assert (missing["error"]["kind"], missing["seconds"] < 1.5) == ("connection", True), missing
    good = {"ca": ca.file, "cert": own["tls_cert"], "key": own["tls_key"]}
    assert "error" not in driver.connect(tls=good)
