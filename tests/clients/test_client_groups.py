"""A worker of another language and a Python worker in one group; one of them is killed."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import fastps
from clients.driver import PATIENT, Driver, packed
from faults.shards import Shards

N = 600_000
ONES = np.ones(N, np.float32)

PYTHON_WORKER = """
import sys, numpy as np, fastps
with fastps.connect(sys.argv[1]) as ps:
    params = {"w": np.zeros(int(sys.argv[2]), np.float32)}
    with fastps.Worker(ps, params, mode=fastps.Sync(workers=2)) as worker:
        while True:
            print("step", flush=True)
            worker.step({"w": np.ones_like(params["w"])})
"""


def step(driver: Driver) -> None:
    """Begins a step of the driver; `receive` ends it."""
    driver.do("pull", tensors=["w"], keep="v")
    driver.send("push", gradients=[{"tensor": "w", "values": packed(3 * ONES)}], based_on="v")


def test_sync_with_a_python_worker_and_the_driver_is_killed(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters("--lease-ms", "1000")
    driver = drivers(cluster.addresses)
    params = {"w": np.zeros(N, np.float32)}
    with fastps.connect(",".join(cluster.addresses)) as ps:
        ps.register("w", params["w"], optimizer=fastps.SGD(lr=1.0))
        with fastps.Worker(ps, params, mode=fastps.Sync(workers=2)) as worker:
            driver.do("join", group="default", mode="sync", workers=2)
            for _ in range(3):
                step(driver)
                worker.step({"w": ONES})
                assert driver.receive()["receipts"]["w"]["Scale"] == 0.5
            assert (ps.pull("w") == -6).all()  # three steps with the mean of 1 and 3
            step(driver)
            driver.kill()
            while (ps.pull("w") == -6).any():  # the last push of the driver may count
                worker.step({"w": ONES})
            worker.step({"w": ONES})
            # A push is atomic per slice, and that last one may have reached one shard only.
            assert np.isin(-ps.pull("w"), (8, 9)).all()


def test_sync_with_a_python_worker_that_is_killed(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters("--lease-ms", "1000")
    driver = drivers(cluster.addresses)
    driver.register("w", np.zeros(N), lr=1.0)
    driver.do("join", group="default", mode="sync", workers=2)
    command = [sys.executable, "-c", PYTHON_WORKER, ",".join(cluster.addresses), str(N)]
    python = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert python.stdout is not None
        assert python.stdout.readline() == "step\n"
        for _ in range(3):
            step(driver)
            assert driver.receive()["receipts"]["w"]["Scale"] == 0.5
        python.send_signal(signal.SIGKILL)
        python.wait(PATIENT)
        scales = []
        while 1.0 not in scales[-2:]:
            step(driver)
            answer = driver.receive()
            if "error" not in answer:
                scales.append(answer["receipts"]["w"]["Scale"])
            assert len(scales) < 10, scales
    finally:
        python.kill()
        python.wait(PATIENT)
        python.stdout.close()


def test_bounded_with_a_python_worker(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters()
    driver = drivers(cluster.addresses)
    params = {"w": np.zeros(10, np.float32)}
    with fastps.connect(",".join(cluster.addresses)) as ps:
        ps.register("w", params["w"], optimizer=fastps.SGD(lr=1.0))
        with fastps.Worker(ps, params, mode=fastps.Bounded(staleness=1)) as worker:
            driver.do("join", group="default", mode="bounded", staleness=1)
            driver.do("advance", group="default")
            error = driver.refused("advance", group="default", timeout_ms=500)
            assert (error["kind"], error["deadline"]) == ("deadline", True), error
            driver.send("push", gradients=[{"tensor": "w", "values": packed(np.ones(10))}])
            driver.receive()
            worker.step({"w": np.ones(10, np.float32)})
            worker.step({"w": np.ones(10, np.float32)})
            driver.do("advance", group="default")
            driver.do("leave", group="default")
        assert (ps.pull("w") == -3).all()


def test_a_worker_is_seen_with_its_steps(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters()
    driver = drivers(cluster.addresses)
    driver.register("w", np.zeros(10))
    driver.do("join", group="default", mode="bounded", staleness=1, rank=3)

    def train(loss: float) -> None:
        driver.do("pull", tensors=["w"], keep="v")
        gradients = [{"tensor": "w", "values": packed(np.ones(10))}]
        driver.do("push", gradients=gradients, based_on="v", codec="int8", loss=loss)
        driver.do("advance", group="default")

    name = f"pid {driver.process.pid}"
    with fastps.connect(cluster.addresses[0]) as ps:

        def reported(steps: int) -> dict[str, Any]:
            deadline = time.monotonic() + PATIENT
            while time.monotonic() < deadline:
                (session,) = (one for one in ps.stats()["workers"] if one["name"] == name)
                if session["report"] and session["report"]["steps"] == steps:
                    report: dict[str, Any] = session["report"]
                    return report
                time.sleep(0.1)
            raise AssertionError(f"no report of step {steps}")

        train(0.5)
        reported(1)
        train(0.25)
        driver.refused("push", gradients=[{"tensor": "w", "values": packed(np.full(10, np.nan))}])
        train(0.125)
        report = reported(3)
    fixed = {"rank": 3, "pushes": 3, "bytes": 33, "rejected": 1, "loss": 0.125, "mode": "Bounded"}
    fixed |= {"codec": "Int8", "staleness_p50": 0, "staleness_p99": 0, "host": platform.node()}
    assert {name: report[name] for name in fixed} == fixed
    assert report["step_seconds"] > 0
    assert 0 <= report["waited"] <= 1
