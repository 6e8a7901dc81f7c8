"""The log of a server: whom it serves, and a reader that stops (a terminal after Ctrl-S, a busy program)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import fastps


@pytest.mark.timeout(180)
def test_a_log_that_nobody_reads_stops_nothing() -> None:
    """Far more lines than a pipe holds are written; the server serves, and obeys SIGTERM."""
    command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0"]
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"FASTPS_LOG": "trace"}
    )
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        address = server.stdout.readline().split()[-1]
        gradient = np.ones(100_000, np.float32)
        with fastps.connect(address, timeout=60.0, transport="tcp") as ps:
            ps.register("w", np.zeros(100_000, np.float32), fastps.SGD(lr=1.0))
            for _ in range(200):
                ps.push("w", gradient)
            assert (ps.pull("w") == -200).all()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        held = server.stderr.read()
        assert len(held) > 32_000, "the log was too short to fill the pipe"
    finally:
        server.kill()
        server.communicate()


ZEROS = np.zeros(10, np.float32)
#: A worker that is killed: its process ends without a word.
KILLED = """
import os, sys
import fastps, numpy as np
ps = fastps.connect(sys.argv[1])
worker = fastps.Worker(ps, {"w": np.zeros(10, np.float32)}, mode=fastps.Async(), name="the killed one")
os._exit(0)
"""


@contextmanager
def logging_server(log: Path) -> Iterator[str]:
    """A server in a process of its own; its address."""
    command = [sys.executable, "-m", "fastps", "serve", "--listen", "127.0.0.1:0", "--lease-ms", "2000"]
    with log.open("w") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
    finally:
        server.kill()
        server.communicate()


def await_line(log: Path, *words: str) -> str:
    """Waits for a line with these words."""
    deadline = time.monotonic() + 60
    while True:
        for line in log.read_text().splitlines():
            if all(word in line for word in words):
                return line
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_who_comes_and_goes_is_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with logging_server(log) as address, fastps.connect(address, transport="tcp") as ps:
        ps.register("w", ZEROS, fastps.SGD(lr=1.0))
        await_line(log, "INFO", "a client joined", f"pid {os.getpid()}")
        with fastps.Worker(ps, {"w": ZEROS}, mode=fastps.Async(), name="the tidy one") as worker:
            worker.step({"w": ZEROS})
            await_line(log, "INFO", "a worker joined its group", "the tidy one", "Async")
            with pytest.raises(fastps.ConfigError, match="another mode"):
                fastps.Worker(ps, {"w": ZEROS}, mode=fastps.Sync(workers=1), name="the odd one")
            await_line(log, "WARN", "a worker is refused", "the odd one", "another mode")
        await_line(log, "INFO", "a worker left its group")
        await_line(log, "INFO", "the client closed its session")
        assert "lease ran out" not in log.read_text(), "a clean exit is no lost lease"
        subprocess.run([sys.executable, "-c", KILLED, address], check=True)
        await_line(log, "INFO", "a worker joined its group", "the killed one")
        await_line(log, "INFO", "the client's lease ran out")
        closed = ps.stats()["shards"][0]["counters"]["sessions_closed"]
        assert closed >= 1
