"""Fixtures for all tests: the package under test is the installed one."""

from __future__ import annotations

import datetime
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

import fastps
from fastps.commands.kit.servers import free_ports

__all__ = [
    "_doctest_names",
    "ca",
    "leaving",
    "messages_are_plain",
    "ps",
    "pytest_collection_modifyitems",
    "rng",
    "server",
    "store",
]

# Other tests need the time in which torch's idle threads would spin. It must be set before OpenMP is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell starts background jobs with Ctrl-C ignored, which the programs that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Servers of tests run side by side, so none may take the default port.
os.environ["FASTPS_WEB"] = "off"

#: Rust's `Debug` form, and Python's lists: options, structs, and lists of numbers or names.
DEBUG = re.compile(r"""\b(?:Some|Ok|Err)\(|\w \{ \w+: |(?<!\w)\[(?:\d*(?:, \d+)*\]|["'])""")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("FASTPS_NIGHTLY"):
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="it runs long: make nightly"))


@pytest.fixture(autouse=True)
def messages_are_plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No error of a test carries the debug form of a value."""
    messages: list[str] = []
    init = fastps.FastpsError.__init__

    def noted(self: fastps.FastpsError, message: str, *args: Any, **kwargs: Any) -> None:
        messages.append(message)
        init(self, message, *args, **kwargs)

    monkeypatch.setattr(fastps.FastpsError, "__init__", noted)
    yield
    assert not [message for message in messages if DEBUG.search(str(message))]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260101)


@pytest.fixture
def store() -> Iterator[fastps.Store]:
    with fastps.Store() as store:
        yield store


@pytest.fixture
def server() -> Iterator[fastps.Server]:
    """Three shards in this process."""
    with fastps.serve(shards=3) as server:
        yield server


@dataclass
class Leaving:
    """Two clients of three shards that will stop; gradients for 100 small tensors and one of three slices."""

    server: fastps.Server
    clients: list[fastps.ParameterServer]
    grads: dict[str, np.ndarray]

    def stop(self) -> None:
        """Stops the servers; returns when both clients have lost all their connections."""
        self.server.stop()
        late = time.monotonic() + 30
        for ps in self.clients:
            names, lost = itertools.cycle(self.grads), set()
            while len(lost) < len(self.server.address_list):
                assert time.monotonic() < late, "the servers still answer"
                try:
                    ps.pull(next(names), timeout=0.2)
                except fastps.ConnectionLostError as error:
                    lost.add(error.shard)
                except (fastps.UnavailableError, fastps.DeadlineError):  # "the server is stopping"
                    time.sleep(0.01)

    def check(self, error: BaseException) -> None:
        """The error says which server is gone."""
        assert type(error) is fastps.ConnectionLostError
        assert error.tensor in self.grads
        assert self.server.address_list[error.shard] in str(error)
        assert (error.expected, error.got, error.retry_after) == (None, None, None)


@pytest.fixture
def leaving() -> Iterator[Leaving]:
    # The small ones first: so each shard gets some.
    grads = {f"small{k}": np.ones(10, np.float32) for k in range(100)}
    grads["w"] = np.ones(2 * 63 * 4096 + 5, np.float32)
    with ExitStack() as stack:
        # At ports that the system gives to no other test's server once these have stopped.
        listen = f"127.0.0.1:{free_ports(3)[0]}"
        server = stack.enter_context(fastps.serve(listen=listen, shards=3))
        clients = [stack.enter_context(fastps.connect(server.addresses, timeout=3.0)) for _ in range(2)]
        for name, gradient in grads.items():
            clients[0].register(name, np.zeros_like(gradient), optimizer=fastps.Adam(), timeout=30)
        for ps in clients:
            ps.pull(grads, timeout=30)
        yield Leaving(server, clients, grads)


@pytest.fixture(params=["local", "remote"])
def ps(request: pytest.FixtureRequest) -> Iterator[fastps.ParameterServer]:
    """The same verbs, in process and over three shards."""
    if request.param == "local":
        with fastps.Store() as store:
            yield store
        return
    server = request.getfixturevalue("server")
    with fastps.connect(server.addresses, timeout=20.0) as client:
        yield client


class Ca:
    """A CA, and files with certificates of it: keyword arguments of `fastps.serve` and `fastps.connect`."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.file = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, name: str, *hosts: str, valid: tuple[float, float] | None = None) -> dict[str, str]:
        """A certificate for these hosts, and its key. `valid`: from and until, in seconds from now."""
        now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
        begin, end = (now + datetime.timedelta(seconds=offset) for offset in valid) if valid else (None, None)
        issued = self._ca.issue_cert(*hosts, not_before=begin, not_after=end)
        files = {
            "tls_cert": str(self._folder / f"{name}.pem"),
            "tls_key": str(self._folder / f"{name}-key.pem"),
        }
        issued.cert_chain_pems[0].write_to_path(files["tls_cert"])
        issued.private_key_pem.write_to_path(files["tls_key"])
        Path(files["tls_key"]).chmod(0o600)
        return files

    @property
    def trust(self) -> dict[str, str]:
        """Options of a client."""
        return {"tls_ca": self.file}

    @property
    def mutual(self) -> dict[str, str]:
        """Options of a server on this machine that asks clients for certificates, which may train."""
        return self.server | self.trust | {"certificate_role": "worker"}

    @property
    def server(self) -> dict[str, str]:
        """For this machine."""
        return self.issue("server", "127.0.0.1", "localhost")

    @property
    def client(self) -> dict[str, str]:
        """Options of a client where clients are asked for certificates."""
        return self.trust | self.issue("client", "worker")


@pytest.fixture
def ca(tmp_path: Path) -> Ca:
    return Ca(tmp_path)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(fastps=fastps, np=np)
