"""``fastps status`` shows a slow worker, a silent one, a missing shard and a broken log."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main
from fastps.commands.kit.servers import free_ports

ZEROS = np.zeros(100, np.float32)
FASTPS = [sys.executable, "-m", "fastps"]

WORKER = """
import sys, time
import numpy as np
import fastps
addresses, name, rank, pause = sys.argv[1:]
with fastps.connect(addresses) as ps:
    params = {"w": np.zeros(100, np.float32)}
    with fastps.Worker(ps, params, fastps.Async(), rank=int(rank), name=name) as worker:
        while True:
            worker.step({"w": np.full(100, 1e-3, np.float32)}, loss=0.5)
            time.sleep(float(pause))
"""


def status(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["status", *arguments])
    return code, capfd.readouterr().out


def until(capfd: pytest.CaptureFixture[str], addresses: str, seen: Callable[[dict[str, Any]], bool]) -> str:
    """Waits until the status has something; returns it as text."""
    deadline = time.monotonic() + 60
    while not seen(json.loads(status(capfd, addresses, "--json")[1])):
        assert time.monotonic() < deadline, status(capfd, addresses, "--all")[1]
        time.sleep(0.2)
    return status(capfd, addresses)[1]


def test_a_slow_worker_and_a_silent_one_are_seen_in_24_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with fastps.serve(shards=4) as server, fastps.connect(server.addresses) as ps:
        ps.register("w", ZEROS, fastps.SGD(lr=0.1))
        script = [sys.executable, "-c", WORKER, server.addresses]
        pauses = [0.02] * 7 + [1.0]
        workers = [
            subprocess.Popen([*script, f"trainer {rank}", str(rank), str(pause)])
            for rank, pause in enumerate(pauses)
        ]
        try:

            def all_there(found: dict[str, Any]) -> bool:
                reports = [one["report"] for one in found["workers"] if one["report"]]
                return len(reports) == 8 and any("is slow" in line for line in found["warnings"])

            text = until(capfd, server.addresses, all_there)
            lines = text.splitlines()
            assert len(lines) <= 24, text
            assert lines[0].startswith("4 shards serving, version ")
            assert "; 8 workers, 9 other clients" in lines[0]  # each worker is a client beside its connection
            [slow] = [line for line in lines if line.startswith("trainer 7")]
            assert slow.endswith("slow")
            [warning] = [line for line in lines if line.startswith("warning: ")]
            assert "worker trainer 7" in warning
            workers[2].send_signal(signal.SIGSTOP)
            silent = "worker trainer 2"
            text = until(
                capfd, server.addresses, lambda found: any(silent in line for line in found["warnings"])
            )
            assert "silent" in text
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.wait(timeout=60)


def test_a_missing_shard_is_named_and_the_others_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    command = [*FASTPS, "serve", "--web", "off", "--listen"]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    cluster = ["--cluster", ",".join(addresses)]
    servers = [
        subprocess.Popen([*command, address, *cluster], stdout=subprocess.PIPE, text=True)
        for address in addresses
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert "listening" in server.stdout.readline()
        assert status(capfd, ",".join(addresses))[0] == 0
        servers[1].kill()
        servers[1].wait(timeout=60)
        code, text = status(capfd, addresses[0])
        assert code == 1
        assert text.startswith("1 of 2 shards does not answer")
        assert f"warning: shard 1 at {addresses[1]} does not answer" in text
        assert f"0      {addresses[0]}  serving" in text
        found = json.loads(status(capfd, addresses[0], "--json")[1])
        assert [shard["state"] for shard in found["shards"]] == ["serving", "no answer"]
        assert found["shards"][0]["counters"]["slices"] == 0
        servers[0].kill()
        servers[0].wait(timeout=60)
        assert main(["status", ",".join(addresses), "--timeout", "1"]) == 1
        refused = capfd.readouterr().err
        assert all(address in refused for address in addresses)
    finally:
        for server in servers:
            server.kill()
            server.communicate(timeout=60)


def test_a_log_that_cannot_be_written_is_seen(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fastps.serve(data_dir=tmp_path / "data") as server, fastps.connect(server.addresses) as ps:
        ps.register("w", ZEROS, fastps.SGD(lr=0.1))
        (tmp_path / "data").rename(tmp_path / "elsewhere")
        ps.push("w", ZEROS)
        text = until(capfd, server.addresses, lambda found: bool(found["warnings"]))
        assert "not durable" in text.splitlines()[2]
        assert "warning: shard 0 at" in text
        assert "full disk" in text
        (tmp_path / "elsewhere").rename(tmp_path / "data")
