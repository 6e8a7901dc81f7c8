"""What tests of owners share: moto in place of S3, and real servers with `--owner-lease`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.commands.kit.servers import free_ports

AWS = {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "hidden-secret", "AWS_REGION": "us-east-1"}
LEASE = 8.0
ONES = np.ones(3, np.float32)


class Store:
    """A bucket that can be away for a while."""

    def __init__(self) -> None:
        moto = pytest.importorskip("moto.server", reason="moto is not installed")
        (self.port,) = free_ports(1)
        self.server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.server.start()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        bucket = f"owners-{os.getpid()}-{self.port}"
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.endpoint}/{bucket}", method="PUT")
        ) as answer:
            assert answer.status == 200
        self.url = f"s3://{bucket}/run"

    def leave(self) -> None:
        self.server.stop()

    def come_back(self) -> None:
        """Its objects are still there: they belong to the process."""
        import moto.server

        self.server = moto.server.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.server.start()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    one = Store()
    for name, value in {**AWS, "AWS_ENDPOINT_URL": one.endpoint, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    try:
        yield one
    finally:
        one.leave()


class Server:
    """A server of one shard, in a process of its own."""

    def __init__(
        self, data: Path, url: str, *options: str, lease: float = LEASE, address: str | None = None
    ) -> None:
        self.address = address or f"127.0.0.1:{free_ports(1)[0]}"
        port = self.address.rpartition(":")[2]
        self.data, self.log_file = data, data.with_name(f"{data.name}-{port}.log")
        arguments = ["--listen", self.address, "--web", "off", "--data-dir", str(data)]
        # A shard that is taken over is copied to where it was.
        arguments += [] if "--take-over" in options else ["--copy-to", url]
        arguments += ["--owner-lease", str(lease), "--lease-ms", "2000", "--snapshot-every", "3600", *options]
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fastps", "serve", *arguments], stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def until(self, words: str) -> None:
        end = time.monotonic() + 60
        while words not in self.log:
            assert time.monotonic() < end, (words, self.log)
            assert self.process.poll() is None, self.log
            time.sleep(0.05)

    def listens(self) -> bool:
        return "shard 0 listening on" in self.log

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def ends(self, status: int) -> str:
        assert self.process.wait(60) == status, self.log
        return self.log


@contextmanager
def server(
    data: Path, url: str, *options: str, lease: float = LEASE, address: str | None = None
) -> Iterator[Server]:
    one = Server(data, url, *options, lease=lease, address=address)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def owner(url: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fastps", "owner", url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (shard,) = json.loads(done.stdout)["shards"]
    return shard["owner"]


def pushed(address: str, timeout: float = 1.0) -> bool:
    """Whether the server acknowledges a push. A client of its own, which knows no other address."""
    try:
        with fastps.connect(address, wait=0.5, timeout=timeout) as ps:
            ps.push("w", ONES)
            return True
    except fastps.FastpsError:
        return False
