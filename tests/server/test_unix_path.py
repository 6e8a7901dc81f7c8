"""Servers that clients reach only by the path of their Unix socket."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import fastps
import grpc
from fastps.commands.cli import main

SLICES = 600_001
NOWHERE = "nowhere.invalid"
"""Host that servers advertise, so that clients find them only by their paths."""
OTHER_USER = """
import os, sys, fastps
os.setgid(65534)
os.setuid(65534)
with fastps.serve(listen_unix=sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def child(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def serving(path: Path):
    """`fastps serve` in its own process."""
    return child("-m", "fastps", "serve", "--listen", "127.0.0.1:0", "--listen-unix", str(path))


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


@pytest.mark.parametrize("transport", ["unix", "shm", None])
def test_a_path_reaches_all_of_a_server(tmp_path: Path, transport):
    paths = [tmp_path / name for name in ("a", "b")]
    addresses = [f"unix://{path}" for path in paths]
    with (
        fastps.serve(shards=2, listen_unix=paths, advertise=NOWHERE),
        fastps.connect(",".join(reversed(addresses)), transport=transport) as ps,
    ):
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
        ps.register("w", np.zeros(SLICES, np.float32), optimizer=fastps.SGD(lr=1.0))
        gradient = -np.arange(SLICES, dtype=np.float32)
        for step in range(1, 4):
            pushed = ps.push_pull({"w": gradient})
            np.testing.assert_array_equal(pushed.values["w"], -step * gradient)
        assert ps.spec("w").shape == (SLICES,)
        assert len(ps.stats()["shards"]) == 2
        best = "shm" if sys.platform == "linux" else "unix"
        assert {way.split(":")[0] for way in ps.transport.values()} == {transport or best}
        assert list(ps.transport) == addresses
        np.testing.assert_array_equal(ps.another().pull("w"), -3 * gradient)
    assert not any(path.exists() for path in paths)


def test_what_a_killed_server_left_is_replaced_and_a_live_one_is_not(tmp_path: Path):
    path = tmp_path / "socket"
    with serving(path) as process:
        assert line(process).startswith("fastps: shard 0 listening on 127.0.0.1:")
        assert line(process) == f"fastps: shard 0 listening on unix://{path}\n"
        with fastps.connect(f"unix://{path}") as ps:
            ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
        with pytest.raises(fastps.ConfigError, match="listens there"):
            fastps.serve(listen_unix=path)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert path.exists()
    with fastps.serve(listen_unix=path), fastps.connect(f"unix://{path}") as ps:
        assert ps.names() == []
    assert not path.exists()


def test_the_command_line(tmp_path: Path, capfd):
    path = tmp_path / "socket"
    with serving(path) as process:
        line(process), line(process)
        assert main(["status", f"unix://{path}"]) == 0
        assert f"unix://{path}" in capfd.readouterr().out
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not path.exists()


def test_a_grpc_client_uses_the_path_too(tmp_path: Path):
    path = tmp_path / "socket"
    # By itself it names the path as the authority, which is none (RFC 3986, 3.2).
    options = [("grpc.default_authority", "localhost")]
    with fastps.serve(listen_unix=str(path)), grpc.insecure_channel(f"unix://{path}", options) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=20) == b"\x08\x01"


def test_a_path_that_leads_nowhere_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("text")
    for name in ("missing", "no/folder", "file"):
        begin = time.monotonic()
        with pytest.raises(fastps.ConnectionLostError, match=name):
            fastps.connect(f"unix://{tmp_path}/{name}", timeout=0.3)
        assert time.monotonic() - begin < 20


def test_an_address_that_cannot_be_is_refused(tmp_path: Path):
    for address, words in [
        (f"unix:///{'x' * 120}", "107 bytes"),
        ("unix://relative", "unix:///path"),
        ("unix:/one/slash", "unix:///path"),
        ("unix://", "unix:///path"),
    ]:
        with pytest.raises(fastps.ConfigError, match=words):
            fastps.connect(address)
    with pytest.raises(fastps.ConfigError, match="not reached over TCP"):
        fastps.connect(f"unix://{tmp_path}/a", transport="tcp")
    for paths, words in [(["a", "b"], "1 paths"), ([f"{tmp_path}/{'x' * 120}"], "107 bytes")]:
        with pytest.raises(fastps.ConfigError, match=words):
            fastps.serve(listen_unix=paths)


def test_another_users_socket_is_not_used(tmp_path: Path):
    if os.geteuid() == 0:
        tmp_path.chmod(0o777)
        for folder in tmp_path.parents[:-2]:
            folder.chmod(folder.stat().st_mode | 0o011)
        path = tmp_path / "socket"
        with child("-c", OTHER_USER, str(path)) as process:
            assert line(process) == "ready\n"
            with pytest.raises(fastps.PermissionDeniedError, match="the peer is user 65534"):
                fastps.connect(f"unix://{path}")
        return
    closed = tmp_path / "closed"
    closed.mkdir()
    with fastps.serve(listen_unix=closed / "socket"):
        closed.chmod(0)
        try:
            with pytest.raises(fastps.PermissionDeniedError, match="Permission denied"):
                fastps.connect(f"unix://{closed}/socket")
        finally:
            closed.chmod(0o700)
