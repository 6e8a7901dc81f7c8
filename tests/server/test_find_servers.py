"""How clients find servers without an address, ones that start later, and tensors that others register."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.kit.servers import free_ports

ZEROS = np.zeros(3, np.float32)
SGD = fastps.SGD(lr=1.0)
FASTPS = [sys.executable, "-m", "fastps"]


@contextmanager
def serving(*options: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process, and its second line."""
    pipe = subprocess.PIPE
    command = [*FASTPS, "serve", "--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **env})
    try:
        assert process.stdout is not None
        assert "listening on" in process.stdout.readline()
        yield process, process.stdout.readline()
    finally:
        process.terminate()
        process.communicate(timeout=60)


# -- without an address --------------------------------------------------------------------------------------


def test_the_environment_says_where_servers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with fastps.serve(shards=2) as server:
        monkeypatch.setenv("FASTPS_ADDRESSES", server.addresses)
        with fastps.connect() as ps, fastps.connect(None) as other:
            ps.register("w", ZEROS, SGD)
            assert other.names() == ["w"]
            assert sorted(ps.transport) == sorted(server.address_list)
            monkeypatch.setenv("FASTPS_ADDRESSES", f"127.0.0.1:{free_ports(1)[0]}")
            assert pickle.loads(pickle.dumps(ps)).names() == ["w"]  # it keeps its servers
            for command in ("ls", "status"):
                ran = subprocess.run(
                    [*FASTPS, command],
                    env={**os.environ, "FASTPS_ADDRESSES": server.addresses},
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("value", [None, "", " "], ids=repr)
def test_the_default_address_is_that_of_fastps_serve(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """In a separate network, nothing else has this port; elsewhere the test is skipped if something has."""
    monkeypatch.delenv("FASTPS_ADDRESSES", raising=False)
    if value is not None:
        monkeypatch.setenv("FASTPS_ADDRESSES", value)
    try:
        server = fastps.serve(listen="127.0.0.1:7070")
    except fastps.ConfigError:
        pytest.skip("port 7070 is in use")
    with server, fastps.connect() as ps:
        assert list(ps.transport) == ["127.0.0.1:7070"]


@pytest.mark.parametrize("command", [["status"], ["ls"], ["rm", "--namespace", "a"], ["checkpoint", "save"]])
def test_an_error_says_where_the_address_is_from(command: list[str]) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    ran = subprocess.run(
        [*FASTPS, *command, "--timeout", "0.3"],
        env={**os.environ, "FASTPS_ADDRESSES": address},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert f"cannot connect to {address}: " in ran.stderr
    assert f"({address} is the value of FASTPS_ADDRESSES, since no address is given)" in ran.stderr


def test_the_error_of_connect_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPS_ADDRESSES", "host-without-port")
    with pytest.raises(fastps.ConfigError, match="is the value of FASTPS_ADDRESSES") as refused:
        fastps.connect()
    assert refused.value.expected == "host:port or unix:///path"


# -- servers and tensors that come later ---------------------------------------------------------------------


def test_connect_waits_for_servers_that_start_later(caplog: pytest.LogCaptureFixture) -> None:
    port = free_ports(1)[0]
    started: list[fastps.Server] = []

    def start() -> None:
        while not any("waiting for the server" in one.getMessage() for one in caplog.records):
            time.sleep(0.02)  # at least for a second, so for longer than `timeout`
        started.append(fastps.serve(listen=f"127.0.0.1:{port}"))

    thread = threading.Thread(target=start)
    thread.start()
    with fastps.connect(port, timeout=0.5, wait=60) as ps:
        thread.join()
        missing = (fastps.UnknownTensorError, fastps.DeadlineError)
        with pytest.raises(missing, match=r"within 0\.5 s|the deadline passed"):  # of `timeout`, not `wait`
            ps.wait_for("w")
    started[0].stop()


def test_it_waits_no_longer_than_asked() -> None:
    with pytest.raises(fastps.ConnectionLostError):
        fastps.connect(free_ports(1)[0], timeout=10_000, wait=0.3)
    for wrong in (-1.0, "soon"):
        with pytest.raises(fastps.ConfigError):
            fastps.connect(free_ports(1)[0], wait=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("remote", [False, True], ids=["store", "servers"])
def test_a_worker_waits_for_what_another_one_registers(remote: bool) -> None:
    with fastps.serve(shards=2) as server, fastps.connect(server) as ps, fastps.connect(server) as other:
        if not remote:
            ps = other = fastps.Store()  # type: ignore[assignment]

        def register() -> None:
            for name in ("a", "b"):
                time.sleep(0.3)
                other.register(name, ZEROS, SGD)

        thread = threading.Thread(target=register)
        thread.start()
        ps.wait_for(iter(["b", "a"]), timeout=60)
        assert ps.names() == ["a", "b"]
        thread.join()
        ps.wait_for("a")
        ps.wait_for([])
        with pytest.raises(fastps.UnknownTensorError, match=r'has registered "c", "d" within 3 s') as missing:
            ps.wait_for(["d", "a", "c"], timeout=3)
        assert missing.value.tensor == "c"


# -- names and the first lines -------------------------------------------------------------------------------


def test_the_log_of_a_server_has_the_name_of_a_client() -> None:
    with serving(FASTPS_LOG="info", NO_COLOR="1") as (process, line):
        address = line.split()[-1]
        with fastps.connect(address, name="rank 7"):
            assert process.stderr is not None
            joined = next(line for line in process.stderr if "a client joined" in line)
        assert 'client="rank 7"' in joined
        with pytest.raises(fastps.ConfigError, match=r"name is too long .*expected at most 256 bytes"):
            fastps.connect(address, name="x" * 257)


def test_a_server_says_what_it_keeps_and_how_much_memory_it_may_use(tmp_path: Path) -> None:
    with serving() as (_, line):
        assert line.startswith(
            f"fastps: version {fastps.__version__}; in memory: a restart loses everything; "
        )
        assert re.search(
            r"; no TLS; memory limit [\d.]+ .iB \(80 % of [\d.]+ .iB, according to /\S+\); at ", line
        )
        assert re.search(r"; at 127\.0\.0\.1:\d+$", line)
    with serving("--data-dir", str(tmp_path / "data"), "--memory-limit", "64MiB") as (_, line):
        assert f"; data in {tmp_path / 'data'}; no TLS; memory limit 64.0 MiB (as configured); at" in line


def test_a_server_serves_although_the_reader_of_its_first_lines_has_left() -> None:
    """As behind ``| head -1``: the pipe is closed before the server prints."""
    port = free_ports(1)[0]
    command = [sys.executable, "-P", "-m", "fastps", "serve", "--listen", f"127.0.0.1:{port}"]
    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen(command, stdout=write) as server:
        os.close(write)
        try:
            with fastps.connect(port, wait=60) as ps:
                assert ps.names() == []
        finally:
            server.terminate()
        assert server.wait(60) == 0


@pytest.mark.parametrize("wait", [-1, float("nan"), float("inf"), "5"])
def test_a_wait_that_is_no_time_is_refused_by_its_name(wait: object) -> None:
    with pytest.raises(fastps.ConfigError, match="invalid wait"):
        fastps.connect(free_ports(1)[0], wait=wait)  # type: ignore[arg-type]


def test_a_pickled_client_names_the_host_of_its_loopback_server(tmp_path: Path) -> None:
    with fastps.serve() as server, fastps.connect(server.addresses, timeout=1) as ps:
        (tmp_path / "ps").write_bytes(pickle.dumps(ps))
    script = f"""
import pickle, traceback
ps = pickle.loads(open({str(tmp_path / "ps")!r}, "rb").read())
try:
    ps.names()
except Exception:
    traceback.print_exc()
"""
    here = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "ConnectionLostError" in here.stderr
    assert "pickled" not in here.stderr
    command = [
        "unshare",
        "--uts",
        "sh",
        "-c",
        'hostname other-host; exec "$@"',
        "-",
        sys.executable,
        "-c",
        script,
    ]
    there = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "ConnectionLostError" not in there.stderr:
        pytest.skip(f"another host name needs a namespace: {there.stderr.strip()}")
    assert f"pickled on host {socket.gethostname()}, and this is other-host" in there.stderr
    assert "--listen HOST:PORT" in there.stderr
