"""``fastps status`` shows a slow worker, a silent one, a missing shard and a broken log."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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


def until(capfd: pytest.CaptureFixture[str], addresses: str, seen: Callable[[list[str]], bool]) -> list[str]:
    """Waits until the lines of the status have something; returns them."""
    deadline = time.monotonic() + 60
    while not seen(lines := status(capfd, addresses)[1].splitlines()):
        assert time.monotonic() < deadline, lines
        time.sleep(0.2)
    return lines


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

            def only_the_slow_one(lines: list[str]) -> bool:
                warnings = [line for line in lines if line.startswith("warning: ")]
                return "; 8 workers, " in lines[0] and [" is slow: " in line for line in warnings] == [True]

            lines = until(capfd, server.addresses, only_the_slow_one)
            assert len(lines) <= 24, lines
            assert lines[0].startswith("4 shards serving, version ")
            assert "; 8 workers, 9 other clients" in lines[0]  # each worker is a client beside its connection
            [slow] = [line for line in lines if line.startswith("trainer 7")]
            assert slow.endswith("slow")
            assert "warning: worker trainer 7" in lines[-1]
            workers[2].send_signal(signal.SIGSTOP)
            silent = "warning: worker trainer 2"
            lines = until(
                capfd, server.addresses, lambda lines: any(line.startswith(silent) for line in lines)
            )
            assert any("is silent for" in line for line in lines)
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


def test_a_late_or_dead_shard_costs_the_asker_seconds(capfd: pytest.CaptureFixture[str]) -> None:
    """`ls` shows what shard 0 knows; `rm` frees all or nothing."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    command = [*FASTPS, "serve", "--web", "off", "--cluster", ",".join(addresses), "--listen"]
    servers = [
        subprocess.Popen([*command, address], stdout=subprocess.PIPE, text=True) for address in addresses
    ]

    def asked(*command: str) -> tuple[int, str, str]:
        begun = time.monotonic()
        code = main([command[0], addresses[0], *command[1:]])
        assert time.monotonic() - begun < 15, command
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    try:
        for server in servers:
            assert server.stdout is not None
            assert "listening" in server.stdout.readline()
        with fastps.connect(addresses[0], namespace="a") as ps:
            ps.register("here", ZEROS, fastps.SGD())
            ps.register("weight", np.zeros(600_000, np.float32), fastps.SGD())
        code, text, _ = asked("ls")
        assert code == 0
        assert re.search(r"^a +weight +600000 +float32 +SGD +1 +2,400,000 +\d+ s ago$", text, re.MULTILINE)
        for stop, state in ((signal.SIGSTOP, "late"), (signal.SIGKILL, "no answer")):
            servers[1].send_signal(stop)
            code, text, warned = asked("ls")
            assert code == 1
            assert re.search(r"^a +weight +600000 +float32 +SGD +- +2,400,000 +-$", text, re.MULTILINE)
            assert re.search(r"^a +here .* 1 +400 +\d+ s ago$", text, re.MULTILINE)
            missing = f"warning: shard 1 at {addresses[1]} does not answer: "
            assert missing in warned
            code, text, warned = asked("rm", "--namespace", "a")
            assert (code, text) == (1, "")
            assert missing in warned
            assert "nothing was freed" in warned
            found = json.loads(asked("status", "--json")[1])
            assert [shard["state"] for shard in found["shards"]] == ["serving", state]
        servers[0].send_signal(signal.SIGSTOP)
        code, text, warned = asked("ls", "--timeout", "1")
        assert (code, text) == (1, "")
        assert f"cannot connect to {addresses[0]}: no answer within the timeout" in warned
    finally:
        for server in servers:
            server.kill()
            server.communicate(timeout=60)


def test_a_log_that_cannot_be_written_is_seen(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fastps.serve(data_dir=tmp_path / "data") as server, fastps.connect(server.addresses) as ps:
        ps.register("w", ZEROS, fastps.SGD(lr=0.1))
        (tmp_path / "data").rename(tmp_path / "elsewhere")
        ps.push("w", ZEROS)
        lines = until(capfd, server.addresses, lambda lines: lines[-1].startswith("warning: "))
        assert "not durable" in lines[2]
        assert lines[-1].startswith("warning: shard 0 at")
        assert "full disk" in lines[-1]
        (tmp_path / "elsewhere").rename(tmp_path / "data")
