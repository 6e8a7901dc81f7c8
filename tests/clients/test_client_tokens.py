"""A client of another language shows its token, and reads it again when it has changed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from clients.driver import PATIENT, Answer, Driver
from faults.shards import Shards
from security.token_files import Tokens, new_token

#: On both shards.
LARGE = np.zeros(600_000, np.float32)
ONES = np.ones_like(LARGE)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


@pytest.fixture
def options(tokens: Tokens) -> list[str]:
    """Of servers that ask for tokens."""
    return [f"--tokens={tokens.file}", f"--server-token-file={tokens.add('shards', 'server')}"]


def check(tokens: Tokens, error: Answer, kind: str, text: str = "") -> None:
    assert (error["kind"], text in error["message"]) == (kind, True), error
    for token in tokens.text.values():
        assert token[4:12] not in str(error)


def test_a_token_decides_what_a_client_may_do(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], tokens: Tokens, options: list[str]
) -> None:
    worker, reader = tokens.add("alice", "worker"), tokens.add("bob", "reader")
    old = tokens.add("carol", "worker", "*", "expires=2020-01-01")
    gone = tokens.add("dave", "worker")
    tokens.revoke("dave")
    unknown = tokens.write_secret("stranger", new_token())
    driver = drivers(clusters(*options).addresses, token=worker)
    driver.register("w", LARGE, lr=1.0)
    assert "error" not in driver.push("w", ONES)
    assert "error" not in driver.connect("reader", token=reader)
    assert (driver.pull("w", "reader") == -1).all()
    check(tokens, driver.push("w", ONES, "reader")["error"], "denied")
    for token, why in (("", "asks for a token"), (old, "expired"), (gone, "unknown"), (unknown, "unknown")):
        answer = driver.connect("refused", token=token)
        check(tokens, answer["error"], "unauthenticated", why)
        assert answer["seconds"] < 15  # not only at the deadline
    assert driver.versions("w") == [2] * 3


def test_a_token_comes_from_a_private_file_and_stays_on_this_machine(
    drivers: Callable[..., Driver], tokens: Tokens, ca: Any
) -> None:
    worker = tokens.add("alice", "worker")
    # An address of documentation, to which nothing may be sent: a try would take until the deadline.
    driver = drivers(["192.0.2.1:7070"], connected=False, token=worker)
    answer = driver.connect()
    check(tokens, answer["error"], "config", "TLS")
    assert answer["seconds"] < 10
    # A server that lists itself there.
    with fastps.serve(shards=2, tokens=tokens.file, advertise="192.0.2.1") as server:
        driver.addresses = [f"127.0.0.1:{server.address_list[0].rpartition(':')[2]}"]
        check(tokens, driver.connect()["error"], "config", "TLS")
    with fastps.serve(tokens=tokens.file, **ca.server) as server:
        driver.addresses = server.address_list
        tls = {"ca": ca.file}
        driver.do("connect", addresses=driver.addresses, tls=tls, token=worker)
        driver.register("w", np.zeros(8))
        check(tokens, driver.connect("other", tls=tls, token="")["error"], "unauthenticated")
        Path(worker).chmod(0o644)
        check(tokens, driver.connect("other", tls=tls)["error"], "config", f"chmod 600 {worker}")
        assert driver.versions("w") == [1]


def test_a_token_that_changes_under_load_loses_no_push(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], tokens: Tokens, options: list[str]
) -> None:
    own, other = tokens.add("alice", "worker"), tokens.add("bob", "worker")
    # Sessions outlast the time without a valid token, so that servers know the outcome of each push.
    cluster = clusters(*options, "--lease-ms", "120000")
    driver = drivers(cluster.addresses, token=own)
    driver.register("w", LARGE, lr=1.0)
    pushes = 0

    def push(timeout_ms: int = 30_000) -> Answer:
        nonlocal pushes
        answer = driver.push("w", ONES, timeout_ms=timeout_ms)
        pushes += "error" not in answer
        return answer

    with fastps.connect(",".join(cluster.addresses), token_file=other) as ps:

        def reload(condition: Callable[[], bool]) -> None:
            """Pushes until both servers have read their files again and a condition holds."""
            before = reloads(ps)
            for shard in (0, 1):
                cluster.signal(shard, signal.SIGHUP)
            late, done = time.monotonic() + PATIENT, False
            while not done:
                assert time.monotonic() < late, "it does not happen"
                done = condition() and min(np.subtract(reloads(ps), before)) > 0

        def is_pushed() -> bool:
            answer = push()
            assert "error" not in answer, answer
            return True

        for _ in range(2):
            tokens.add("alice", "worker")
            reload(is_pushed)
        assert driver.versions("w") == [1 + pushes] * 3

        tokens.revoke("alice")
        reload(lambda: push(2000).get("error", {}).get("kind") == "unauthenticated")
        check(tokens, driver.connect("refused")["error"], "unauthenticated")
        check(tokens, driver.refused("versions", tensors=["w"], timeout_ms=500), "unauthenticated")

        # The same client continues with a new token, and learns the outcome of each push.
        tokens.add("alice", "worker")
        reload(lambda: "error" not in push(2000))
    fates = driver.do("doubts", timeout_ms=30_000)["fates"]
    assert {fate["fate"] for fate in fates} <= {"applied", "not applied"}
    values, versions = driver.pull("w"), driver.versions("w")
    assert min(versions) > pushes
    assert versions == [1 - round(float(values[63 * 4096 * k])) for k in range(3)]


def reloads(ps: fastps.ParameterServer) -> list[int]:
    """Number of times that each server has read its tokens again."""
    return [shard["counters"]["token_reloads"] for shard in ps.stats()["shards"]]
