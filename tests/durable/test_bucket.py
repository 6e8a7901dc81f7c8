"""Snapshots copied to S3 or to a folder: real servers, the command line, and moto in place of S3."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.kit.servers import free_ports

LARGE = 3_000_000
"""More than one part of an upload."""

AWS = {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "hidden-secret", "AWS_REGION": "us-east-1"}

BUCKETS = itertools.count(1)


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path, monkeypatch) -> Iterator[str]:
    """A place for copies, with nothing in it."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "file":
        yield (tmp_path / "a bucket").as_uri()
        return
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        bucket = f"models-{next(BUCKETS)}"  # all servers of a process have the same ones
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")) as answer:
            assert answer.status == 200
        for name, value in {**AWS, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{bucket}/runs/first"
    finally:
        server.stop()


def free_port() -> int:
    """One of two that follow each other and are free."""
    while True:
        (port,) = free_ports(1)
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


@contextmanager
def serving(*options: str, port: int, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Two shards in a separate process, which is killed at the end."""
    command = [sys.executable, "-m", "fastps", "serve", "--shards", "2", "--listen", f"127.0.0.1:{port}"]
    end = time.monotonic() + 60
    while True:
        with log.open("a") as log_text:
            process = subprocess.Popen(
                [*command, *options], stdout=subprocess.PIPE, stderr=log_text, text=True
            )
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            if all("listening on" in line for line in lines):
                yield process
                return
            # Some other test may have the port for a moment.
            said = log.read_text()
            assert "in use" in said.splitlines()[-1], said
            assert time.monotonic() < end, said
        finally:
            process.kill()
            process.communicate()
        time.sleep(0.2)


def checkpoint(*arguments: str, fails: bool = False) -> str:
    command = [sys.executable, "-m", "fastps", "checkpoint", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    assert "hidden-secret" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def latest(url: str) -> dict[int, int]:
    """The newest copy of each shard."""
    stored = json.loads(checkpoint("list", url, "--json"))["snapshots"]
    assert all(one["problem"] is None or not one["latest"] for one in stored)
    return {one["shard"]: one["number"] for one in stored if one["latest"]}


def until_copied(url: str, log: Path, numbers: dict[int, int]) -> None:
    """The snapshot of each shard."""
    end = time.monotonic() + 60
    wanted = Counter(numbers.values())
    while True:
        log_text = log.read_text()
        if all(log_text.count(f"copied snapshot {n} (") >= shards for n, shards in wanted.items()):
            break
        assert time.monotonic() < end, log_text
        time.sleep(0.1)
    while latest(url) != numbers:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def test_a_cluster_comes_back_from_copies_alone(url: str, tmp_path: Path) -> None:
    """Killed with its disk; changes after the copy are lost and reported."""
    log, port = tmp_path / "log", free_port()
    kept = {"w": np.arange(LARGE, dtype=np.float32), "small": np.ones(3, np.float32)}
    options = ("--copy-to", url, "--snapshot-every", "3600")
    with serving("--data-dir", str(tmp_path / "data"), *options, port=port, log=log):
        ps = fastps.connect(f"127.0.0.1:{port}", ack="logged")
        for name, values in kept.items():
            ps.register(name, values, optimizer=fastps.Adam(lr=0.5))
        ps.push({name: np.ones_like(values) for name, values in kept.items()})
        kept, state = {name: ps.pull(name) for name in kept}, ps.state("w")
        checkpoint("save", "--consistent", "--", f"127.0.0.1:{port}")
        until_copied(url, log, {0: 1, 1: 1})
        ps.push({name: np.ones_like(values) for name, values in kept.items()})
        for shard in ps.stats()["shards"]:
            log_text = shard["counters"]
            assert (
                log_text["snapshot"],
                log_text["copy"],
                log_text["copies_failed"],
                log_text["log_broken"],
            ) == (1, 1, 0, 0)
    assert 'a cut over group "default"' in checkpoint("list", url)
    assert "shard 1: snapshot 1" in checkpoint(
        "fetch", "--consistent", url, str(tmp_path / "fetched as a cut")
    )
    target = str(tmp_path / "fetched")
    assert "shard 1: snapshot 1" in checkpoint("fetch", url, target)
    assert "is not empty" in checkpoint("fetch", url, target, fails=True)
    assert "whole" in checkpoint("verify", url)
    checkpoint("verify", target)
    with serving("--data-dir", target, *options, port=port, log=log) as process:
        call_until_it_is_reported(ps, shards={0, 1})
        for name, values in kept.items():
            np.testing.assert_array_equal(ps.pull(name), values)
        for name, values in ps.state("w").items():
            np.testing.assert_array_equal(values, state[name])
        ps.push("small", np.ones(3, np.float32))
        ps.close()
        # It continues in the same place, and its last snapshot is copied too, if that takes no longer than a
        # server may take to stop; else it says how to make up for it.
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    if "there was no time; fastps checkpoint upload does it" in log.read_text():
        checkpoint("upload", target, url)
    assert latest(url) == {0: 2, 1: 2}, log.read_text()
    # The first one may not.
    assert "another server" in checkpoint("upload", str(tmp_path / "data"), url, fails=True)
    assert latest(url) == {0: 2, 1: 2}
    assert "hidden-secret" not in log.read_text()


def call_until_it_is_reported(ps: fastps.ParameterServer, shards: set[int]) -> None:
    """A call that the restart interrupts is answered; the next one reports the loss."""
    end = time.monotonic() + 60
    while shards:
        assert time.monotonic() < end, shards
        try:
            ps.versions(["w", "small"])
        except fastps.VersionsLost as error:
            shards = shards - {lost.shard for lost in error.lost}


def test_serve_and_upload(url: str, tmp_path: Path) -> None:
    """From Python, and of a directory that no server uses."""
    ones = np.ones(3, np.float32)
    with (
        fastps.serve(data_dir=tmp_path / "a", copy_to=url) as server,
        fastps.connect(server.addresses) as ps,
    ):
        ps.register("w", ones, optimizer=fastps.SGD(lr=1.0))
    assert latest(url) == {0: 1}
    assert "was there already" in checkpoint("upload", str(tmp_path / "a"), url)
    with fastps.serve(data_dir=tmp_path / "a") as server, fastps.connect(server.addresses) as ps:
        ps.push("w", ones)
    for number, kept in ((2, {1, 2}), (3, {3})):
        log_text = checkpoint("upload", str(tmp_path / "a"), url, "--keep", str(len(kept)))
        assert f"snapshot {number}" in log_text
        stored = json.loads(checkpoint("list", url, "--json"))["snapshots"]
        assert {one["number"] for one in stored} == kept
        fastps.serve(data_dir=tmp_path / "a").stop()
    checkpoint("fetch", url, str(tmp_path / "b"))
    with fastps.serve(data_dir=tmp_path / "b") as server, fastps.connect(server.addresses) as ps:
        np.testing.assert_array_equal(ps.pull("w"), 0 * ones)


def test_a_cut_is_copied_although_newer_snapshots_follow(url: str, tmp_path: Path) -> None:
    options = {"data_dir": tmp_path / "data", "copy_to": url, "keep": 9}
    with fastps.serve(**options) as server, fastps.connect(server.addresses) as ps:
        ps.register("w", np.ones(3, np.float32), optimizer=fastps.SGD(lr=1.0))
        checkpoint("save", server.addresses)
        copied(ps, 1)
        checkpoint("save", "--consistent", "--", server.addresses)
        checkpoint("save", server.addresses)
        copied(ps, 3)
    stored = json.loads(checkpoint("list", url, "--json"))["snapshots"]
    assert {one["number"]: one["cut"] for one in stored}[2] == "default"
    # A restarted server does not try the earlier snapshots.
    with fastps.serve(**options) as server, fastps.connect(server.addresses) as ps:
        copied(ps, 4)
        checkpoint("save", server.addresses)
        copied(ps, 5)
        assert ps.stats()["shards"][0]["counters"]["copies_failed"] == 0


def copied(ps: fastps.ParameterServer, number: int) -> None:
    end = time.monotonic() + 60
    while ps.stats()["shards"][0]["counters"]["copy"] != number:
        assert time.monotonic() < end, ps.stats()
        time.sleep(0.05)


def test_what_cannot_be_copied_is_refused(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(fastps.ConfigError, match="data_dir="):
        fastps.serve(copy_to="s3://bucket")
    with pytest.raises(fastps.ConfigError, match="s3://BUCKET/PREFIX") as raised:
        fastps.serve(data_dir=tmp_path, copy_to="s3://key:hidden-secret@bucket")
    assert "hidden-secret" not in str(raised.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(fastps.ConfigError, match="AWS_ALLOW_HTTP"):
        fastps.serve(data_dir=tmp_path, copy_to="s3://bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://key:hidden-secret@127.0.0.1:9")
    with pytest.raises(fastps.ConfigError, match="password") as raised:
        fastps.serve(data_dir=tmp_path, copy_to="s3://bucket")
    assert "hidden-secret" not in str(raised.value)
    assert "no shard-0" in checkpoint("list", (tmp_path / "none").as_uri(), fails=True)
    assert "--copy-to" in checkpoint("fetch", (tmp_path / "none").as_uri(), str(tmp_path / "new"), fails=True)


def until_one_failed(ps: fastps.ParameterServer) -> None:
    """`fastps status` would say so."""
    end = time.monotonic() + 60
    while not any(shard["counters"]["copies_failed"] for shard in ps.stats()["shards"]):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_training_continues_where_nothing_can_be_copied(tmp_path: Path, monkeypatch) -> None:
    """No server listens there; the failure is logged, and the server stops in time."""
    for name, value in {
        **AWS,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    log, port = tmp_path / "log", free_port()
    options = ("--data-dir", str(tmp_path / "data"), "--copy-to", "s3://models", "--snapshot-every", "0.2")
    with serving(*options, port=port, log=log) as process:
        with fastps.connect(f"127.0.0.1:{port}", ack="logged") as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
            for _ in range(20):
                ps.push("w", np.ones(3, np.float32))
                time.sleep(0.05)
            until_one_failed(ps)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert time.monotonic() - begin < 10
    log_text = log.read_text()
    assert "not copied" in log_text, log_text
    assert "Connection refused" in log_text, log_text
    assert "hidden-secret" not in log_text
