"""Runs of every kind come back at random moments, byte for byte as they were pulled then."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fastps
import fastps.optimize
from fastps.commands.cli import main

HISTORY, PATIENT, MOMENTS = 1 << 30, 120.0, 50
ROWS, COLUMNS = 70, 3
#: Of a tensor and its version: its values and its optimizer state.
Had = dict[tuple[str, int], dict[str, bytes]]
OPTIMIZERS: tuple[fastps.Optimizer, ...] = (
    fastps.SGD(lr=0.05),
    fastps.SGD(lr=0.05, momentum=0.9, nesterov=True),
    fastps.Adagrad(lr=0.05),
    fastps.RMSprop(lr=0.05),
    fastps.Adadelta(lr=0.5),
    fastps.Adam(lr=0.05),
    fastps.Adam(lr=0.05, amsgrad=True),
    fastps.AdamW(lr=0.05),
    fastps.Lion(lr=0.05),
    fastps.Ftrl(lr=0.05),
    fastps.Average(lr=0.1),
    fastps.ScheduleFreeSGD(lr=0.05),
    fastps.ScheduleFreeAdamW(lr=0.05),
)
CODECS: tuple[fastps.Codec, ...] = (
    fastps.Float32(),
    fastps.BFloat16(),
    fastps.Int8(),
    fastps.Int8(stochastic=True, seed=7),
    fastps.FourBit(),
    fastps.OneBit(),
)


def connect(server: fastps.Server, name: str = "boss") -> fastps.ParameterServer:
    return fastps.connect(server, name=name, ack="logged", timeout=PATIENT)


def array(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)


def held(ps: fastps.ParameterServer, name: str) -> dict[str, bytes]:
    state = {key: np.asarray(value).tobytes() for key, value in ps.state(name).items()}
    return {"values": np.asarray(ps.pull(name)).tobytes(), **state}


def note(ps: fastps.ParameterServer, had: Had) -> None:
    """What each tensor is now, unless others change it meanwhile."""
    for name in ps.names():
        version = ps.versions(name)[name]
        now = held(ps, name)
        if ps.versions(name)[name] == version:
            had[name, version] = now


def group(mode: Callable[[], fastps.Mode]) -> Callable[[fastps.Server, Had], None]:
    """Three workers at once."""

    def train(server: fastps.Server, had: Had) -> None:
        with connect(server) as ps:
            for name in ("a", "b"):
                ps.register(name, array(np.random.default_rng(1)), optimizer=fastps.Adam(lr=0.05))

        def work(rank: int) -> None:
            rng = np.random.default_rng(rank)
            params = {name: np.zeros((ROWS, COLUMNS), np.float32) for name in ("a", "b")}
            with connect(server, f"gpu-{rank}") as ps, fastps.Worker(ps, params, mode(), rank=rank) as worker:
                for _ in range(30):
                    worker.step({name: array(rng) for name in params})
                    if rank == 0:
                        note(ps, had)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return train


def optimizers(server: fastps.Server, had: Had) -> None:
    assert {type(one) for one in OPTIMIZERS} == {*fastps.Optimizer.__subclasses__()}
    rng = np.random.default_rng(2)
    with connect(server) as ps:
        for k, optimizer in enumerate(OPTIMIZERS):
            ps.register(f"{k:02}", array(rng), optimizer=optimizer)
        ps.register("average", array(rng), optimizer=fastps.SGD(lr=0.05), average=fastps.EMA(decay=0.9))
        ps.register("half", array(rng), optimizer=fastps.Adam(lr=0.05), dtype="bfloat16")
        for _ in range(30):
            ps.push({name: array(rng) for name in ps.names()})
            note(ps, had)


def codecs(server: fastps.Server, had: Had) -> None:
    assert {type(one) for one in CODECS} == {*fastps.Codec.__subclasses__()}
    rng = np.random.default_rng(3)
    with connect(server) as ps, contextlib.ExitStack() as stack:
        workers = {}
        for k, codec in enumerate(CODECS):
            name = str(k)
            ps.register(name, array(rng), optimizer=fastps.SGD(lr=0.05, momentum=0.9))
            params = {name: np.zeros((ROWS, COLUMNS), np.float32)}
            workers[name] = stack.enter_context(fastps.Worker(ps, params, fastps.Async(), codec))
        for _ in range(30):
            for name, worker in workers.items():
                worker.step({name: array(rng)})
                worker.flush()
            note(ps, had)


def rows(server: fastps.Server, had: Had) -> None:
    rng = np.random.default_rng(4)
    rules: list[fastps.Optimizer] = [fastps.SGD(lr=0.05), fastps.Adagrad(lr=0.05), fastps.Adam(lr=0.05)]
    with connect(server) as ps:
        for k, optimizer in enumerate(rules):
            ps.register(str(k), array(rng), optimizer=optimizer)
        for step in range(40):
            few = np.sort(rng.choice(ROWS, size=1 + step % 9, replace=False))
            values = rng.normal(size=(len(few), COLUMNS)).astype(np.float32)
            ps.push({name: fastps.Sparse(few, values) for name in ps.names()})
            if step == 20:
                ps.assign({name: fastps.Sparse(few, values) for name in ps.names()})
            note(ps, had)


def programs(server: fastps.Server, had: Had) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(80, 6))
    y = np.sign(x @ np.ones(6) + rng.normal(size=80))

    def objective(params: fastps.Arrays, some: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        margin = y[some] * (x[some] @ params["w"])
        return float(np.logaddexp(0, -margin).sum()), {"w": (-y[some] / (1 + np.exp(margin))) @ x[some]}

    with connect(server) as ps:
        ps.register("w", np.zeros(6), optimizer=fastps.SGD(lr=1.0))
        for l2 in (1e-3, 1e-1):
            fastps.optimize.minimize(
                ps, ["w"], objective, samples=len(x), l2=l2, callback=lambda _: note(ps, had)
            )
            ps.push("w", rng.normal(size=6))
            note(ps, had)


RUNS: dict[str, tuple[int, Callable[[fastps.Server, Had], None]]] = {
    "sync": (2, group(lambda: fastps.Sync(workers=3))),
    "bounded": (2, group(lambda: fastps.Bounded(staleness=2))),
    "optimizers": (2, optimizers),
    "codecs": (1, codecs),
    "rows": (5, rows),
    "programs": (2, programs),
}


def check(folder: Path, had: Had, run: str) -> None:
    """Rewinds to random moments of those that were noted."""
    noted = sorted({version for _, version in had})
    moments = random.Random(run).sample(noted, min(len(noted), MOMENTS))
    for version in moments:
        with fastps.rewind(folder, to=version) as moment:
            for name in [name for name, at in had if at == version]:
                assert held(moment, name) == had[name, version], (run, name, version)


def test_every_run_comes_back_at_random_moments(tmp_path: Path) -> None:
    for run, (shards, train) in RUNS.items():
        folder, had = tmp_path / run, Had()
        with fastps.serve(shards, data_dir=folder, keep_history=HISTORY) as server:
            train(server, had)
        assert len({version for _, version in had}) >= 10, run
        check(folder, had, run)


def test_a_resharded_run_comes_back_at_random_moments(tmp_path: Path) -> None:
    before, after, had = tmp_path / "before", tmp_path / "after", Had()
    with fastps.serve(2, data_dir=before, keep_history=HISTORY) as server:
        optimizers(server, Had())
    assert main(["checkpoint", "restore", str(before), str(after), "--shards", "3"]) == 0
    rng = np.random.default_rng(6)
    with fastps.serve(3, data_dir=after, keep_history=HISTORY) as server, connect(server) as ps:
        for _ in range(30):
            ps.push({name: array(rng) for name in ps.names()})
            note(ps, had)
    check(after, had, "resharded")
