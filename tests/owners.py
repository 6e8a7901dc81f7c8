"""What tests of owners share: moto in place of S3, and real servers with `--owner-lease`."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

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
        self,
        data: Path,
        url: str,
        *options: str,
        lease: float = LEASE,
        address: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.address = address or f"127.0.0.1:{free_ports(1)[0]}"
        port = self.address.rpartition(":")[2]
        self.data, self.log_file = data, data.with_name(f"{data.name}-{port}.log")
        arguments = ["--listen", self.address, "--web", "off", "--data-dir", str(data)]
        # A shard that is taken over is copied to where it was.
        arguments += [] if "--take-over" in options else ["--copy-to", url]
        arguments += ["--owner-lease", str(lease), "--lease-ms", str(int(1000 * max(2.0, lease)))]
        arguments += ["--snapshot-every", "3600", *options]
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fastps", "serve", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, **(variables or {})},
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
    data: Path,
    url: str,
    *options: str,
    lease: float = LEASE,
    address: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    one = Server(data, url, *options, lease=lease, address=address, variables=variables)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def shard(url: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fastps", "owner", url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["shards"]
    return one


def owner(url: str) -> dict[str, Any]:
    return shard(url)["owner"]


def pushed(address: str, timeout: float = 1.0) -> bool:
    """Whether the server acknowledges a push. A client of its own, which knows no other address."""
    try:
        with fastps.connect(address, wait=0.5, timeout=timeout) as ps:
            ps.push("w", ONES)
            return True
    except fastps.FastpsError:
        return False


class Pushing:
    """A client that pushes on a thread of its own, until it is told to end."""

    def __init__(self, addresses: Callable[[], Any], ack: Literal["logged", "copied"]) -> None:
        self.addresses, self.ack = addresses, ack
        self.receipts = self.lost = 0
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with fastps.connect(self.addresses, timeout=120.0, ack=self.ack) as ps:
                ps.pull("w")
                while not self._over.is_set():
                    try:
                        ps.push("w", ONES)
                        self.receipts += 1
                    except fastps.VersionsLost as error:
                        self.lost += sum(one.own for one in error.lost)
        except BaseException as error:
            self.error = error

    def until(self, receipts: int) -> None:
        end = time.monotonic() + 120
        while self.receipts < receipts:
            assert time.monotonic() < end, (self.receipts, receipts)
            assert self.error is None, self.error
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends with the next receipt."""
        self._over.set()

    def end(self) -> None:
        self.stop()
        self._thread.join(180)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


class SlowStore:
    """A slow way to a store: requests that somebody holds arrive later, whatever became of their sender."""

    def __init__(self, endpoint: str) -> None:
        holder = self
        self._holds: Callable[[str, str], bool] = lambda method, path: False
        self._denies: Callable[[str, str], bool] = lambda method, path: False
        self._go_on = threading.Event()
        self.held: list[str] = []
        self.arrived: list[str] = []
        target = endpoint.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                is_held = holder._holds(self.command, self.path)
                if is_held:
                    holder.held.append(self.path)
                    holder._go_on.wait()
                if holder._denies(self.command, self.path):
                    self._deny()
                    return
                store = http.client.HTTPConnection(target, timeout=60)
                store.request(self.command, self.path, body, dict(self.headers))
                answer = store.getresponse()
                text = answer.read()
                if is_held:
                    holder.arrived.append(self.path)
                with suppress(OSError):
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in (
                            "transfer-encoding",
                            "content-length",
                            "connection",
                            "date",
                            "server",
                        ):
                            self.send_header(name, value)
                    length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                    self.send_header("Content-Length", length or str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)
                store.close()

            def _deny(self) -> None:
                text = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
                self.send_response(403)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass

            def log_message(self, format: str, *arguments: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def hold(self, which: Callable[[str, str], bool]) -> None:
        """Holds the requests of which this is true, given method and path."""
        self._holds = which

    def deny(self, which: Callable[[str, str], bool]) -> None:
        """Refuses the requests of which this is true, given method and path, as not permitted."""
        self._denies = which

    def let_go(self) -> None:
        """Lets all through."""
        self._holds = lambda method, path: False
        self._go_on.set()

    def close(self) -> None:
        self.let_go()
        self._server.shutdown()
        self._server.server_close()
