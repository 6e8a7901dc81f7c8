"""How workers affect each other: versions beside a slow worker, and the loss if some die, pause or join late.

These are parts of `training.py`. All workers are processes, and the server is another one.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

import numpy as np
from harness import table
from processes import Child, server_process

import fastps
from fastps.commands.kit import net

HIDDEN, BATCH, LR = 64, 128, 0.05
WORKERS, VERSIONS, PACE = 3, 10_000, 0.02
PAUSE = 60.0
SMALL = {"w": np.zeros(1000, np.float32)}


def paced(pipe: Connection, address: str, mode: fastps.modes.Mode, seconds: float) -> None:
    """Takes steps whose gradients take a given time each, until it receives a request to end."""
    with fastps.connect(address, timeout=60.0) as ps, fastps.Worker(ps, SMALL, mode=mode) as worker:
        pipe.send("ready")
        while not pipe.poll():
            time.sleep(seconds)
            worker.step(SMALL)


def versions_a_second(mode: fastps.modes.Mode, seconds: float) -> float:
    """Of five workers, one of which takes ten times as long for its gradients."""
    with server_process() as address, fastps.connect(address) as ps:
        ps.register("w", SMALL["w"], optimizer=fastps.SGD(lr=1.0))
        workers = [Child(paced, address, mode, pace) for pace in (10 * PACE, PACE, PACE, PACE, PACE)]
        for worker in workers:
            worker.pipe.recv()
        time.sleep(1.0)
        began, first = time.perf_counter(), ps.versions(["w"])["w"]
        time.sleep(seconds)
        made = (ps.versions(["w"])["w"] - first) / (time.perf_counter() - began)
        for worker in workers:
            worker.pipe.send(None)
        for worker in workers:
            worker.close()
    return made


def backup(seconds: float) -> list[str]:
    """Gain from a backup worker."""
    all_five = versions_a_second(fastps.Sync(workers=5), seconds)
    first_four = versions_a_second(fastps.Sync(workers=4, backup=1), seconds)
    rows = [
        ["`Sync(workers=5)`", f"{all_five:.1f}", "1"],
        ["`Sync(workers=4, backup=1)`", f"{first_four:.1f}", f"{first_four / all_five:.2f}"],
    ]
    title = f"Five workers, {1e3 * PACE:.0f} ms for a gradient, one of them {1e4 * PACE:.0f} ms:"
    return [title, "", *table(["mode", "versions/s", "to all five"], rows)]


def train(pipe: Connection, address: str, folder: str, index: int) -> None:
    """Trains on MNIST with others, until there are as many versions as wanted."""
    mnist = fastps.data.mnist(folder)
    x, y = mnist.share(index % WORKERS, WORKERS, 0)
    rng = np.random.default_rng(index)
    with fastps.connect(address, timeout=2 * PAUSE) as ps:
        like = {name: np.empty(ps.spec(name).shape, np.float32) for name in net.NAMES}
        with fastps.Worker(ps, like, mode=fastps.Async()) as worker:
            pipe.send("ready")
            while ps.versions(["b2"])["b2"] < VERSIONS:
                time.sleep(PACE)
                rows = rng.integers(0, len(y), BATCH)
                _, gradients = net.loss_and_grads(worker.params, x[rows], y[rows])
                try:
                    worker.step(gradients)
                except fastps.LeaseError:  # it was stopped; it has new values now
                    continue
    pipe.send("done")


def trained(folder: str, disturbed: bool) -> tuple[float, float]:
    """Loss on the training images after a run, and its seconds."""
    mnist = fastps.data.mnist(folder)
    start = net.init_params(mnist.inputs, HIDDEN, 10, np.random.default_rng(0))
    with server_process() as address, fastps.connect(address) as ps:
        for name, values in start.items():
            ps.register(name, np.asarray(values), optimizer=fastps.SGD(lr=LR))
        workers = [Child(train, address, folder, k) for k in range(WORKERS)]
        for worker in workers:
            worker.pipe.recv()
        began = time.perf_counter()
        if disturbed:
            time.sleep(5)
            workers.pop(0).close()  # killed
            os.kill(workers[0].pid, signal.SIGSTOP)
            time.sleep(5)
            workers.append(Child(train, address, folder, WORKERS))
            workers[-1].pipe.recv()
            time.sleep(PAUSE - 5)
            os.kill(workers[0].pid, signal.SIGCONT)
        for worker in workers:
            worker.pipe.recv()
        seconds = time.perf_counter() - began
        params = {name: ps.pull(name) for name in net.NAMES}
        for worker in workers:
            worker.close()
    return net.evaluate(params, mnist.train_x, mnist.train_y)[0], seconds


def faults(folder: str) -> list[str]:
    """Effect of workers' faults on the loss."""
    undisturbed, with_faults = trained(folder, disturbed=False), trained(folder, disturbed=True)
    rows = [
        [f"{WORKERS} workers", f"{undisturbed[0]:.4f}", "1", f"{undisturbed[1]:.0f}"],
        [
            f"one killed, one stopped for {PAUSE:.0f} s, one late",
            f"{with_faults[0]:.4f}",
            f"{with_faults[0] / undisturbed[0]:.3f}",
            f"{with_faults[1]:.0f}",
        ],
    ]
    title = f"MNIST, {HIDDEN} hidden units, `Async()`, {VERSIONS:,} versions of {BATCH} images:"
    return [title, "", *table(["", "loss", "to undisturbed", "seconds"], rows)]
