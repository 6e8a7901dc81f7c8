"""The log of a server whose reader stops: a terminal after Ctrl-S, a pipe of a program that is busy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
