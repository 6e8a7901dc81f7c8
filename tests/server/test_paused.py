"""A worker that was stopped for longer than its lease is told what to do."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
from served import serving

import fastps

LATE = 60.0
ZEROS = {"w": np.zeros(200, np.float32), "b": np.zeros(3, np.float32)}

#: Takes steps, one for each line that it reads, and prints what became of it.
WORKER = """
import sys, numpy as np, fastps
with fastps.connect(sys.argv[1]) as ps:
    zeros = {"w": np.zeros(200, np.float32), "b": np.zeros(3, np.float32)}
    with fastps.Worker(ps, zeros, fastps.Async(), name="paused") as worker:
        print("joined", flush=True)
        for _ in sys.stdin:
            try:
                worker.step({name: values + 1 for name, values in zeros.items()})
                print("stepped", flush=True)
            except fastps.LeaseError as error:
                print(error, flush=True)
"""


def register(ps):
    for name, values in ZEROS.items():
        ps.register(name, values, optimizer=fastps.SGD(lr=1.0))


def until(true):
    end = time.monotonic() + LATE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_worker_that_was_paused_is_told_what_to_do():
    with serving("--lease-ms", "1000", web="off") as server:
        (address,) = server.addresses
        with fastps.connect(address) as ps:
            register(ps)
            worker = subprocess.Popen(
                [sys.executable, "-c", WORKER, address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert worker.stdout.readline() == "joined\n"
                worker.send_signal(signal.SIGSTOP)
                until(lambda: ps.stats()["shards"][0]["counters"]["workers"] == 0)
                worker.stdin.write("\n")
                worker.stdin.flush()
                worker.send_signal(signal.SIGCONT)
                told = worker.stdout.readline()
                if told != "stepped\n":  # its client had not found out yet
                    assert "silent for longer than its lease" in told
                    assert "fastps run --restart 1" in told
                    assert "--lease-ms" in told
            finally:
                worker.kill()
                worker.communicate(timeout=LATE)
