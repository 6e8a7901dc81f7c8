"""Starts from a log and snapshots, with 1 to 8 shards, against plain files in the same folder."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from cores.counts import up_to_cores
from device.row import Figures, Row, Setting
from harness import table
from processes import Child

import fastps
from durable import ADAM, PUSHES, TENSOR, forget, read_once, register, running, started, written
from fastps._fastps import command_cli

SHARDS, SMALL_SHARDS = (1, 4, 8), (1, 2)
BYTES_PER_ELEMENT = 12
"""Of values and Adam's moments."""


def tensors(setting: Setting) -> int:
    """The number of tensors, each of a million elements."""
    return 2 if setting.small else 24


def counts(setting: Setting) -> Iterable[int]:
    """Numbers of shards."""
    return SMALL_SHARDS if setting.small else up_to_cores(SHARDS, setting)


def push_all(ps: fastps.ParameterServer, names: list[str], times: int) -> None:
    """Int8 pushes of random gradients to all tensors."""
    gradient = np.random.default_rng(0).random(TENSOR, np.float32)
    pushes = [ps.bind({name: gradient}, codec=fastps.Int8()) for name in names]
    for bound in pushes * times:
        ps.push(bound)


# -- a start -------------------------------------------------------------------------------------------------


def log(place: Path, shards: int, setting: Setting) -> None:
    """A data directory that has only a log: its server is killed before it takes a snapshot."""
    with running(place, shards=shards) as server, fastps.connect(server.address, check_finite=False) as ps:
        push_all(ps, register(ps, tensors(setting), ADAM), 2 if setting.small else PUSHES)
        while any(shard["counters"]["log_pending"] for shard in ps.stats()["shards"]):
            time.sleep(0.01)
        server.kill()


def replayed(place: Path, shards: int, cold: bool) -> Figures:
    """Bytes a second of a start from a copy of the log and of plain reading; `cold`: not from the cache."""
    copy = place.with_name("copy")
    shutil.copytree(place, copy)
    size = forget(copy)
    if not cold:
        read_once(copy)
    plain = read_once(copy)
    if cold:
        forget(copy)
    start = started(copy, shards)
    shutil.rmtree(copy)
    return {"plain": size / plain, "start": size / start}


def starts(setting: Setting) -> Figures:
    """Bytes of the log a second, by number of shards."""
    rows = []
    for shards in counts(setting):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "log"
            log(place, shards, setting)
            found = {name: replayed(place, shards, cold=name == "cold") for name in ("warm", "cold")}
            rows.append({"shards": shards, **found})
    return {"rows": rows}


def show_starts(figures: Figures) -> list[str]:
    """The table."""
    first = figures["rows"][0]

    def row(one: Figures) -> list[str]:
        cells = [str(one["shards"])]
        for name in ("warm", "cold"):
            start, plain = one[name]["start"], one[name]["plain"]
            cells += [
                f"{start / 1e6:.0f} MB/s",
                f"{start / first[name]['start']:.2f}",
                f"{start / plain:.2f}",
            ]
        return cells

    columns = ["shards"]
    for name in ("log in the cache", "log on the disk"):
        columns += [f"start, {name}", "to 1", "to reading"]
    return table(columns, map(row, figures["rows"]))


# -- snapshots -----------------------------------------------------------------------------------------------


def save(pipe: Connection, addresses: str) -> None:
    """Takes a snapshot at each request, and answers with its seconds."""
    # The command prints what it wrote.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while pipe.recv() is not None:
        began = time.monotonic()
        if command_cli("checkpoint", ["save", addresses]):
            raise SystemExit("the snapshot failed")
        pipe.send(time.monotonic() - began)


def saved(folder: Path, shards: int, setting: Setting) -> Figures:
    """Bytes a second of snapshots and of one file as large, which alternate."""
    count = tensors(setting)
    size = BYTES_PER_ELEMENT * TENSOR * count
    plain, snapshots = [], []
    with running(folder / "data", shards=shards) as server:
        with fastps.connect(server.address, check_finite=False) as ps:
            push_all(ps, register(ps, count, ADAM), 1)
        saver = Child(save, server.address)
        try:
            for _ in range(1 if setting.small else 3):
                snapshots.append(saver.ask("save"))
                plain.append(written(folder, bytes(1 << 20), size >> 20, sync=False))
        finally:
            saver.close()
        server.kill()
    ratio = statistics.median(theirs / ours for theirs, ours in zip(plain, snapshots, strict=True))
    return {"shards": shards, "speed": size / statistics.median(snapshots), "to plain": ratio}


def snapshots(setting: Setting) -> Figures:
    """Bytes of the state a second, by number of shards."""
    rows = []
    for shards in counts(setting):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(saved(Path(folder), shards, setting))
    return {"rows": rows}


def show_snapshots(figures: Figures) -> list[str]:
    """The table."""
    first = figures["rows"][0]["speed"]
    rows = [
        [
            str(one["shards"]),
            f"{one['speed'] / 1e6:.0f} MB/s",
            f"{one['speed'] / first:.2f}",
            f"{one['to plain']:.2f}",
        ]
        for one in figures["rows"]
    ]
    return table(["shards", "snapshot", "to 1", "to writing one file"], rows)


ROWS = [
    Row("a start from the log, by shards", starts, show_starts, limit=120),
    Row("snapshots, by shards", snapshots, show_snapshots, limit=90),
]
