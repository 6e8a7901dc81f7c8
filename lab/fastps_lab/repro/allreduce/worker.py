"""A worker process: trains a net with servers, all-reduce or both; prints what it measured as JSON lines.

A step lasts at least `step_seconds`, asleep for what its own computation leaves: so several workers fit on
one core, and one may be slow. Worker 0 keeps its parameters now and then, and evaluates them at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

import fastps.torch
from fastps.commands.kit import watch_stdin
from fastps.data import Dataset
from fastps_lab.repro.allreduce.job import Job
from fastps_lab.repro.tasks import BATCH

__all__ = ["main"]

#: Seconds until an all-reduce without an answer fails.
PATIENCE = 120


def say(**event: Any) -> None:
    """Prints one JSON line."""
    print(json.dumps(event), flush=True)


def servers(job: Job, model: torch.nn.Module, rank: int) -> Callable[[], object]:
    """The step of a worker that uses only the servers."""
    ps = fastps.connect(job.addresses, wait=60)
    rule, mode = fastps.SGD(lr=job.lr), fastps.Async(momentum_matching=False)
    optimizer = fastps.torch.ParameterServerOptimizer(
        model.named_parameters(), ps, rule, mode=mode, rank=rank
    )
    return optimizer.step


def both(job: Job, model: torch.nn.Module, rank: int) -> Callable[[], object]:
    """The step of a worker that averages inside its machine; servers join the machines."""
    machine = rank // job.local
    _gloo(f"{job.meeting}-{machine}", rank % job.local, job.local)
    ps = fastps.connect(job.addresses, wait=60)
    rule, mode = fastps.SGD(lr=job.lr * job.local), fastps.Async(momentum_matching=False)
    optimizer = fastps.torch.Hierarchical(model, ps, rule, mode, rank=machine)
    return optimizer.step


def all_reduce(job: Job, model: torch.nn.Module, rank: int) -> Callable[[], object]:
    """The step of a worker that averages all gradients by gloo."""
    _gloo(job.meeting, rank, job.world)
    return _together(job, model, dist.all_reduce)


def mpi(job: Job, model: torch.nn.Module, _rank: int) -> Callable[[], object]:
    """The step of a worker that averages all gradients by MPI."""
    from mpi4py import MPI

    def add(flat: torch.Tensor) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())

    return _together(job, model, add)


ARMS = {"servers": servers, "all-reduce": all_reduce, "mpi": mpi, "both": both}


def meet(job: Job, rank: int) -> None:
    """Waits until every worker is ready: none may train while the clock of worker 0 has not begun."""
    store = dist.FileStore(f"{job.meeting}-begin", job.world)  # type: ignore[attr-defined]
    store.set(str(rank), "ready")
    store.wait([str(other) for other in range(job.world)], timedelta(seconds=PATIENCE))


def _gloo(meeting: str, rank: int, world: int) -> None:
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", f"file://{meeting}", patience, world_size=world, rank=rank)


def _together(job: Job, model: torch.nn.Module, add: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    """A step of SGD with the sum of all workers' gradients.

    The rate is that of one batch: as many batches as there are workers move the parameters as far as they
    do one after another.
    """
    params = list(model.parameters())

    def step() -> None:
        flat = torch.cat([param.grad.reshape(-1) for param in params if param.grad is not None])
        add(flat)
        with torch.no_grad():
            for param, grad in zip(
                params, torch.split(flat, [param.numel() for param in params]), strict=True
            ):
                param.sub_(grad.reshape(param.shape), alpha=job.lr)

    return step


def train(job: Job, rank: int, slow: float) -> None:
    """Trains, and says what was measured: of worker 0 a curve, of all the share of time that they waited."""
    data = job.dataset()
    torch.manual_seed(job.seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(data.inputs, job.hidden), torch.nn.ReLU(), torch.nn.Linear(job.hidden, 10)
    )
    step, rng = ARMS[job.arm](job, model, rank), np.random.default_rng([job.seed, rank])
    kept: list[tuple[float, list[torch.Tensor]]] = []
    meet(job, rank)
    begin = time.perf_counter()
    say(event="begin", rank=rank, pid=os.getpid())
    busy, done, failure = 0.0, 0, None
    try:
        for done in range(1, job.steps + 1):
            busy += compute(model, data, rng, job.step_seconds * slow)
            step()
            if done % job.every:
                continue
            if rank == 0:
                elapsed = time.perf_counter() - begin
                kept.append((elapsed, [param.detach().clone() for param in model.parameters()]))
            say(event="step", rank=rank, step=done)
    except (RuntimeError, fastps.FastpsError) as error:  # gloo's errors are RuntimeErrors
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
    seconds = time.perf_counter() - begin
    curve = [(elapsed, accuracy(model, values, data)) for elapsed, values in kept]
    say(event="end", rank=rank, steps=done, seconds=seconds, waited=1 - busy / seconds, failure=failure)
    if rank == 0:
        say(event="curve", curve=curve)


def compute(model: torch.nn.Module, data: Dataset, rng: np.random.Generator, least: float) -> float:
    """Computes the gradient of a batch, which takes `least` seconds or more. Returns these."""
    begin = time.perf_counter()
    rows = rng.integers(len(data.train_y), size=BATCH)
    images, labels = (
        torch.from_numpy(data.train_x[rows]),
        torch.from_numpy(data.train_y[rows].astype(np.int64)),
    )
    model.zero_grad()
    loss: Any = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    time.sleep(max(0.0, least - (time.perf_counter() - begin)))
    return time.perf_counter() - begin


def accuracy(model: torch.nn.Module, values: list[torch.Tensor], data: Dataset) -> float:
    """Share of the test images that a model with these values classifies correctly, in percent."""
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=True):
            param.copy_(value)
        guesses = model(torch.from_numpy(data.test_x)).argmax(1).numpy()
    return 100.0 * float(np.mean(guesses == data.test_y))


def main() -> NoReturn:
    """The program: a job as JSON, and by how much its last worker is slow."""
    torch.set_num_threads(1)
    job, slow = Job(**json.loads(sys.argv[1])), float(sys.argv[2])
    rank = job.rank
    if rank is None:
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.rank
    if rank == 0 or job.rank is not None:  # mpirun gives its input to rank 0 only
        watch_stdin(lambda _: None, lambda: os._exit(1))
    train(job, rank, slow if rank == job.world - 1 else 1.0)
    sys.stdout.flush()
    if job.rank is None:
        sys.exit()  # finalizes MPI, without which mpirun ends the other processes, too
    os._exit(0)  # peers may be dead, and libraries would wait for them


if __name__ == "__main__":
    main()
