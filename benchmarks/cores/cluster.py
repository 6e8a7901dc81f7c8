"""Workers that push to and pull from the shards of one server process, by TCP and by the default transport.

Each worker is a process. The shards are threads of one server process, as `fastps serve --shards 4` starts
them. All workers push to one large tensor, which has slices on every shard; each has its own small one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import numpy as np
from cores.counts import up_to_cores
from device.row import Figures, Row, Setting
from harness import size_name, table
from processes import Child, server_process

import fastps

SHARDS = (1, 2, 4, 8)
WORKERS = (1, 2, 4, 8, 12)
#: Shards of the row that varies the workers, and workers of the row that varies the shards.
MOST_SHARDS, MOST_WORKERS = 4, 8
TRANSPORTS = ("tcp", None)
SMALL = 4 << 10


# -- a worker ------------------------------------------------------------------------------------------------


def work(pipe: Connection, rank: int) -> None:
    """Pushes and pulls for a while at each request; answers with the transport, then with steps a second."""
    for address, transport, size, seconds in iter(pipe.recv, None):
        name = tensor(size, rank)
        gradients, out = ({name: np.full(size // 4, 1e-3, np.float32)} for _ in range(2))
        with fastps.connect(address, transport=transport, check_finite=False) as ps:
            for _ in range(3):
                ps.push_pull(gradients, out=out)
            pipe.send(", ".join(sorted({how.split(":")[0] for how in ps.transport.values()})))
            begin, count = pipe.recv(), 0
            time.sleep(max(0.0, begin - time.monotonic()))
            while time.monotonic() < begin + seconds:
                ps.push_pull(gradients, out=out)
                count += 1
            pipe.send(count / (time.monotonic() - begin))


def tensor(size: int, rank: int) -> str:
    """The name of the tensor that a worker uses."""
    return f"small {rank}" if size == SMALL else "large"


# -- all of them ---------------------------------------------------------------------------------------------


@contextmanager
def started(count: int) -> Iterator[list[Child]]:
    """Worker processes, which end with the block."""
    with ExitStack() as stack:
        workers = []
        for rank in range(count):
            workers.append(Child(work, rank))
            stack.callback(workers[-1].close)
        yield workers


def together(workers: list[Child], *request: object) -> tuple[str, float]:
    """The transport of these workers, and the steps a second of all."""
    for worker in workers:
        worker.pipe.send(request)
    transports = {worker.pipe.recv() for worker in workers}
    begin = time.monotonic() + 0.02
    for worker in workers:
        worker.pipe.send(begin)
    return ", ".join(sorted(transports)), sum(worker.pipe.recv() for worker in workers)


def rates(shards: int, workers: list[Child], counts: list[int], setting: Setting) -> list[Figures]:
    """Steps a second of each number of workers, by size and transport."""
    large, seconds = (1 << 20, 0.1) if setting.small else (16 << 20, 0.4)
    found = []
    with server_process(shards=shards) as address:
        with fastps.connect(address) as ps:
            # Each goes to the shard that has the fewest bytes, so the small ones come first.
            for size, ranks in ((SMALL, range(len(workers))), (large, [0])):
                for rank in ranks:
                    ps.register(tensor(size, rank), np.zeros(size // 4, np.float32), fastps.SGD(lr=0.01))
        for count in counts:
            for size in (large, SMALL):
                for asked in TRANSPORTS:
                    transport, rate = together(workers[:count], address, asked, size, seconds)
                    way = {"asked": asked or "default", "transport": transport}
                    found.append({"shards": shards, "workers": count, "size": size, **way, "rate": rate})
    return found


def more_workers(setting: Setting) -> Figures:
    """Rates by the number of workers, at one number of shards."""
    counts = up_to_cores(WORKERS, setting)
    shards = max(up_to_cores(range(1, MOST_SHARDS + 1), setting))
    with started(max(counts)) as workers:
        return {"by": "workers", "at": f"{shards} shards", "rates": rates(shards, workers, counts, setting)}


def more_shards(setting: Setting) -> Figures:
    """Rates by the number of shards, at one number of workers."""
    count = max(up_to_cores(range(1, MOST_WORKERS + 1), setting))
    found = []
    with started(count) as workers:
        for shards in up_to_cores(SHARDS, setting):
            found += rates(shards, workers, [count], setting)
    return {"by": "shards", "at": f"{count} workers", "rates": found}


def show(figures: Figures) -> list[str]:
    """The table: a row for each number of workers or shards."""
    by = figures["by"]
    cells: dict[int, list[str]] = {}
    first: dict[tuple[int, str], float] = {}
    for one in figures["rates"]:
        size, rate = one["size"], one["rate"]
        reference = first.setdefault((size, one["asked"]), rate)
        speed = f"{rate / 1e3:.1f} k/s" if size == SMALL else f"{rate:.0f}/s, {rate * size / 1e9:.2f} GB/s"
        cells.setdefault(one[by], []).extend([speed, f"{rate / reference:.2f}"])
    columns = [cell for size, asked in first for cell in (f"{size_name(size)}, {asked}", "to 1")]
    rows = [[str(count), *row] for count, row in cells.items()]
    default = ", ".join(sorted({one["transport"] for one in figures["rates"] if one["asked"] == "default"}))
    title = (
        f"`push_pull` with {figures['at']}; the shards are threads of one process. GB/s counts one "
        f"direction, and the default transport is {default}."
    )
    return [title, "", *table([by, *columns], rows)]


ROWS = [
    Row("workers of four shards", more_workers, show, limit=90),
    Row("shards of eight workers", more_shards, show, limit=90),
]
